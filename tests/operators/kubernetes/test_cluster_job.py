"""Tries of one task that ask the API server for its Job at the same time, or too late."""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from dataclasses import asdict
from typing import Any

import pytest
from airflow.providers.common.compat.sdk import AirflowException
from support.kubernetes.cluster import Cluster
from support.watched_jobs import EARLIER, LATER, watched_job

from batchllm_operator.operators.jobs.cluster_job import ClusterJob
from batchllm_operator.operators.jobs.owner import LABEL, QUEUE, Attempt


@pytest.fixture
def job_of(cluster: Cluster) -> Callable[[Attempt], ClusterJob]:
    """The Job as a try sees it; no pod of it gets a node."""
    cluster.agent.hold_scheduling()
    where = {"config_file": str(cluster.kubeconfig), "namespace": cluster.namespace}

    def job(attempt: Attempt) -> ClusterJob:
        of = watched_job(**asdict(attempt), **where, api_s=5.0)
        return ClusterJob(of, logging.getLogger("jobs"))

    return job


def body(attempt: Attempt, num_pods: int = 1) -> dict[str, Any]:
    labels = {**attempt.labels, **attempt.try_label, f"{LABEL}/num-pods": str(num_pods)}
    container = {"name": "base", "image": "job:1", "command": ["sleep", "60"]}
    pod = {"restartPolicy": "Never", "containers": [container]}
    spec = {"completions": num_pods, "parallelism": num_pods, "completionMode": "Indexed"}
    return {
        "metadata": {"name": "job", "labels": labels},
        "spec": {**spec, "template": {"spec": pod}},
    }


def run(job: ClusterJob, calls: Callable[[ClusterJob], Awaitable[Any]]) -> Any:
    async def connected() -> Any:
        async with job:
            return await calls(job)

    return asyncio.run(connected())


def there(cluster: Cluster) -> list[Any]:
    return list(cluster.batch.list_namespaced_job(cluster.namespace).items)


def test_of_tries_that_ask_at_once_the_latest_has_the_only_job(
    cluster: Cluster, job_of: Callable[[Attempt], ClusterJob]
) -> None:
    async def take_all() -> list[Any]:
        attempts = [EARLIER, LATER, EARLIER, LATER]
        jobs = [job_of(attempt) for attempt in attempts]
        takes = [job.take(body(job.of), {}) for job in jobs]
        results = await asyncio.gather(*takes, return_exceptions=True)
        for job in jobs:
            await job.__aexit__()
        return results

    results = asyncio.run(take_all())
    (made,) = there(cluster)
    refusals = [result for result in results if isinstance(result, AirflowException)]
    assert all("a later try of this task" in str(refusal) for refusal in refusals)
    taken = [result for result in results if result not in refusals]
    assert {job.metadata.uid for job in taken} == {made.metadata.uid}
    assert made.metadata.labels[f"{LABEL}/try-id"] == LATER.try_id


def test_a_try_that_wakes_up_deletes_no_job_that_a_later_one_has_adopted(
    cluster: Cluster, job_of: Callable[[Attempt], ClusterJob]
) -> None:
    made = run(job_of(EARLIER), lambda job: job.take(body(EARLIER), {}))
    adopted = run(job_of(LATER), lambda job: job.take(body(LATER, num_pods=3), {}))
    assert (adopted.metadata.uid, adopted.spec.completions) == (made.metadata.uid, 3)
    run(job_of(EARLIER), lambda job: job.delete(made.metadata.uid))
    assert [job.metadata.deletion_timestamp for job in there(cluster)] == [None]
    with pytest.raises(AirflowException, match="a later try of this task has Job job"):
        run(job_of(EARLIER), lambda job: job.take(body(EARLIER), {}))
    run(job_of(LATER), lambda job: job.delete(made.metadata.uid))
    cluster.wait_for(lambda: not there(cluster) and not cluster.pods(), "the Job to go")


def test_a_job_in_a_queue_is_adopted_with_the_number_of_pods_that_it_has(
    cluster: Cluster, job_of: Callable[[Attempt], ClusterJob]
) -> None:
    queued = body(EARLIER, num_pods=2)
    queued["metadata"]["labels"][QUEUE] = "gpus"
    run(job_of(EARLIER), lambda job: job.take(queued, {}))
    adopted = run(job_of(LATER), lambda job: job.take(body(LATER, num_pods=3), {}))
    assert adopted.metadata.labels[f"{LABEL}/try-id"] == LATER.try_id
    assert (adopted.spec.completions, adopted.spec.parallelism) == (2, 2)


def test_another_job_of_the_name_is_not_deleted(
    cluster: Cluster, job_of: Callable[[Attempt], ClusterJob]
) -> None:
    run(job_of(EARLIER), lambda job: job.take(body(EARLIER), {}))
    run(job_of(EARLIER), lambda job: job.delete("another-uid"))
    assert [job.metadata.deletion_timestamp for job in there(cluster)] == [None]


def test_a_job_that_appears_after_its_create_was_broken_off_is_deleted(
    cluster: Cluster, job_of: Callable[[Attempt], ClusterJob]
) -> None:
    async def delete_and_create(job: ClusterJob) -> None:
        job.may_appear, job.patience_s = True, 20.0
        deletion = asyncio.create_task(job.delete())
        await asyncio.sleep(0.7)
        assert not deletion.done()
        cluster.batch.create_namespaced_job(cluster.namespace, body(EARLIER))
        await deletion

    run(job_of(EARLIER), delete_and_create)
    cluster.wait_for(lambda: not there(cluster), "the Job to go")


def test_a_job_that_does_other_work_gives_way(
    cluster: Cluster, job_of: Callable[[Attempt], ClusterJob]
) -> None:
    made = run(job_of(EARLIER), lambda job: job.take(body(EARLIER), {}))
    other = Attempt("owner", "other", "3", "job")
    taken = run(job_of(other), lambda job: job.take(body(other), {}))
    assert taken.metadata.uid != made.metadata.uid
