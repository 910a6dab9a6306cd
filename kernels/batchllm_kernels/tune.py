"""Tune an architecture's settings on its chip, and write the JSON that ships.

    python -m batchllm_kernels.tune [--step launch ...] [--out FILE] [--json RAW]

Candidates are compiled, checked against attention in float32, and timed; one replaces the current
settings if it is faster over all workloads and no slower for requests that share nothing. Exits
with 2 without a GPU.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from datetime import date
from pathlib import Path
from typing import Any, Final

import torch
import triton
from triton import knobs
from triton.backends.compiler import GPUTarget

from batchllm_kernels.compile import fp8_dtype
from batchllm_kernels.compiling.chips import CHIPS, Chip
from batchllm_kernels.prefix_attention.config import (
    ARCHITECTURES,
    ArchConfig,
    config_file,
    detect_arch,
    load_config,
    to_json,
)
from batchllm_kernels.tuning.candidates import shortlist
from batchllm_kernels.tuning.search import Bench, tune_gate, tune_launch, tune_split, workloads_of
from batchllm_kernels.tuning.workloads import shape_for

STEPS: Final = ("launch", "split", "gate")
NUM_CANDIDATES: Final = 24
_LEAST_TIMING: Final = 1 / 3
"""Part of the budget that timing gets, however long compiling takes."""
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
    device = torch.device("cuda")
    arch = detect_arch(device)
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
            config = _tune_launch(config, key, options.budget_s, raw, device)
    if "split" in steps:
        config = tune_split(config, _bench(arch, _MODEL_KEY, "split", device), raw)
    if "gate" in steps:
        config = tune_gate(config, _bench(arch, _MODEL_KEY, "gate", device), raw)
    config = replace(config, tuned_on=_tuned_on(start, steps, keys, device))
    if options.json:
        options.json.write_text(json.dumps(raw, indent=2))
    nearest = Path(str(config_file(options.start_from or arch)))
    out = options.out or nearest.with_name(f"{arch}.json")
    out.write_text(to_json(config))
    print(out)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m batchllm_kernels.tune")
    add = parser.add_argument
    add("--head-dim", action="append", type=int, help="only these")
    add("--kv-bits", action="append", type=int, choices=(8, 16), help="only these")
    add("--step", action="append", choices=STEPS, help="only these (all)")
    add("--budget-s", type=float, default=180, help="each head size: compile, time (%(default)s)")
    add("--start-from", choices=sorted(ARCHITECTURES), help="for a GPU without settings")
    add("--out", type=Path, help="where to write (the package's file)")
    add("--json", type=Path, help="write raw timings there")
    return parser


def _tune_launch(
    config: ArchConfig,
    key: tuple[int, int],
    budget_s: float,
    raw: dict[str, Any],
    device: torch.device,
) -> ArchConfig:
    began_at = time.monotonic()
    jobs = len(os.sched_getaffinity(0))
    candidates = shortlist(config.arch, chip_of(device), *key, count=NUM_CANDIDATES, jobs=jobs)
    left_s = budget_s - (time.monotonic() - began_at)
    timing_s = max(left_s, _LEAST_TIMING * budget_s)
    bench = _bench(config.arch, key, "launch", device)
    return tune_launch(config, candidates, bench, budget_s=timing_s, raw=raw)


def _bench(arch: str, key: tuple[int, int], step: str, device: torch.device) -> Bench:
    kv_dtype = torch.bfloat16 if key[1] == 16 else fp8_dtype(arch)
    return Bench(shape_for(*key), workloads_of(step), device, kv_dtype)


def chip_of(device: torch.device) -> Chip:
    """The chip that candidates must fit: a known one, or by the driver's numbers."""
    arch = detect_arch(device)
    if arch in CHIPS:
        return CHIPS[arch]
    properties: Any = torch.cuda.get_device_properties(device)  # torch's stubs lack some
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


def _tuned_on(
    start: ArchConfig, steps: Sequence[str], keys: Sequence[tuple[int, int]], device: torch.device
) -> str:
    """Device, library versions, date, and what was tuned; what was there before, if only a part."""
    is_whole = len(keys) == len(start.launch) and len(steps) == len(STEPS)
    entries = ", ".join(f"{head_dim}/{kv_bits}" for head_dim, kv_bits in keys)
    names = [f"launch ({entries})" if step == "launch" else step for step in steps]
    before = f"; before: {start.tuned_on}" if start.tuned_on and not is_whole else ""
    name = torch.cuda.get_device_properties(device).name
    return (
        f"{name}, torch {torch.__version__}, Triton {triton.__version__}, "
        f"{date.today().isoformat()}: {', '.join(names)}{before}"
    )


if __name__ == "__main__":
    sys.exit(main())
