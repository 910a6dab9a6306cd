"""A backfill of many days, a few at a time, in the Jobs of one cluster."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from support.fake_job import JobFolder, document_rows
from support.fork_server import ForkServer
from support.forked_children import fork_children
from support.kubernetes.cluster import Cluster, cluster, kubernetes_backend
from support.pod_shards import Shards
from support.task_runs import TaskInstance

from batchllm_operator.commit.commit_run import commit_run
from batchllm_operator.operators import BatchLLMGenerateOperator
from batchllm_operator.operators.jobs import watch
from batchllm_operator.plan.plan_job import plan_job
from batchllm_operator.spec import load_spec

__all__ = ["cluster", "kubernetes_backend"]

DAYS = [f"2026-01-{day:02}" for day in range(1, 31)]
MAX_ACTIVE_RUNS = 3


def test_each_of_thirty_days_has_its_outputs_and_no_job_is_left(
    cluster: Cluster, commands: ForkServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fork_children(commands, monkeypatch)
    monkeypatch.setattr(watch, "_LOOK_S", 0.3)
    folder, shards = JobFolder(tmp_path), Shards(cluster, tmp_path, "deferred")
    spec = load_spec(folder.write_spec("job", planner={"num_shards": 1}))

    def run_day(ds: str) -> int:
        folder.write_rows(ds, document_rows(2, 1))
        uri = plan_job(spec, ds).folder.uri

        def make() -> BatchLLMGenerateOperator:
            arguments = shards.pod_arguments()
            return BatchLLMGenerateOperator(task_id="generate", plan_uri=uri, **arguments)

        run = shards.start_task(make, TaskInstance(run_id=f"backfill__{ds}"))
        shards.wait(lambda: run.is_deferred or not run.is_alive, "its Job")
        num_jobs = len(shards.jobs())
        assert run.wait()["num_rows"] == 2
        commit_run(uri)
        return num_jobs

    with ThreadPoolExecutor(MAX_ACTIVE_RUNS) as at_a_time:
        assert max(at_a_time.map(run_day, DAYS)) <= MAX_ACTIVE_RUNS
    for ds in DAYS:
        folder.check_published("job", ds, num_rows=2)
    texts = {tuple(row["generated_text"] for row in folder.published("job", ds)) for ds in DAYS}
    assert len(texts) == 1, "equal days have equal outputs"
    shards.check_nothing_left()
