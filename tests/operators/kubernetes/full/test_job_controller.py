"""The rules of the Job's controller that the operators rely on, which a real one keeps, too."""

from __future__ import annotations

from typing import Any

from support.kubernetes.cluster import Cluster

FAIL_JOB = {
    "action": "FailJob",
    "onExitCodes": {"containerName": "base", "operator": "In", "values": [2]},
}
IGNORE = {
    "action": "Ignore",
    "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}],
}


def create(cluster: Cluster, script: str, num_pods: int = 2, **spec: Any) -> None:
    """An Indexed Job `job` as the operators make it, whose pods run a script."""
    container = {"name": "base", "image": "job:1", "command": ["sh", "-c", script]}
    pod = {"restartPolicy": "Never", "containers": [container], "terminationGracePeriodSeconds": 1}
    body = {
        "completionMode": "Indexed",
        "completions": num_pods,
        "parallelism": num_pods,
        "backoffLimitPerIndex": 1,
        "podReplacementPolicy": "Failed",
        "podFailurePolicy": {"rules": [FAIL_JOB, IGNORE]},
        "template": {"spec": pod},
        **spec,
    }
    metadata = {"name": "job"}
    cluster.batch.create_namespaced_job(cluster.namespace, {"metadata": metadata, "spec": body})


def status(cluster: Cluster) -> Any:
    return cluster.batch.read_namespaced_job("job", cluster.namespace).status


def end(cluster: Cluster) -> tuple[str, str]:
    """How the Job ends: type and reason of its condition."""

    def found() -> Any:
        conditions = status(cluster).conditions or []
        return [each for each in conditions if each.type in ("Complete", "Failed")]

    (condition,) = cluster.wait_for(found, "the Job to end")
    return str(condition.type), str(condition.reason)


def indexes(cluster: Cluster) -> list[str]:
    """Indexes of the pods that run and aren't being deleted."""
    label = "batch.kubernetes.io/job-completion-index"
    live = [pod for pod in cluster.pods() if pod.metadata.deletion_timestamp is None]
    return sorted(pod.metadata.labels[label] for pod in live if pod.status.phase == "Running")


def test_each_index_has_a_pod_that_knows_it_and_its_job(cluster: Cluster) -> None:
    create(cluster, 'test "$(hostname)" || true; echo "$JOB_COMPLETION_INDEX"', num_pods=3)
    assert end(cluster) == ("Complete", "CompletionsReached")
    assert status(cluster).succeeded == 3
    uid = cluster.batch.read_namespaced_job("job", cluster.namespace).metadata.uid
    labels = [pod.metadata.labels for pod in cluster.pods()]
    assert {each["batch.kubernetes.io/controller-uid"] for each in labels} == {uid}
    assert {each["batch.kubernetes.io/job-name"] for each in labels} == {"job"}
    names = {each["batch.kubernetes.io/job-completion-index"]: each for each in labels}
    assert sorted(names) == ["0", "1", "2"]


def test_a_pod_is_replaced_once_it_has_ended(cluster: Cluster) -> None:
    create(cluster, "trap 'sleep 2; exit 1' TERM; sleep 60 & wait", num_pods=1)
    cluster.wait_for(lambda: indexes(cluster) == ["0"], "a pod that runs")
    (pod,) = cluster.pods()
    cluster.api.delete_namespaced_pod(pod.metadata.name, cluster.namespace, grace_period_seconds=9)
    cluster.wait_for(lambda: status(cluster).terminating == 1, "it to be terminating")
    assert len(cluster.pods()) == 1 and not status(cluster).active
    cluster.wait_for(lambda: indexes(cluster) == ["0"], "another pod that runs")
    cluster.wait_for(lambda: status(cluster).failed == 1, "the first one to count")


def test_a_pod_that_is_removed_by_force_stays_until_it_has_ended(cluster: Cluster) -> None:
    """Its finalizer keeps it, so a lost node's pods aren't replaced by deleting them."""
    create(cluster, "sleep 60", num_pods=1)
    cluster.wait_for(lambda: indexes(cluster) == ["0"], "a pod that runs")
    (pod,) = cluster.pods()
    cluster.agent.lose_node()
    cluster.api.delete_namespaced_pod(pod.metadata.name, cluster.namespace, grace_period_seconds=0)
    cluster.wait_for(lambda: status(cluster).terminating == 1, "it to be terminating")
    assert [each.metadata.uid for each in cluster.pods()] == [pod.metadata.uid]
    cluster.agent.collect_lost_pods()
    cluster.wait_for(lambda: status(cluster).active == 1, "another pod")


def test_a_job_that_has_ended_is_removed_in_time(cluster: Cluster) -> None:
    create(cluster, "true", ttlSecondsAfterFinished=1)
    gone = lambda: not cluster.batch.list_namespaced_job(cluster.namespace).items  # noqa: E731
    cluster.wait_for(gone, "the Job to go")
    cluster.wait_for(lambda: not cluster.pods(), "its pods to go")


def test_a_deletion_in_the_foreground_takes_the_pods_first(cluster: Cluster) -> None:
    create(cluster, "sleep 60")
    cluster.wait_for(lambda: indexes(cluster) == ["0", "1"], "both pods")
    cluster.batch.delete_namespaced_job("job", cluster.namespace, propagation_policy="Foreground")
    seen = cluster.wait_for(
        lambda: not cluster.batch.list_namespaced_job(cluster.namespace).items, "the Job to go"
    )
    assert seen and cluster.pods() == []
