"""Prefix-shared attention beside the attention that others ship, in the paper's Fig. 8 settings.

First a gate: our kernel and every baseline against the reference in float32. Then, on a GPU,
times: a row for each setting, all contenders in turn on the same inputs, once as calls and once
as a replayed CUDA graph, in which no launch waits for the host. A run goes through several layers,
each with a cache of its own, so nobody finds its keys in the L2 cache. Beside the times: the bytes
that a step has to move and the time they take at the data sheet's rate. Without a GPU the gate runs
small cases in Triton's interpreter, and rows hold the model only.

    python -m benchmarks.kernel
    python -m benchmarks.kernel --only 'decode_256/1024/256/*' --json kernel.json

Exits with 1 when the gate fails.
"""

from __future__ import annotations

import argparse
import fnmatch
import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from batchllm_kernels.prefix_attention import AttentionShape, BatchLimits, find_shared_prefixes
from batchllm_kernels.prefix_attention.work import (
    AttentionWork,
    Chip,
    count_work,
    find_chip,
    read_chips,
)
from benchmarks import kernel_gate, kernel_targets, kernel_timing
from benchmarks.kernel_contenders import Contender, Ours, find_baselines, vllm_cache_layout
from benchmarks.kernel_workloads import (
    CacheLayout,
    Family,
    Setting,
    groups,
    lengths,
    make_layer,
    make_step,
    settings,
)
from benchmarks.provenance import provenance

SHAPE = AttentionShape(num_q_heads=32, num_kv_heads=8, head_dim=128, block_size=16)
INTERPRETER_SHAPE = AttentionShape(num_q_heads=4, num_kv_heads=2, head_dim=64, block_size=16)
DTYPE, INTERPRETER_DTYPE = torch.bfloat16, torch.float32
LIMITS = BatchLimits(max_num_requests=1024, max_num_tokens=8192)  # as an engine has them
MODELLED_CHIP = "H100"
OURS, FA3 = "ours", "fa3"


@dataclass(frozen=True, slots=True)
class Bench:
    """What all rows have in common."""

    device: torch.device
    layout: CacheLayout
    chip: Chip | None
    """The device, if its rates are known."""
    seed: int
    repetitions: int
    warmup: int

    @property
    def model_chip(self) -> Chip:
        return self.chip or read_chips()[MODELLED_CHIP]

    def rng(self, setting: Setting) -> np.random.Generator:
        """Fresh for each setting, and the same whatever else is measured."""
        return np.random.default_rng([self.seed, 2, *setting.name.encode()])


def model_row(setting: Setting, work: AttentionWork, chip: Chip) -> dict[str, Any]:
    """What a step has to do, and how long that takes at best."""
    return {
        "setting": setting.name,
        "family": setting.family.name,
        "prefix": setting.prefix,
        "own": setting.own,
        "degree": setting.degree or "all",
        "num_requests": setting.family.num_requests,
        "unique_kv_bytes": work.unique_kv_bytes,
        "plain_kv_bytes": work.plain_kv_bytes,
        "q_out_bytes": work.q_out_bytes,
        "partials_bytes": work.partials_bytes,
        "flop": work.flop,
        "modelled_on": chip.name,
        "ideal_ms": round(work.ideal_s(chip) * 1e3, 6),
        "plain_ideal_ms": round(work.plain_s(chip) * 1e3, 6),
        "predicted_speedup": round(work.predicted_speedup(chip), 3),
    }


def modelled(bench: Bench, setting: Setting) -> dict[str, Any]:
    """A row without times."""
    rng = bench.rng(setting)
    query_lens, seq_lens = lengths(setting, rng)
    prefixes = [group for group in groups(setting, rng) if len(group.requests) > 1]
    work = count_work(query_lens, seq_lens, prefixes, SHAPE)
    return model_row(setting, work, bench.model_chip)


