"""Whole runs of the paper's workloads through vLLM: stock at its best against ours.

Models have published shapes and random weights, every output has a fixed length, and all policies
generate for the same prompts, so all do the same work whatever a model would say. Each policy and
engine setting is an engine of its own, in a process of its own (`engine_run`), fed through the
same `VLLMEngine`. `plan_s` is shown apart and is part of `total_s`, `requests_per_s` and `tecd_s`;
engine start and warm-up aren't.

Rows go to `DIR/rows.jsonl` as they are measured. The same command goes on where it stopped, so a
lease may end at any time; with `--budget-s` it ends by itself, having begun nothing that it
expects not to finish.

    python -m benchmarks.end_to_end --out DIR                       # on a GPU
    python -m benchmarks.end_to_end --out DIR --model Qwen2-7B --workloads case_2 --repetitions 3
    python -m benchmarks.end_to_end --out DIR --model tiny          # a rehearsal on a CPU
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.end_to_end import targets as tables
from benchmarks.end_to_end.engine_run import Task, read_rows
from benchmarks.end_to_end.models import MODELS
from benchmarks.end_to_end.policies import POLICIES
from benchmarks.provenance import provenance
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
)
"""Workloads that targets are about, the most telling first: a lease may end before the last."""
DEFAULT_POLICIES = (
    "stock_sorted",
    "batchllm",
    "batchllm_stock_attention",
    "stock_as_given",
    "stock_cascade",
)
_NO_TIME = "no time was left"
_MAY_BE_MISSING = "stock_cascade"  # vLLM dropped it
_KILL_AFTER_S = 60.0  # beyond its budget: an engine that hangs


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
    parser.add_argument("--repetitions", type=int, default=1)
    parser.add_argument("--share", type=float, default=1.0, help="of each workload's requests")
    parser.add_argument("--budget-s", type=float, help="seconds for everything")
    parser.add_argument(
        "--engine", type=json.loads, default={}, metavar="JSON", help="fields of a spec's engine"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, help="also write the last line here, with all steps")
    args = parser.parse_args(argv)
    if args.repetitions < 1 or not 0 < args.share <= 1:
        parser.error("--repetitions must be at least 1, --share above 0 and at most 1")
    return args


def tasks(args: argparse.Namespace, done: Sequence[Mapping[str, Any]]) -> Iterator[Task]:
    """What is left to run, an engine each.

    All engines' first settings come before any second ones, and an engine's first repetitions
    before its second ones.
    """
    measured = {
        (row["policy"], row["settings"], row["workload"], row["repetition"])
        for row in done
        if is_of(row, args)
    }
    chosen = [
        (position, policy, name)
        for policy in args.policies
        for position, name in enumerate(POLICIES[policy].settings)
        if not args.settings or name in args.settings
    ]
    for _, policy, settings in sorted(chosen, key=lambda each: each[0]):
        runs = [
            (workload, repetition)
            for repetition in range(args.repetitions)
            for workload in args.workloads
            if (policy, settings, workload, repetition) not in measured
        ]
        if runs:
            yield Task(
                policy,
                settings,
                runs,
                str(args.out / "rows.jsonl"),
                args.model,
                args.share,
                args.seed,
                engine=args.engine,
            )


def is_of(row: Mapping[str, Any], args: argparse.Namespace) -> bool:
    """Whether a row was measured as these arguments would measure it here and now."""
    wanted = {"model": args.model, "seed": args.seed, "share": args.share, "engine": args.engine}
    here = provenance()
    wanted |= {name: here[name] for name in ("git_sha", "device", "versions")}
    return all(row[name] == value for name, value in wanted.items())


def run_all(args: argparse.Namespace, began_at: float) -> dict[str, str]:
    """Run every task; returns why policies are missing, by their names and settings."""
    missing = {}
    left = list(tasks(args, list(read_rows(args.out / "rows.jsonl"))))
    while left:
        task = left.pop(0)
        budget_s = None
        if args.budget_s is not None:
            # An even part of what is left: later engines get what earlier ones leave.
            budget_s = (args.budget_s - (time.monotonic() - began_at)) / (len(left) + 1)
            if budget_s <= 0:
                missing[f"{task.policy} {task.settings}"] = _NO_TIME
                continue
        print(f"== {task.policy}, {task.settings} settings", flush=True)
        if reason := run_engine(replace(task, budget_s=budget_s), args.out):
            missing[f"{task.policy} {task.settings}"] = reason
            print(f"== failed: {reason}", flush=True)
    return missing


def run_engine(task: Task, folder: Path) -> str | None:
    """One engine in a process of its own, its output in a log; returns why it failed, if it did."""
    log = folder / f"{task.model}-{task.policy}-{task.settings}.log"
    timeout = None if task.budget_s is None else task.budget_s + _KILL_AFTER_S
    command = [sys.executable, "-P", "-m", "benchmarks.end_to_end.engine_run", task.to_json()]
    environment = os.environ | POLICIES[task.policy].environment
    with log.open("w", encoding="utf-8") as file:
        try:
            done = subprocess.run(
                command,
                stdout=file,
                stderr=subprocess.STDOUT,
                env=environment,
                timeout=timeout,
                check=False,
            )
        except subprocess.TimeoutExpired:
            return f"killed {_KILL_AFTER_S:.0f} s after its time was up; see {log.name}"
    if done.returncode == 0:
        return None
    lines = [line for line in log.read_text(encoding="utf-8").splitlines() if line.strip()]
    return f"exit code {done.returncode}; {log.name} ends with: {lines[-1][:300] if lines else ''}"


def print_tables(summaries: Sequence[tables.Summary]) -> None:
    """For a terminal."""
    print(
        f"{'workload':28}{'policy':26}{'settings':9}  requests/s (least to most)  TECD, s", end=""
    )
    print("  steps  saved  preempted")
    for each in summaries:
        spread = f"({each.least_requests_per_s:.2f} to {each.most_requests_per_s:.2f})"
        print(
            f"{each.workload:28}{each.policy:26}{each.settings:9}{each.requests_per_s:9.2f}"
            f" {spread:>20}{each.tecd_s:9.2f}{each.num_steps:7.0f}{each.saving_ratio:7.3f}"
            f"{each.preemptions:11.0f}"
        )
    for workload, ratios in tables.speedups(summaries).items():
        print(workload, " ".join(f"{name}={ratio}" for name, ratio in ratios.items()))


def main() -> None:
    began_at = time.monotonic()
    args = parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    missing = run_all(args, began_at)
    rows = [row for row in read_rows(args.out / "rows.jsonl") if is_of(row, args)]
    rows = [row for row in rows if row["workload"] in args.workloads]
    rows = [row for row in rows if row["policy"] in args.policies]
    summaries = tables.summarize(rows)
    print_tables(summaries)
    counts = args.model == "Mistral-7B" and args.share == 1.0
    report = {
        "benchmark": "end_to_end",
        "model": args.model,
        "rows": tables.as_json(summaries),
        "speedups": tables.speedups(summaries),
        "targets": tables.targets(summaries) if counts else None,
        "missing": missing,
        "workloads": args.workloads,
        "repetitions": args.repetitions,
        "share": args.share,
        "seed": args.seed,
        "engine": args.engine,
        **provenance(),
    }
    if args.json:
        args.json.write_text(json.dumps(report | {"runs": rows}), encoding="utf-8")
    print(json.dumps(report))
    if not rows:
        sys.exit("nothing was measured")
    failed = [name for name, reason in missing.items() if reason != _NO_TIME]
    if any(not name.startswith(_MAY_BE_MISSING) for name in failed):
        sys.exit(1)


if __name__ == "__main__":
    main()
