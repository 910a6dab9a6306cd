"""Tune an architecture's settings on its chip, and write the JSON that ships.

    PYTHONPATH=scripts python -m kernel_settings.tune
        [--step launch ...] [--out FILE] [--json RAW]

Candidates are compiled, checked against attention in float32, and timed; one replaces the current
settings if it is faster over all workloads and no slower for requests that share nothing. Exits
with 2 without a GPU.
"""

import argparse
import json
import os
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Executor, ProcessPoolExecutor
from dataclasses import replace
from datetime import date
from functools import partial
from itertools import product, zip_longest
from multiprocessing import get_context
from pathlib import Path
from typing import Any, Final

import torch
import triton
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.errors import TritonError

from batchllm_kernels.prefix_attention.config import (
    ARCHITECTURES,
    ArchConfig,
    LaunchConfig,
    SplitRule,
    Tiling,
    config_file,
    detect_arch,
    load_config,
    to_json,
)
from kernel_settings.compile import Kernel, attention_kernel, compile_kernel, fp8_dtype
from kernel_settings.report import CHIPS, Chip, Report
from kernel_settings.search import Bench, fastest, tune_gate
from kernel_settings.workloads import shape_for, workloads_of

STEPS: Final = ("launch", "split", "gate")
NUM_CANDIDATES: Final = 24
_LEAST_TIMING: Final = 1 / 3
"""Part of the budget that timing gets, however long compiling takes."""
SPLITS: Final = tuple(SplitRule(least, pieces) for least in (128, 256, 512) for pieces in (2, 4, 8))
_STEP_BYTES: Final = (4096, 16384)
"""Bytes of a narrow step's keys of one head: fewer are overhead, more don't fit the registers."""
_MOST_PROGRAMS: Final = 4
_GPU: Final = torch.device("cuda")
_MODEL_KEY: Final = (128, 16)
"""Split rule and gate are the same for all head sizes, timed with this one and 16-bit KV."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Tune what the options ask for; returns 2 if that is impossible here."""
    options = _parser().parse_args(arguments)
    if knobs.runtime.interpret:
        print("tune: unset TRITON_INTERPRET, kernels must be compiled", file=sys.stderr)
        return 2
    if not torch.cuda.is_available():
        print("tune: timing needs a GPU, and there is none", file=sys.stderr)
        return 2
    arch = detect_arch(_GPU)
    if arch not in ARCHITECTURES and not options.start_from:
        print(
            f"tune: no settings ship for {arch}; name the nearest of "
            f"{', '.join(ARCHITECTURES)} with --start-from",
            file=sys.stderr,
        )
        return 2
    start = load_config(options.start_from or arch)
    config, raw, steps = replace(start, arch=arch), dict[str, Any](), options.step or STEPS
    keys = [
        (launch.head_dim, launch.kv_bits)
        for launch in start.launch
        if launch.head_dim in (options.head_dim or [launch.head_dim])
        and launch.kv_bits in (options.kv_bits or [launch.kv_bits])
    ]
    if "launch" in steps:
        for key in keys:
            config = _tune_launch(config, key, options.budget_s, raw)
    if "split" in steps:
        tried = {str(rule): replace(config, split=rule) for rule in (config.split, *SPLITS)}
        bench = _bench(arch, _MODEL_KEY, "split")
        config = fastest("split", tried, bench, budget_s=options.budget_s, raw=raw)
    if "gate" in steps:
        config = tune_gate(config, _bench(arch, _MODEL_KEY, "gate"), raw)
    config = replace(config, tuned_on=_tuned_on(start, steps, keys))
    if options.json:
        options.json.write_text(json.dumps(raw, indent=2))
    nearest = config_file(options.start_from or arch)
    out = options.out or nearest.with_name(f"{arch}.json")
    out.write_text(to_json(config))
    print(out)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m kernel_settings.tune")
    add = parser.add_argument
    add("--head-dim", action="append", type=int, help="only these")
    add("--kv-bits", action="append", type=int, choices=(8, 16), help="only these")
    add("--step", action="append", choices=STEPS, help="only these (all)")
    add("--budget-s", type=float, default=180, help="of each head size, and the split rule (180)")
    add("--start-from", choices=sorted(ARCHITECTURES), help="for a GPU without settings")
    add("--out", type=Path, help="where to write (the package's file)")
    add("--json", type=Path, help="write raw timings there")
    return parser


