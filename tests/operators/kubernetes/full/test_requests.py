"""How often a watch asks the API server, for Jobs of any size."""

import asyncio
import logging
from dataclasses import asdict
from typing import Any

import pytest
from operators.kubernetes.test_cluster_job import body
from support.kubernetes.cluster import Cluster
from support.watched_jobs import LATER, watched_job

from batchllm_operator.operators.jobs import watch
from batchllm_operator.operators.jobs.calls import ClusterCalls
from batchllm_operator.operators.jobs.cluster_job import ClusterJob
from batchllm_operator.operators.jobs.end import EndKind
from batchllm_operator.operators.jobs.watch import JobWatch

FASTER = 100  # than by default: a minute takes 0.6 s


@pytest.mark.parametrize("num_workers", [8, 64, 1000])
def test_requests_a_minute_do_not_depend_on_the_number_of_workers(
    cluster: Cluster, num_workers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster.agent.hold_scheduling()
    monkeypatch.setattr(watch, "_LOOK_S", 60 / FASTER)
    asked: list[str] = []
    call = ClusterCalls.call

    async def counted(self: ClusterCalls, api: Any, method: str, *args: Any, **options: Any) -> Any:
        asked.append(method)
        return await call(self, api, method, *args, **options)

    minutes = 8
    where = {"config_file": str(cluster.kubeconfig), "namespace": cluster.namespace}
    limits: dict[str, float] = {f"{name}_s": 3600 for name in ("queue", "start", "stuck")}
    limits |= {"api_s": 10.0, "poll_s": 10 / FASTER, "pause_s": minutes * 60 / FASTER}

    async def watched() -> EndKind:
        of = watched_job(**asdict(LATER), **where, **limits)
        async with ClusterJob(of, logging.getLogger("jobs")) as job:
            await job.take(body(LATER, num_workers), {})
            all_there = lambda: len(cluster.pods()) == num_workers  # noqa: E731
            await asyncio.to_thread(cluster.wait_for, all_there, "all pods")
            monkeypatch.setattr(ClusterCalls, "call", counted)
            end = await JobWatch(job, str).until_end()
            return end.kind

    assert asyncio.run(watched()) is EndKind.PAUSED
    assert len(asked) / minutes <= 30
