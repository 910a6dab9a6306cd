"""What plans and commits of large tables take on Spark, on paper, from measured constants:

    python -m benchmarks.spark_costs benchmarks/results/plan_spark_cpu.json \
        benchmarks/results/commit_spark_cpu.json

Rows have 1,500 tokens, as those of the benchmarks. Time is CPU time over `--cores`, if shuffled
bytes take no longer: each is written, sent and read, and what an executor can't sort in memory
spilled once.
"""

import argparse
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from batchllm_operator.spark.ranges import MOST_RANGES, RANGE_BYTES

ROWS: Final = (10**7, 10**8, 10**9, 10**10)
BYTES_PER_ROW: Final = 340
"""Numbers of a row in the memory of the task of its range."""
US_PER_HOUR: Final = 3.6e9


def row(
    plan: Mapping[str, float], commit_us: float, num_rows: int, cores: int, usd_per_core_hour: float
) -> list[str]:
    """A line of the table, from what `plan_spark` reports and the CPU time of a row's commit."""
    key_bytes = num_rows * plan["marginal_key_bytes"]
    ranges = max(1, min(round(key_bytes / RANGE_BYTES), MOST_RANGES))
    plan_h, commit_h = (num_rows * us / US_PER_HOUR for us in (plan["marginal_us"], commit_us))
    return [
        f"10^{len(str(num_rows)) - 1}",
        f"{num_rows * plan['marginal_shuffled_bytes'] / 1e12:,.2f} TB",
        f"{ranges:,}",
        f"{key_bytes / ranges / 1e6:,.0f} MB",
        f"{num_rows / ranges * BYTES_PER_ROW / 1e6:,.0f} MB",
        f"{plan_h:,.1f}",
        f"{commit_h:,.1f}",
        f"{(plan_h + commit_h) / cores:,.2f} h",
        f"{(plan_h + commit_h) * usd_per_core_hour:,.2f}",
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("plan", type=Path, help="JSON of benchmarks.plan_spark")
    parser.add_argument("commit", type=Path, help="JSON of benchmarks.commit_spark")
    parser.add_argument("--cores", type=int, default=100, help="of executors")
    parser.add_argument("--usd-per-core-hour", type=float, default=0.05)
    args = parser.parse_args()
    plan, commit = (json.loads(path.read_text()) for path in (args.plan, args.commit))
    cores, usd = args.cores, args.usd_per_core_hour
    heads = ["rows", "shuffled, compressed", "ranges", "prompts of a range"]
    heads += ["memory for their numbers", "plan, core-hours", "commit, core-hours"]
    heads += [f"both on {cores} cores", f"USD at {usd:g} a core-hour"]
    lines = [heads, ["---"] * len(heads)]
    lines += [row(plan, commit["executor_us"], num_rows, cores, usd) for num_rows in ROWS]
    for line in lines:
        print(f"| {' | '.join(line)} |")


if __name__ == "__main__":
    main()