def _tune_launch(
    config: ArchConfig, key: tuple[int, int], budget_s: float, raw: dict[str, Any]
) -> ArchConfig:
    began_at = time.monotonic()
    jobs = len(os.sched_getaffinity(0))
    candidates = shortlist(config.arch, chip_of_gpu(), *key, count=NUM_CANDIDATES, jobs=jobs)
    tried = {
        str(launch): with_launch(config, launch)
        for launch in (config.launch_config(*key), *candidates)
    }
    left_s = budget_s - (time.monotonic() - began_at)
    timing_s = max(left_s, _LEAST_TIMING * budget_s)
    name, bench = f"{config.arch} {key[0]}/{key[1]}", _bench(config.arch, key, "launch")
    return fastest(name, tried, bench, budget_s=timing_s, raw=raw)


def with_launch(config: ArchConfig, launch: LaunchConfig) -> ArchConfig:
    """The settings with others for a head size and width."""
    key = launch.head_dim, launch.kv_bits
    launches = (launch if (old.head_dim, old.kv_bits) == key else old for old in config.launch)
    return replace(config, launch=tuple(launches))


def _bench(arch: str, key: tuple[int, int], step: str) -> Bench:
    kv_dtype = torch.bfloat16 if key[1] == 16 else fp8_dtype(arch)
    return Bench(shape_for(*key), workloads_of(step), _GPU, kv_dtype)


def chip_of_gpu() -> Chip:
    """The chip that candidates must fit: a known one, or by the driver's numbers."""
    arch = detect_arch(_GPU)
    if arch in CHIPS:
        return CHIPS[arch]
    properties: Any = torch.cuda.get_device_properties(_GPU)  # torch's stubs lack some
    if torch.version.hip:
        # As the AMD chips with settings: registers of four SIMDs, 64 KiB of LDS.
        return replace(CHIPS["gfx942"], target=GPUTarget("hip", arch, properties.warp_size))
    return Chip(
        GPUTarget("cuda", properties.major * 10 + properties.minor, 32),
        properties.shared_memory_per_multiprocessor,
        properties.shared_memory_per_block_optin,
        properties.regs_per_multiprocessor,
        properties.max_threads_per_multi_processor,
    )


def _tuned_on(start: ArchConfig, steps: Sequence[str], keys: Sequence[tuple[int, int]]) -> str:
    """Device, library versions, date, and what was tuned; what was there before, if only a part."""
    is_whole = len(keys) == len(start.launch) and len(steps) == len(STEPS)
    entries = ", ".join(f"{head_dim}/{kv_bits}" for head_dim, kv_bits in keys)
    names = [f"launch ({entries})" if step == "launch" else step for step in steps]
    before = f"; before: {start.tuned_on}" if start.tuned_on and not is_whole else ""
    name = torch.cuda.get_device_properties(_GPU).name
    return (
        f"{name}, torch {torch.__version__}, Triton {triton.__version__}, "
        f"{date.today().isoformat()}: {', '.join(names)}{before}"
    )


