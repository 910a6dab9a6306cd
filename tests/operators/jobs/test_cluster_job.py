"""Jobs of a task's name that stay, or that others have made: the API is a stand-in."""

import asyncio
from collections.abc import Awaitable, Callable
from types import SimpleNamespace
from typing import Any

import pytest
from airflow.providers.common.compat.sdk import AirflowException, AirflowFailException
from kubernetes.client import ApiClient, V1Job
from kubernetes_asyncio.client.exceptions import ApiException
from support.watched_jobs import EARLIER, watched_job

from batchllm_operator.operators.jobs import cluster_job
from batchllm_operator.operators.jobs.cluster_job import ClusterJob
from batchllm_operator.operators.jobs.owner import LABEL

COMPLETE = {"type": "Complete", "status": "True"}
FINALIZERS = ["batch.kubernetes.io/job-tracking", "other/keeps"]


class StandIn(ClusterJob):
    """A cluster with one Job, which stays; notes what is deleted."""

    def __init__(self, labels: dict[str, str], **job: Any) -> None:
        super().__init__(watched_job(api_s=5.0), SimpleNamespace(info=print, warning=print))
        metadata = {"name": "job", "uid": "u", "labels": labels, **job.pop("metadata", {})}
        spec = {"template": {"spec": {"containers": [], "terminationGracePeriodSeconds": 40}}}
        body = {"metadata": metadata, "spec": spec, "status": job}
        self.job = ApiClient()._ApiClient__deserialize(body, V1Job)
        self.deleted: list[str] = []

    async def call(self, api: Any, method: str, *args: Any, **options: Any) -> Any:
        verb, _, kind = method.partition("_namespaced_")
        if verb == "create":
            error: Any = ApiException(status=409, reason="Conflict")
            error.body = '{"kind": "Status", "reason": "AlreadyExists"}'
            raise error
        if verb == "delete":
            self.deleted.append(kind)
        pod = SimpleNamespace(
            metadata=SimpleNamespace(name="p", finalizers=FINALIZERS, deletion_timestamp=None)
        )
        return SimpleNamespace(items=[pod]) if verb == "list" else self.job


def run(calls: Callable[[], Awaitable[Any]]) -> Any:
    return asyncio.run(asyncio.wait_for(calls(), 30))  # type: ignore[arg-type]


@pytest.mark.parametrize("labels", [{}, {f"{LABEL}/attempt": "another", f"{LABEL}/try-id": ""}])
def test_a_job_of_the_name_that_is_not_the_tasks_is_refused_and_stays(
    labels: dict[str, str],
) -> None:
    job = StandIn(labels)
    with pytest.raises(AirflowFailException, match="Job job in namespace ns isn't this task's"):
        run(lambda: job.take({"metadata": {"labels": {}}}, {}))
    run(job.delete)
    run(lambda: job.delete("u"))
    assert job.deleted == []


def test_a_job_that_finalizers_keep_is_waited_for_only_so_long(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    passed_s = [0.0]

    async def sleep(seconds: float) -> None:
        passed_s[0] += seconds

    monkeypatch.setattr(cluster_job.asyncio, "sleep", sleep)
    monkeypatch.setattr(cluster_job.time, "monotonic", lambda: passed_s[0])
    going = {"deletionTimestamp": "2026-01-31T00:00:00Z", "finalizers": ["foregroundDeletion"]}
    job = StandIn(EARLIER.labels, metadata=going)
    with pytest.raises(AirflowException, match="stays: finalizers other/keeps keep it"):
        run(lambda: job.take({"metadata": {"labels": {}}}, {}))
    assert 40 + 120 + 5 < passed_s[0] < 200


@pytest.mark.parametrize(
    ("status", "deleted"), [({"conditions": [COMPLETE]}, []), ({"active": 1}, ["job"])]
)
def test_a_job_is_kept_only_once_it_has_ended(status: dict[str, Any], deleted: list[str]) -> None:
    job = StandIn(EARLIER.labels, **status)
    run(lambda: job.delete(keeps_ended=True))
    assert job.deleted == deleted
