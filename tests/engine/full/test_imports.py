"""What a process imports that plans and runs a job."""

import json
import subprocess
import sys
from pathlib import Path

from support.fake_job import DS, document_rows, job_fields, write_table

PLAN_AND_RUN = """
import json, sys
from batchllm_operator.plan.plan_job import plan_job
from batchllm_operator.run.run_shards import run_worker
from batchllm_operator.spec import parse_spec
plan = plan_job(parse_spec(json.loads(sys.argv[1]), source="test"), sys.argv[2])
assert run_worker(plan).shards
import batchllm_operator.engine.vllm.engine, batchllm_operator.engine.vllm.profiling
print(json.dumps([name for name in sys.modules if name.startswith("batchllm_operator.")]))
"""


def test_one_engine_imports_nothing_of_replicas(tmp_path: Path) -> None:
    """A plan and a run, and all that starts vLLM, with `engine.replicas: 1`."""
    write_table(tmp_path / "documents", document_rows())
    fields = json.dumps(job_fields(str(tmp_path)))
    command = [sys.executable, "-P", "-c", PLAN_AND_RUN, fields, DS]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    modules: list[str] = json.loads(done.stdout.splitlines()[-1])
    assert "batchllm_operator.engine.vllm.engine" in modules
    apart = ("runahead", "replica", "chain")
    assert not {name for name in modules if any(word in name for word in apart)}