def measured(
    bench: Bench, setting: Setting, ours: Ours, baselines: Sequence[Contender]
) -> dict[str, Any]:
    """A row with everybody's times."""
    rng = bench.rng(setting)
    torch.manual_seed(int(rng.integers(2**31)))
    step = make_step(setting, SHAPE, rng, bench.device)
    work = count_work(step.query_lens, step.seq_lens, step.prefixes, SHAPE)
    count = kernel_timing.num_layers(work.unique_kv_bytes + work.q_out_bytes, bench.device)
    layers = [make_layer(step, DTYPE, bench.layout, poisoned=False) for _ in range(count)]
    found = find_shared_prefixes(step.batch, SHAPE.block_size, ours.planner.gate)
    planned = count_work(step.query_lens, step.seq_lens, found, SHAPE)
    runs: dict[str, Callable[[], object]] = {}
    failures: dict[str, str] = {}
    for contender in (ours, *baselines):
        try:
            calls = contender.prepare(step, layers).calls
            graph = kernel_timing.capture(calls)
        # One that fails in this setting says so in its row, and the others are measured.
        except Exception as error:  # noqa: BLE001
            failures[contender.name] = f"{type(error).__name__}: {error}"
            torch.cuda.synchronize()
            continue
        runs[f"{contender.name}/eager"] = lambda calls=calls: [call() for call in calls]
        runs[f"{contender.name}/graph"] = graph.replay
    spreads = kernel_timing.time_in_turn(runs, warmup=bench.warmup, repetitions=bench.repetitions)
    plan = {"plan": lambda: ours.planner.plan(step.batch)}
    plan_ms = kernel_timing.time_in_turn(plan, warmup=2, repetitions=10)["plan"]
    times: dict[str, dict[str, Any]] = {}
    for name, spread in spreads.items():
        contender_name, _, mode = name.partition("/")
        per_layer = kernel_timing.Spread(
            spread.median / count, spread.p20 / count, spread.p80 / count, spread.repetitions
        )
        times.setdefault(contender_name, {})[mode] = per_layer.row("ms")
    return {
        **model_row(setting, work, bench.model_chip),
        "planned_kv_bytes": planned.unique_kv_bytes,
        "num_layers": count,
        "repetitions": bench.repetitions,
        "times": times,
        "failures": failures,
        "plan_device": plan_ms.row("ms"),
        **compare(times, work, bench.chip),
    }


def compare(
    times: dict[str, dict[str, Any]], work: AttentionWork, chip: Chip | None
) -> dict[str, Any]:
    """Ours against the others, as graphs; FlashAttention 3 with the splits that suit it best."""
    graph_ms = {name: each["graph"]["median_ms"] for name, each in times.items()}
    fa3_ms = min((ms for name, ms in graph_ms.items() if name.startswith(FA3)), default=None)
    ours_ms = graph_ms.get(OURS)
    if ours_ms is None:
        return {"ours_ms": None, "fa3_ms": fa3_ms}
    bytes_per_s = work.unique_kv_bytes / (ours_ms / 1e3)
    best_others = min((ms for name, ms in graph_ms.items() if name != OURS), default=None)
    return {
        "ours_ms": ours_ms,
        "fa3_ms": fa3_ms,
        "speedup_vs_fa3": round(fa3_ms / ours_ms, 4) if fa3_ms else None,
        "speedup_vs_best": round(best_others / ours_ms, 4) if best_others else None,
        "unique_gb_per_s": round(bytes_per_s / 1e9, 1),
        "unique_bandwidth_share": round(bytes_per_s / chip.hbm_bytes_per_s, 4) if chip else None,
    }


def time_plan(bench: Bench, ours: Ours) -> dict[str, Any]:
    """Host and device time of planning a step of 512 requests."""
    family = Family(f"decode_{kernel_targets.PLAN_REQUESTS}", 0, kernel_targets.PLAN_REQUESTS)
    setting = Setting(family, 1024, 256, 16)
    step = make_step(setting, SHAPE, bench.rng(setting), bench.device)
    on_device = {"plan": lambda: ours.planner.plan(step.batch)}
    spread = kernel_timing.time_in_turn(on_device, warmup=10, repetitions=100)["plan"]
    host = kernel_timing.host_us(lambda: ours.planner.plan(step.batch), warmup=50, repetitions=500)
    return {"setting": setting.name, "host": host.row("us"), "device": spread.row("ms")}


def run_gate(
    bench: Bench, baselines: Sequence[Contender], *, quick: bool
) -> tuple[str, list[kernel_gate.Check], dict[str, str]]:
    """The gate's verdict on ours, all checks, and by name what is wrong with a baseline."""
    on_gpu = bench.device.type != "cpu"
    shape = SHAPE if on_gpu else INTERPRETER_SHAPE
    try:
        ours = Ours(shape, LIMITS, bench.device)
    # Not there, or not for this device: nothing of ours can be measured, and the gate says why.
    except Exception as error:  # noqa: BLE001
        return f"our kernel can't be had: {type(error).__name__}: {error}", [], {}
    checks, raised = kernel_gate.run_gate(
        [ours, *baselines],
        kernel_gate.gpu_settings(quick=quick) if on_gpu else kernel_gate.interpreter_settings(),
        shape,
        DTYPE if on_gpu else INTERPRETER_DTYPE,
        bench.layout,
        bench.device,
        bench.seed,
    )
    for check in checks:
        if not check.passed and check.contender not in raised:
            raised[check.contender] = (
                f"{check.setting}: error {check.error:.2g}, at most {check.limit:.2g}"
            )
    verdict = raised.pop(OURS, "pass")
    return verdict, checks, raised


