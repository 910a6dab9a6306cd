"""Tune an architecture's settings, and write the JSON that ships.

    python -m batchllm_kernels.tune --compile-only [--arch sm90 ...]     # anywhere
    python -m batchllm_kernels.tune [--dry-run] [--json RAW]             # on a GPU

With `--compile-only`, candidates are compiled ahead of time, without their chips, and a table shows
their resources. On a GPU the same candidates are checked against attention in float32, then timed;
a candidate replaces the current settings if it is faster over all workloads and no slower for
requests that share nothing. Exits with 2 without a GPU.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, replace
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
    KV_BITS,
    ArchConfig,
    config_file,
    detect_arch,
    load_config,
    to_json,
)
from batchllm_kernels.tuning.bench import DeviceBench, GraphTimer
from batchllm_kernels.tuning.candidates import Candidate, Compiler, grid_for
from batchllm_kernels.tuning.tuner import Tuner, gate_workloads
from batchllm_kernels.tuning.workloads import launch_workloads, shape_for, split_workloads

STEPS: Final = ("launch", "split", "gate")
_LEAST_TIMING: Final = 1 / 3
"""Part of the budget that timing gets, however long compiling takes."""
_MODEL_HEAD_DIM: Final = 128
"""Split rule and gate are the same for all head sizes, timed with this one and 16-bit KV."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Compile or tune, by the options; returns 2 if that is impossible here."""
    options = _parser().parse_args(arguments)
    if knobs.runtime.interpret:
        print("tune: unset TRITON_INTERPRET, kernels must be compiled", file=sys.stderr)
        return 2
    if options.compile_only:
        return _compile_only(options)
    if not torch.cuda.is_available():
        print(
            "tune: timing needs a GPU, and there is none; --compile-only needs none",
            file=sys.stderr,
        )
        return 2
    return _tune(options)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m batchllm_kernels.tune")
    add = parser.add_argument
    add("--compile-only", action="store_true", help="compile candidates, time nothing")
    add("--arch", action="append", choices=sorted(ARCHITECTURES), help="with --compile-only")
    add("--head-dim", action="append", type=int, help="only these")
    add("--kv-bits", action="append", type=int, choices=KV_BITS, help="only these")
    add("--candidates", type=int, default=24, help="for each head size (%(default)s)")
    add("--jobs", type=int, default=len(os.sched_getaffinity(0)), help="compile so many at once")
    add("--step", action="append", choices=STEPS, help="only these (all)")
    add("--budget-s", type=float, default=180, help="each head size: compile, time (%(default)s)")
    add("--start-from", choices=sorted(ARCHITECTURES), help="for a GPU without settings")
    add("--out", type=Path, help="where to write (the package's file)")
    add("--dry-run", action="store_true", help="print the settings, write nothing")
    add("--json", type=Path, help="write reports or raw timings there")
    return parser


def _keys(options: argparse.Namespace, config: ArchConfig) -> list[tuple[int, int]]:
    """The entries that the options ask for."""
    return [
        (head_dim, kv_bits)
        for head_dim, kv_bits in config.launch
        if head_dim in (options.head_dim or [head_dim]) and kv_bits in (options.kv_bits or KV_BITS)
    ]


def _compile_only(options: argparse.Namespace) -> int:
    rows = []
    for arch in options.arch or ARCHITECTURES:
        config = load_config(arch)
        for head_dim, kv_bits in _keys(options, config):
            print(f"{arch}, head_dim {head_dim}, {kv_bits}-bit KV", flush=True)
            compiler = Compiler(arch, head_dim, kv_bits, options.jobs)
            launch = config.launch[head_dim, kv_bits]
            (report,) = compiler.reports([launch], with_extras=True)
            current = Candidate(launch, head_dim, kv_bits, report)
            grid = grid_for(ARCHITECTURES[arch], head_dim, kv_bits)
            found = [current, *compiler.shortlist(grid, options.candidates)]
            for place, one in enumerate(sorted(found, key=lambda each: each.rank, reverse=True), 1):
                print(f"{place:>3} {_row(one)}{'  (current)' if one is current else ''}")
                rows.append({"settings": one.label, "current": one is current, "place": place})
                rows[-1] |= asdict(one.report) | {"kv_bytes_in_flight": one.kv_bytes_in_flight}
    if options.json:
        options.json.write_text(json.dumps(rows, indent=2))
    return 0