def grid(
    head_dim: int, kv_bits: int, *, is_amd: bool
) -> tuple[list[Tiling], list[tuple[Tiling, int, Mapping[str, int]]]]:
    """Narrow tilings, and wide ones with warps and options of a vendor's compiler.

    To try more, add to the tuples here.
    """
    row_bytes = 1 << (head_dim * kv_bits // 8 - 1).bit_length()
    least, most = _STEP_BYTES
    steps = [n for n in (16, 32, 64, 128) if least <= n * row_bytes <= most]
    options: dict[int, tuple[Mapping[str, int], ...]]
    if is_amd:
        stages, wide_stages = [2, 3], [2]
        nonkdim = {"waves_per_eu": 2, "matrix_instr_nonkdim": 16}
        options = {4: ({"waves_per_eu": 2}, nonkdim), 8: (nonkdim,)}
    else:
        stages, wide_stages = [3, 4], [3, 4]
        # Register limits for 3 or 4 programs at once; with 8 warps, 2 would spill.
        options = {4: ({}, {"maxnreg": 168}, {"maxnreg": 128}), 8: ({},)}
    rows = {4: (32, 64, 128) if is_amd else (32, 64), 8: (64, 128)}
    keys = (16, 32) if head_dim == 256 else (32, 64)
    return [Tiling(16, n, count) for n, count in product(steps, stages)], [
        (Tiling(m, n, count), warps, extra)
        for warps, sizes in rows.items()
        for m, n, count, extra in product(sizes, keys, wide_stages, options[warps])
    ]


def shortlist(
    arch: str, chip: Chip, head_dim: int, kv_bits: int, *, count: int, jobs: int
) -> list[LaunchConfig]:
    """Up to `count` settings that compile for a chip without a fault, the most promising first.

    Those run two programs at once, have a large wide tile, and prefetch many bytes. Tries every
    wide tiling alone first, in `jobs` processes, so that those that spill aren't tried with every
    narrow one.
    """
    is_amd = chip.target.backend == "hip"
    narrow, wide = grid(head_dim, kv_bits, is_amd=is_amd)

    def bytes_ahead(launch: LaunchConfig) -> int:
        # Seen in the async waits of compiled kernels (Triton 3.6 and 3.9): on NVIDIA the copies of
        # one step less are outstanding when a step begins than on AMD, which waits for its own in
        # registers.
        ahead = max(0, launch.narrow.num_stages - (1 if is_amd else 2))
        return launch.programs_per_processor * ahead * launch.narrow.block_n

    def rank(launch: LaunchConfig) -> tuple[bool, int, int]:
        return launch.programs_per_processor >= 2, launch.wide.block_m, bytes_ahead(launch)

    with ProcessPoolExecutor(jobs, get_context("spawn")) as pool:
        alone = [
            LaunchConfig(head_dim, kv_bits, Tiling(16, 16, 1), tiling, warps, 1, options)
            for tiling, warps, options in wide
        ]
        by_wide = [
            sorted(
                (replace(launch, narrow=tiling, programs_per_processor=1) for tiling in narrow),
                key=bytes_ahead,
                reverse=True,
            )
            for launch in sorted(
                _fitting(pool, arch, chip, alone), key=lambda launch: -launch.wide.block_m
            )
        ]
        waiting = [launch for turn in zip_longest(*by_wide) for launch in turn if launch]
        fits: list[LaunchConfig] = []
        while waiting and len(fits) < count:
            missing = count - len(fits)
            fits += _fitting(pool, arch, chip, waiting[:missing])
            waiting = waiting[missing:]
    return sorted(fits, key=rank, reverse=True)


def _fitting(
    pool: Executor, arch: str, chip: Chip, launches: Sequence[LaunchConfig]
) -> Iterator[LaunchConfig]:
    """Those that compile without a fault, plain and with extras, for most programs at once."""
    # As in the shipped settings: by the last tile on NVIDIA, by a second launch on AMD.
    merges = chip.target.backend == "cuda"
    kernels = [
        attention_kernel(arch, launch, merge_here=merges, has_extras=has_extras)
        for launch in launches
        for has_extras in (False, True)
    ]
    reports = list(pool.map(partial(_report_of, chip=chip), kernels))
    for launch, both in zip(launches, zip(reports[::2], reports[1::2], strict=True), strict=True):
        if not any(report.fault for report in both):
            programs = min(report.numbers["programs"] for report in both)
            yield replace(launch, programs_per_processor=min(programs, _MOST_PROGRAMS))


def _report_of(kernel: Kernel, chip: Chip) -> Report:
    """The compiler's report; a refused kernel has a fault."""
    try:
        return compile_kernel(kernel, chip)
    except (TritonError, RuntimeError) as error:  # LLVM's passes fail with RuntimeError
        return Report(kernel.arch, kernel.name, {}, fault=f"doesn't compile: {error}")


if __name__ == "__main__":
    sys.exit(main())
