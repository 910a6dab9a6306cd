"""What a process that plans holds at its peak."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
from support.fake_job import DS, job_fields

from batchllm_operator.pipeline.stored_plan import StoredPlan

PLAN_AND_REPORT = """
import json, sys
from batchllm_operator.pipeline.plan import plan_job
from batchllm_operator.spec import parse_spec
plan = plan_job(parse_spec(json.loads(sys.argv[1]), source="test"), sys.argv[2])
print(json.dumps({"uri": plan.folder.uri, "status": open("/proc/self/status").read()}))
"""


def test_the_budget_bounds_what_the_process_holds(tmp_path: Path) -> None:
    """Prompts of 280 MiB in all, with 60 MiB for all that grows with the table."""
    partition = tmp_path / "documents" / f"ds={DS}"
    partition.mkdir(parents=True)
    schema = pa.schema([("row_key", pa.int64()), ("document", pa.string()), ("query", pa.string())])
    with pq.ParquetWriter(partition / "a.parquet", schema) as writer:
        for start in range(0, 70_000, 1000):
            keys = range(start, start + 1000)
            documents = [f"{key // 7:>8} is where this document starts " * 50 for key in keys]
            queries = [f"question {key}" for key in keys]
            writer.write_table(pa.table([pa.array(keys), documents, queries], schema=schema))
    refused = run_plan(tmp_path, 1)
    assert refused.returncode != 0
    found = re.search(r"at least (\d+) \(", refused.stderr)
    assert found is not None
    budget = int(found.group(1)) + (16 << 20)
    done = run_plan(tmp_path, budget)
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    peak = re.search(r"VmHWM:\s+(\d+) kB", report["status"])
    assert peak is not None and int(peak.group(1)) * 1024 <= budget
    counts = StoredPlan.open(report["uri"]).manifest.counts
    assert counts.num_requests == 70_000 and counts.num_groups == 10_000
    assert counts.num_logical_tokens > 2 * 60 << 20


def run_plan(lake: Path, budget: int) -> subprocess.CompletedProcess[str]:
    fields = job_fields(str(lake), planner={"memory_budget_bytes": budget})
    command = [sys.executable, "-P", "-c", PLAN_AND_REPORT, json.dumps(fields), DS]
    return subprocess.run(command, capture_output=True, text=True, check=False)