def _row(one: Candidate) -> str:
    report, usage = one.report, one.report.usage
    return (
        f"{one.label:<58} {usage.registers:>4} registers {usage.shared_bytes:>7} B shared "
        f"{one.kv_bytes_in_flight:>7} B in flight" + (f"  {report.fault}" if report.fault else "")
    )


def _tune(options: argparse.Namespace) -> int:
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
    tuner = Tuner(replace(start, arch=arch))
    steps = options.step or STEPS
    keys = _keys(options, start)
    if "launch" in steps:
        for key in keys:
            _tune_launch(tuner, key, options, device)
    if "split" in steps:
        tuner.tune_split(_bench(arch, _MODEL_HEAD_DIM, 16, "split", device))
    if "gate" in steps:
        tuner.tune_gate(_bench(arch, _MODEL_HEAD_DIM, 16, "gate", device))
    partly = len(steps) < len(STEPS)
    what = ", ".join(steps)
    if "launch" in steps and len(keys) < len(start.launch):
        partly = True
        entries = ", ".join(f"{head_dim}/{kv_bits}" for head_dim, kv_bits in keys)
        what = what.replace("launch", f"launch ({entries})")
    before = f"; before: {start.tuned_on}" if partly and start.tuned_on else ""
    text = to_json(replace(tuner.config, tuned_on=describe_device(device, what) + before))
    if options.json:
        options.json.write_text(json.dumps(tuner.raw, indent=2))
    if options.dry_run:
        print(text, end="")
        return 0
    out = options.out or _package_file(arch, options.start_from or arch)
    out.write_text(text)
    print(out)
    return 0


def _tune_launch(
    tuner: Tuner, key: tuple[int, int], options: argparse.Namespace, device: torch.device
) -> None:
    arch = tuner.config.arch
    compiler = Compiler(arch, *key, options.jobs, chip_of(device))
    vendor = "amd" if torch.version.hip else "nvidia"
    tuner.progress.say(f"{arch} {key[0]}/{key[1]}: compiling")
    began_at = time.monotonic()
    found = compiler.shortlist(grid_for(vendor, *key), options.candidates)
    # The most promising first: time may run out.
    candidates = [one.launch for one in sorted(found, key=lambda one: one.rank, reverse=True)]
    bench = _bench(arch, *key, "launch", device)
    left_s = options.budget_s - (time.monotonic() - began_at)
    timing_s = max(left_s, _LEAST_TIMING * options.budget_s)
    tuner.tune_launch(*key, candidates, bench, budget_s=timing_s)


def _bench(arch: str, head_dim: int, kv_bits: int, step: str, device: torch.device) -> DeviceBench:
    workloads = {"launch": launch_workloads, "split": split_workloads, "gate": gate_workloads}
    return DeviceBench(
        shape_for(head_dim, kv_bits),
        workloads[step](),
        device,
        GraphTimer(device),
        kv_dtype=torch.bfloat16 if kv_bits == 16 else fp8_dtype(arch),
    )


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


def describe_device(device: torch.device, what: str) -> str:
    """For `tuned_on`: device, driver, library versions and date, and the tuned settings."""
    name = torch.cuda.get_device_properties(device).name
    return (
        f"{name}, driver {_driver_version()}, torch {torch.__version__}, "
        f"Triton {triton.__version__}, {date.today().isoformat()}: {what}"
    )


def _driver_version() -> str:
    if torch.version.hip:
        return f"of ROCm {torch.version.hip}"
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        said = subprocess.run(command, capture_output=True, text=True, check=True, timeout=30)
    except (OSError, subprocess.SubprocessError):
        return "unknown"
    return said.stdout.split()[0] if said.stdout.split() else "unknown"


def _package_file(arch: str, start_from: str) -> Path:
    """Path of an architecture's settings in this package, existing or not."""
    if arch not in ARCHITECTURES:
        print(f"tune: add {arch} to ARCHITECTURES in prefix_attention/config.py", file=sys.stderr)
    return Path(str(config_file(start_from))).with_name(f"{arch}.json")


if __name__ == "__main__":
    sys.exit(main())
