"""Whole runs of the paper's workloads through vLLM: stock at its best against ours.

Models have published shapes and random weights, every output has a fixed length, and all policies
generate for the same prompts, so all do the same work whatever a model would say. Each policy and
engine setting is an engine of its own, in a process of its own (`engine_run`), fed through the
same `VLLMEngine`. `plan_s` is shown apart and is part of `total_s`, `requests_per_s` and `tecd_s`;
engine start and warm-up aren't.

Rows go to `DIR/rows.jsonl` as they are measured. The same command goes on where it stopped, so a
lease may end at any time; with `--budget-s` it ends by itself, and begins no run if one like it
took longer than is left. Its report has all rows of the same code and device in that file, so that
several commands may measure a part each. The exit code is 1 if an engine failed, and 3 if something
is left to measure.

    python -m benchmarks.end_to_end --out DIR                       # on a GPU
    python -m benchmarks.end_to_end --out DIR --model Qwen2-7B --workloads case_2 --repetitions 3
    python -m benchmarks.end_to_end --out DIR --model tiny          # a rehearsal on a CPU
"""

import argparse
import json
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from batchllm_operator.amounts import text_table
from benchmarks.end_to_end.models import MODELS
from benchmarks.end_to_end.policies import POLICIES
from benchmarks.end_to_end.processes import end_on_sigterm, run_logged
from benchmarks.end_to_end.targets import TARGET_DEVICES, Summary, speedups, summarize, targets
from benchmarks.end_to_end.task import Task, read_rows
from benchmarks.provenance import provenance_of_another_process
from benchmarks.workloads import WORKLOADS

FIRST = (
    "case_1",
    "micro_2000_200_degree_16",
    "case_2",
    "no_sharing",
    "micro_2000_200_degree_4",
    "micro_1000_1000_degree_16",
    "micro_200_2000_degree_16",
    "case_1_output_400",
    "micro_1000_1000_degree_4",
    "micro_200_2000_degree_4",
)
"""All workloads, the most telling first: a lease may end before the last."""
DEFAULT_POLICIES = (
    "stock_sorted",
    "batchllm",
    "stock_as_given",
    "batchllm_stock_attention",
    "batchllm_graphs",
    "stock_llm",
    "batchllm_unpaced",
)
_TOLD_BY_TARGETS = DEFAULT_POLICIES[:3]
_NO_TIME = "no time was left"
_KILL_AFTER_S = 60.0  # beyond its budget: an engine that hangs
_SETTLE_S = 10.0  # after a kill, until the driver has the memory back
_START_S = 90.0  # of an engine, before one has been seen


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__.partition("\n\n")[0], prog="python -m benchmarks.end_to_end"
    )
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="rows and logs")
    parser.add_argument("--model", default="Mistral-7B", choices=MODELS)
    parser.add_argument("--workloads", nargs="+", default=list(FIRST), choices=list(WORKLOADS))
    parser.add_argument(
        "--policies", nargs="+", default=list(DEFAULT_POLICIES), choices=list(POLICIES)
    )
    parser.add_argument("--settings", nargs="+", help="of the policies', only these")
    parser.add_argument("--repetitions", type=int, default=1, help="of each run (1)")
    parser.add_argument("--budget-s", type=float, help="seconds for everything")
    parser.add_argument(
        "--engine", type=json.loads, default={}, metavar="JSON", help="fields of a spec's engine"
    )
    parser.add_argument("--json", type=Path, help="also write the last line here, with all steps")
    args = parser.parse_args(argv)
    if args.repetitions < 1:
        parser.error("--repetitions must be at least 1")
    return args


Run = tuple[str, str, str, int]
"""Policy, settings, workload and number of the repetition."""


def wanted_runs(args: argparse.Namespace) -> list[Run]:
    """All that is to be measured, engine by engine: what most targets are about before the rest,
    first settings before second ones, and an engine's first repetitions before its second ones.
    """
    chosen = [
        (position, policy, settings)
        for policy in args.policies
        for position, settings in enumerate(POLICIES[policy].settings)
        if not args.settings or settings in args.settings
    ]
    chosen.sort(key=lambda run: (run[1] not in _TOLD_BY_TARGETS, run[0]))
    return [
        (policy, settings, workload, repetition)
        for _, policy, settings in chosen
        for repetition in range(args.repetitions)
        for workload in args.workloads
    ]


def run_of(row: Mapping[str, Any]) -> Run:
    """Which run a row is of."""
    return row["policy"], row["settings"], row["workload"], row["repetition"]


def is_of(row: Mapping[str, Any], args: argparse.Namespace, here: Mapping[str, Any]) -> bool:
    """Whether a row was measured as these arguments would measure it here and now."""
    wanted = {"model": args.model, "engine": args.engine}
    wanted |= {name: here[name] for name in ("code", "device", "versions")}
    return all(row[name] == value for name, value in wanted.items())


