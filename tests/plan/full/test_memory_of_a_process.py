"""What a process that plans holds at its peak, on one core as on all; the plan is the same."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from support.fake_job import DS, job_fields
from support.tokenizer_families import make_qwen

from batchllm_operator.stored_plan.stored_plan import StoredPlan

NUM_CORES = len(os.sched_getaffinity(0))
PLAN_AND_REPORT = """
import json, os, sys
os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: int(sys.argv[3])])
from batchllm_operator.plan.plan_job import plan_job
from batchllm_operator.spec import parse_spec
plan = plan_job(parse_spec(json.loads(sys.argv[1]), source="test"), sys.argv[2])
print(json.dumps({"uri": plan.folder.uri, "status": open("/proc/self/status").read()}))
"""


def test_the_budget_bounds_what_the_process_holds(tmp_path: Path) -> None:
    """Prompts of 280 MiB in all, with 60 MiB for all that grows with the table."""
    write_documents(tmp_path, 70_000)
    budget = least_budget(tmp_path) + (16 << 20)
    report = run_plan(tmp_path, budget)
    counts = StoredPlan.open(report["uri"]).manifest.counts
    assert counts.num_requests == 70_000 and counts.num_groups == 10_000
    assert counts.num_logical_tokens > 2 * 60 << 20


def test_one_core_and_all_make_the_same_plan_within_the_least_budget(tmp_path: Path) -> None:
    """With a model's tokenizer: fastokens has a thread for each core, and so have others."""
    make_qwen(tmp_path / "model")
    config = {"model_type": "qwen2", "max_position_embeddings": 8192}
    (tmp_path / "model" / "config.json").write_text(json.dumps(config))
    write_documents(tmp_path, 20_000)
    model: dict[str, Any] = {
        "model": {"path": str(tmp_path / "model")},
        "engine": {"extra_args": {"byte_tokens": False}},
    }
    budget = least_budget(tmp_path, **model) + (8 << 20)
    plans: list[dict[str, bytes]] = []
    for num_cores in (1, NUM_CORES):
        folder = Path(run_plan(tmp_path, budget, num_cores, **model)["uri"])
        plans.append({path.name: path.read_bytes() for path in folder.glob("*.*")})
        shutil.rmtree(tmp_path / "out")
    assert plans[0] == plans[1] and "shard-00001.parquet" in plans[0]


def write_documents(lake: Path, num_rows: int) -> None:
    partition = lake / "documents" / f"ds={DS}"
    partition.mkdir(parents=True)
    schema = pa.schema([("row_key", pa.int64()), ("document", pa.string()), ("query", pa.string())])
    with pq.ParquetWriter(partition / "a.parquet", schema) as writer:
        for start in range(0, num_rows, 1000):
            keys = range(start, start + 1000)
            documents = [f"{key // 7:>8} is where this document starts " * 50 for key in keys]
            queries = [f"question {key}" for key in keys]
            writer.write_table(pa.table([pa.array(keys), documents, queries], schema=schema))


def least_budget(lake: Path, **changes: Any) -> int:
    """What a refused plan says that it takes."""
    refused = start_plan(lake, 1, NUM_CORES, **changes)
    assert refused.returncode != 0
    found = re.search(r"at least (\d+) \(", refused.stderr)
    assert found is not None, refused.stderr
    return int(found.group(1))


def run_plan(lake: Path, budget: int, num_cores: int = NUM_CORES, **changes: Any) -> dict[str, str]:
    done = start_plan(lake, budget, num_cores, **changes)
    assert done.returncode == 0, done.stderr
    report: dict[str, str] = json.loads(done.stdout)
    peak = re.search(r"VmHWM:\s+(\d+) kB", report["status"])
    assert peak is not None and int(peak.group(1)) * 1024 <= budget
    return report


def start_plan(
    lake: Path, budget: int, num_cores: int, **changes: Any
) -> subprocess.CompletedProcess[str]:
    fields = job_fields(str(lake), planner={"memory_budget_bytes": budget}, **changes)
    command = [sys.executable, "-P", "-c", PLAN_AND_REPORT, json.dumps(fields), DS, str(num_cores)]
    return subprocess.run(command, capture_output=True, text=True, check=False)
