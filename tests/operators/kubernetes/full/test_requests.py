"""How often a watch asks the API server, for Jobs of any size."""

from __future__ import annotations

import asyncio
import logging
from dataclasses import astuple
from typing import Any

import pytest
from operators.kubernetes.test_cluster_job import LATER, body
from support.kubernetes.cluster import Cluster

from batchllm_operator.operators.jobs import watch
from batchllm_operator.operators.jobs.calls import Cluster as Where
from batchllm_operator.operators.jobs.calls import ClusterCalls
from batchllm_operator.operators.jobs.cluster_job import ClusterJob
from batchllm_operator.operators.jobs.end import EndKind
from batchllm_operator.operators.jobs.watch import JobWatch, WatchedJob

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

    where = Where(None, False, None, str(cluster.kubeconfig))
    minutes = 8

    async def watched() -> EndKind:
        log = logging.getLogger("jobs")
        name = {"name": "job", "namespace": cluster.namespace}
        async with ClusterJob(where, **name, attempt=LATER, log=log, patience_s=10.0) as job:
            made, _ = await job.take(body(LATER, num_workers))
            all_there = lambda: len(cluster.pods()) == num_workers  # noqa: E731
            await asyncio.to_thread(cluster.wait_for, all_there, "all pods")
            monkeypatch.setattr(ClusterCalls, "call", counted)
            of_job: tuple[Any, ...] = ("job", cluster.namespace, made.metadata.uid, {}, "base")
            limits: tuple[Any, ...] = (3600, 3600, 3600, 60, 10 / FASTER, minutes * 60 / FASTER)
            watched = WatchedJob(*astuple(where), *of_job, *limits)
            end = await JobWatch(job, watched, lambda _: None).until_end()
            return end.kind

    assert asyncio.run(watched()) is EndKind.PAUSED
    assert len(asked) / minutes <= 30