def run_all(
    args: argparse.Namespace, here: Mapping[str, Any], began_at: float
) -> tuple[list[dict[str, Any]], dict[str, str]]:
    """Run what hasn't been measured.

    Returns:
        The rows that count, also of earlier commands that wanted others, and why engines failed,
        by their policies and settings.
    """
    path = args.out / "rows.jsonl"
    wanted = wanted_runs(args)
    failed: dict[str, str] = {}
    for policy, settings in dict.fromkeys(run[:2] for run in wanted):
        rows = [row for row in read_rows(path) if is_of(row, args, here)]
        measured = {run_of(row) for row in rows}
        runs = [run[2:] for run in wanted if run[:2] == (policy, settings) and run not in measured]
        if not runs:
            continue
        budget_s = None
        if args.budget_s is not None:
            budget_s = args.budget_s - (time.monotonic() - began_at)
            start_s = max((row["engine_start_s"] for row in rows), default=_START_S)
            alike_s = [row["total_s"] for row in rows if row["workload"] == runs[0][0]]
            if budget_s < start_s + max(alike_s, default=0.0):
                continue
        print(f"== {policy}, {settings} settings", flush=True)
        common = {"rows_file": str(path), "model": args.model, "engine": args.engine}
        task = Task(policy, settings, runs, budget_s=budget_s, **common)
        if reason := run_engine(task, args.out):
            failed[f"{policy} {settings}"] = reason
            print(f"== failed: {reason}", flush=True)
    return [row for row in read_rows(path) if is_of(row, args, here)], failed


def missing_runs(
    wanted: Sequence[Run], rows: Sequence[Mapping[str, Any]], failed: Mapping[str, str]
) -> dict[str, dict[str, Any]]:
    """For each policy and setting that lacks a run: why, and which workloads it lacks."""
    measured = {run_of(row) for row in rows}
    lacking: dict[str, list[str]] = {}
    for policy, settings, workload, repetition in wanted:
        if (policy, settings, workload, repetition) not in measured:
            lacking.setdefault(f"{policy} {settings}", []).append(workload)
    return {
        name: {"reason": failed.get(name, _NO_TIME), "workloads": list(dict.fromkeys(workloads))}
        for name, workloads in lacking.items()
    }


def run_engine(task: Task, folder: Path) -> str | None:
    """One engine in a process of its own, its output in a log; returns why it failed, if it did."""
    log = folder / f"{task.model}-{task.policy}-{task.settings}.log"
    timeout_s = None if task.budget_s is None else task.budget_s + _KILL_AFTER_S
    command = [sys.executable, "-P", "-m", "benchmarks.end_to_end.one_engine", task.to_json()]
    reason = run_logged(command, log, POLICIES[task.policy].environment, timeout_s)
    if reason and reason.startswith("killed"):
        time.sleep(_SETTLE_S)
    return reason


def print_tables(summaries: Sequence[Summary]) -> None:
    """For a terminal."""
    lines = [("workload", "policy", "settings", "requests/s", "TECD, s", "steps", "saved")]
    for summary in summaries:
        line = (summary.workload, summary.policy, summary.settings, summary.speed())
        tecd_s = "" if summary.tecd_s is None else f"{summary.tecd_s:.2f}"
        steps = "" if summary.num_steps is None else f"{summary.num_steps:.0f}"
        lines.append((*line, tecd_s, steps, f"{summary.saving_ratio:.1%}"))
    print(*text_table(lines, left=(0, 1, 2)), sep="\n")
    for workload, ratios in speedups(summaries).items():
        print(workload, " ".join(f"{name}={ratio}" for name, ratio in ratios.items()))


def main() -> int:
    """0 if all was measured, 1 if something failed, 3 if time ran out."""
    began_at = time.monotonic()
    args = parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    end_on_sigterm()
    here = provenance_of_another_process()
    rows, failed = run_all(args, here, began_at)
    missing = missing_runs(wanted_runs(args), rows, failed)
    summaries = summarize(rows)
    print_tables(summaries)
    is_judged = args.model == "Mistral-7B" and any(gpu in here["device"] for gpu in TARGET_DEVICES)
    report = {
        "benchmark": "end_to_end",
        "model": args.model,
        "rows": [asdict(summary) for summary in summaries],
        "speedups": speedups(summaries),
        "targets": targets(summaries) if is_judged else None,
        "missing": missing,
        "doubts": sorted({f"{row['policy']}: {doubt}" for row in rows for doubt in row["doubts"]}),
        "workloads": args.workloads,
        "repetitions": args.repetitions,
        "engine": args.engine,
        **here,
    }
    if args.json:
        args.json.write_text(json.dumps(report | {"runs": rows}), encoding="utf-8")
    print(json.dumps(report))
    return 1 if failed else 3 if missing else 0


if __name__ == "__main__":
    sys.exit(main())
