"""Prefix-shared attention beside the attention that others ship, in the paper's Fig. 8 settings.

First a gate: our kernel and every baseline against the reference in float32. Then, on a GPU,
times: a row for each setting, all contenders in turn on the same inputs, once as calls and once
as a replayed CUDA graph, in which no launch waits for the host. A run goes through several layers,
each with its own cache, so that no keys are found in the L2 cache. Beside the times: the bytes
that a step has to move and the time they take at the data sheet's rate. Without a GPU the gate runs
small cases in Triton's interpreter, and rows hold the model only.

    python -m benchmarks.kernel
    python -m benchmarks.kernel --only 'decode_256/1024/256/*' --adjacent --json kernel.json

Exits with 1 when the gate fails.
"""

import argparse
import fnmatch
import json
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from batchllm_kernels.prefix_attention import AttentionShape, BatchLimits
from benchmarks import kernel_gate, kernel_targets, kernel_timing
from benchmarks.kernel_contenders import Contender, Ours, find_baselines
from benchmarks.kernel_rows import (
    DTYPE,
    LIMITS,
    OURS,
    SHAPE,
    Bench,
    measured,
    modelled,
    time_plan,
)
from benchmarks.kernel_work import find_chip
from benchmarks.kernel_workloads import Setting, settings
from benchmarks.provenance import provenance

INTERPRETER_SHAPE = AttentionShape(num_q_heads=4, num_kv_heads=2, head_dim=64, block_size=16)
INTERPRETER_LIMITS = BatchLimits(max_num_requests=8, max_num_tokens=64)
INTERPRETER_DTYPE = torch.float32
_SHOWN = (
    *("setting", "ours_ms", "fa3_ms", "speedup_vs_fa3", "speedup_vs_best", "predicted_speedup"),
    *("ideal_ms", "unique_gb_per_s", "unique_bandwidth_share", "unique_kv_bytes", "plain_kv_bytes"),
)
"""Fields of a row that are printed."""


def run_gate(
    bench: Bench, baselines: Sequence[Contender], *, quick: bool
) -> tuple[str, list[kernel_gate.Check], dict[str, str]]:
    """The gate's verdict on ours, all checks, and by name what is wrong with a baseline."""
    on_gpu = bench.device.type != "cpu"
    shape = SHAPE if on_gpu else INTERPRETER_SHAPE
    try:
        ours = Ours(shape, LIMITS if on_gpu else INTERPRETER_LIMITS, bench.device)
    # Not there, or not for this device: nothing of ours can be measured, and the gate says why.
    except Exception as error:  # noqa: BLE001
        return f"our kernel can't be had: {type(error).__name__}: {error}", [], {}
    checks, unfit = kernel_gate.run_gate(
        [ours, *baselines],
        kernel_gate.gpu_settings(quick=quick) if on_gpu else kernel_gate.interpreter_settings(),
        shape,
        DTYPE if on_gpu else INTERPRETER_DTYPE,
        bench.device,
        bench.seed,
    )
    verdict = unfit.pop(OURS, "pass")
    return verdict, checks, unfit


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="few settings, few repetitions")
    parser.add_argument("--json", type=Path, help="also write the JSON object here, row by row")
    parser.add_argument("--only", default="*", metavar="PATTERN", help="family/prefix/own/degree")
    parser.add_argument(
        "--adjacent", action="store_true", help="rows whose groups are adjacent, beside the others"
    )
    parser.add_argument(
        "--without",
        nargs="+",
        action="extend",
        default=[],
        metavar="BASELINE",
        help="leave it out",
    )
    parser.add_argument("--budget-s", type=float, help="begin no row after so many seconds")
    return parser.parse_args()


def measure(
    bench: Bench,
    args: argparse.Namespace,
    baselines: Sequence[Contender],
    report: dict[str, Any],
    started_at: float,
) -> None:
    """Add rows and targets to the report; with times where the gate passed on a GPU."""
    every = settings(quick=args.quick, adjacent=args.adjacent)
    wanted = [setting for setting in every if fnmatch.fnmatch(setting.name, args.only)]
    on_gpu = bench.device.type != "cpu" and report["gate"] == "pass"
    ours = Ours(SHAPE, LIMITS, bench.device) if on_gpu else None
    plan_host_us = None
    if ours is not None:
        report["copy_bytes_per_s"] = kernel_timing.copy_bytes_per_s(bench.device)
        report["plan"] = time_plan(bench, ours)
        plan_host_us = report["plan"]["host"]["median_us"]
        wanted.sort(key=lambda setting: not kernel_targets.is_target(setting))  # those first
    rows: list[tuple[Setting, dict[str, Any]]] = []
    for setting in wanted:
        if args.budget_s is not None and time.monotonic() - started_at > args.budget_s:
            report["left_out"].append(setting.name)
            continue
        row = measured(bench, setting, ours, baselines) if ours else modelled(bench, setting)
        rows.append((setting, row))
        report["rows"].append(row)
        shown = (f"{name}={row[name]}" for name in _SHOWN if row.get(name) is not None)
        print(*shown, flush=True)
        if ours is not None:
            write(report, args.json)  # in case that this is the last one
            torch.cuda.empty_cache()
    chip = bench.chip.name if bench.chip else None
    report["targets"] = kernel_targets.judge(rows, plan_host_us, chip)


def write(report: dict[str, Any], path: Path | None) -> None:
    if path is not None:
        whole = path.with_name(f"{path.name}.new")
        whole.write_text(json.dumps(report))
        whole.replace(path)  # a kill leaves all rows until the one before


def main() -> int:
    args = parse_args()
    started_at = time.monotonic()
    if not torch.cuda.is_available():
        assert "triton" not in sys.modules, "Triton reads this once, when it is imported"
        os.environ["TRITON_INTERPRET"] = "1"
    about = provenance()
    device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    contenders, missing = find_baselines(device)
    missing |= dict.fromkeys(args.without, "left out (--without)")
    baselines = [contender for contender in contenders if contender.name not in missing]
    repetitions = 10 if args.quick else 30
    bench = Bench(device, find_chip(about["device"]), 0, repetitions, warmup=3)
    verdict, checks, unfit = run_gate(bench, baselines, quick=args.quick)
    missing |= {name: f"fails the gate: {reason}" for name, reason in unfit.items()}
    worst = kernel_gate.worst_errors(checks)
    print(f"gate: {verdict}; worst errors {worst}; missing {missing}", flush=True)
    report: dict[str, Any] = {
        "benchmark": "kernel",
        "gate": verdict,
        **about,
        "gate_errors": worst,
        "num_gate_checks": len(checks),
        "baselines_missing": missing,
        "shape": "32 query heads, 8 KV heads of 128, bf16, blocks of 16",
        "seed": bench.seed,
        "timing": "CUDA graph of num_layers layers, per layer; ratios of medians",
        "rows": [],
        "left_out": [],
    }
    fit = [contender for contender in baselines if contender.name not in missing]
    measure(bench, args, fit, report, started_at)
    for target in report["targets"]:
        print(f"target {target}")
    write(report, args.json)
    print(json.dumps(report), flush=True)
    return 0 if verdict == "pass" else 1


if __name__ == "__main__":
    sys.exit(main())
