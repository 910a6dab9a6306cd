"""Plans jobs on Spark, as `batchllm plan` does; several of them in one session.

Usage: spark_driver.py DS '[JOB, ...]'. Parts and ranges have some kilobytes, so that small tables
have many of them. After each of several jobs, stderr has a line `exit code N`.
"""

from __future__ import annotations

import json
import sys
from contextlib import nullcontext

from batchllm_operator import cli
from batchllm_operator.spark import ranges, reading
from batchllm_operator.spark.session import spark_session
from batchllm_operator.spec.loading import parse_spec_json

ranges.RANGE_BYTES, reading.PART_BYTES = 12_000, 500  # type: ignore[misc]


def main(ds: str, listed: str) -> int:
    jobs = json.loads(listed)
    first = parse_spec_json(jobs[0], source="the first job")
    code = 0
    with nullcontext() if len(jobs) == 1 else spark_session(first):
        for job in jobs:
            code = cli.main(["plan", "--job-json", job, "--ds", ds, "--on", "spark"])
            if len(jobs) > 1:
                print("exit code", code, file=sys.stderr, flush=True)
    return code


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