def print_row(row: dict[str, Any]) -> None:
    def number(key: str, form: str) -> str:
        value = row.get(key)
        return format(value, form) if value is not None else "-".rjust(int(form.split(".")[0]))

    print(
        f"{row['setting']:28}{number('ours_ms', '9.4f')}{number('fa3_ms', '9.4f')}"
        f"{number('speedup_vs_fa3', '8.2f')}{number('speedup_vs_best', '8.2f')}"
        f"{number('predicted_speedup', '9.2f')}{number('ideal_ms', '9.4f')}"
        f"{number('unique_gb_per_s', '9.0f')}{number('unique_bandwidth_share', '8.1%')}"
        f"{row['unique_kv_bytes'] / 1e6:10.1f}{row['plain_kv_bytes'] / 1e6:10.1f}",
        flush=True,
    )


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="few settings, few repetitions")
    parser.add_argument("--json", type=Path, help="also write the JSON object here, row by row")
    parser.add_argument("--only", default="*", metavar="PATTERN", help="family/prefix/own/degree")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--repetitions", type=int, help="default 30; 10 with --quick")
    parser.add_argument("--layout", choices=["separate", "interleaved", "packed"], help="of the KV")
    parser.add_argument("--budget-s", type=float, help="begin no row after so many seconds")
    return parser.parse_args()


def main() -> int:
    args = parse_args()
    started_at = time.monotonic()
    device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    if device.type == "cpu":
        assert "triton" not in sys.modules, "Triton reads this once, when it is imported"
        os.environ["TRITON_INTERPRET"] = "1"
    about = provenance()
    baselines, missing = find_baselines(device)
    layout: CacheLayout = args.layout or "interleaved"
    if args.layout is None and any(each.name.startswith(FA3) for each in baselines):
        layout = vllm_cache_layout(SHAPE)
    bench = Bench(
        device,
        layout,
        find_chip(about["device"]),
        args.seed,
        args.repetitions or (10 if args.quick else 30),
        warmup=3,
    )
    verdict, checks, unfit = run_gate(bench, baselines, quick=args.quick)
    missing |= {name: f"fails the gate: {reason}" for name, reason in unfit.items()}
    baselines = [each for each in baselines if each.name not in missing]
    worst = {
        name: max((c.error for c in checks if c.contender == name), default=None)
        for name in dict.fromkeys(check.contender for check in checks)
    }
    print(f"gate: {verdict}; worst errors {worst}; missing {missing}")

    wanted = [each for each in settings(quick=args.quick) if fnmatch.fnmatch(each.name, args.only)]
    report: dict[str, Any] = {
        "benchmark": "kernel",
        "gate": verdict,
        **about,
        "gate_errors": worst,
        "num_gate_checks": len(checks),
        "baselines_missing": missing,
        "shape": "32 query heads, 8 KV heads of 128, bf16, blocks of 16",
        "kv_layout": layout,
        "seed": args.seed,
        "timing": "CUDA graph of num_layers layers, per layer; ratios of medians",
        "rows": [],
        "left_out": [],
    }
    on_gpu = device.type != "cpu" and verdict == "pass"
    ours = Ours(SHAPE, LIMITS, device) if on_gpu else None
    if ours is not None:
        report["copy_bytes_per_s"] = kernel_timing.copy_bytes_per_s(device)
        report["plan"] = time_plan(bench, ours)
        wanted.sort(key=lambda setting: not kernel_targets.is_target(setting))  # those first
    print(
        f"{'setting':28}{'ours ms':>9}{'FA3 ms':>9}{'vs FA3':>8}{'vs best':>8}{'predicted':>9}"
        f"{'ideal ms':>9}{'GB/s':>9}{'of peak':>8}{'unique MB':>10}{'plain MB':>10}"
    )
    rows: list[tuple[Setting, dict[str, Any]]] = []
    for setting in wanted:
        if args.budget_s is not None and time.monotonic() - started_at > args.budget_s:
            report["left_out"].append(setting.name)
            continue
        row = measured(bench, setting, ours, baselines) if ours else modelled(bench, setting)
        rows.append((setting, row))
        report["rows"].append(row)
        print_row(row)
        if args.json and ours:
            args.json.write_text(json.dumps(report))
            torch.cuda.empty_cache()
    plan_host_us = report["plan"]["host"]["median_us"] if ours else None
    chip = bench.chip.name if bench.chip else None
    report["targets"] = kernel_targets.judge(rows, plan_host_us, chip)
    for target in report["targets"]:
        print(f"target {target}")
    if args.json:
        args.json.write_text(json.dumps(report))
    print(json.dumps(report), flush=True)
    return 0 if verdict == "pass" else 1


if __name__ == "__main__":
    sys.exit(main())
