"""The rules of the Job's controller that the operators rely on, which a real one keeps, too."""

from typing import Any

import pytest
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


def patch(cluster: Cluster, **spec: Any) -> None:
    cluster.batch.patch_namespaced_job("job", cluster.namespace, {"spec": spec})


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


def test_an_index_that_fails_too_often_ends_the_job_once_the_others_are_done(
    cluster: Cluster,
) -> None:
    create(cluster, 'exit "$JOB_COMPLETION_INDEX"')
    assert end(cluster) == ("Failed", "FailedIndexes")
    assert (status(cluster).succeeded, status(cluster).failed) == (1, 2)


def test_an_exit_code_of_the_policy_ends_all_pods(cluster: Cluster) -> None:
    create(cluster, 'if [ "$JOB_COMPLETION_INDEX" = 1 ]; then exit 2; fi; sleep 60')
    assert end(cluster) == ("Failed", "PodFailurePolicy")
    assert indexes(cluster) == []


def test_a_disrupted_pod_is_replaced_and_does_not_count(cluster: Cluster) -> None:
    create(cluster, "sleep 60", num_pods=1, backoffLimitPerIndex=0)
    for _ in range(3):
        cluster.wait_for(lambda: indexes(cluster) == ["0"], "a pod that runs")
        (name,) = [p.metadata.name for p in cluster.pods() if p.status.phase == "Running"]
        cluster.agent.evict(name)
    cluster.wait_for(lambda: indexes(cluster) == ["0"], "a pod that runs")
    assert status(cluster).conditions is None
    assert not status(cluster).failed


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


def test_a_quota_leaves_a_job_without_pods_and_says_why(cluster: Cluster) -> None:
    cluster.set_quota({"pods": "0"})
    create(cluster, "true")

    def told() -> list[str]:
        selector = "involvedObject.name=job"
        listed = cluster.api.list_namespaced_event(cluster.namespace, field_selector=selector)
        return [event.message for event in listed.items if event.reason == "FailedCreate"]

    message = cluster.wait_for(told, "the Event")[0]
    assert message.startswith("Error creating: pods ") and "exceeded quota: quota" in message
    cluster.api.delete_namespaced_resource_quota("quota", cluster.namespace)
    assert end(cluster)[0] == "Complete"


def test_a_job_that_has_ended_is_removed_in_time(cluster: Cluster) -> None:
    create(cluster, "true", ttlSecondsAfterFinished=1)
    gone = lambda: not cluster.batch.list_namespaced_job(cluster.namespace).items  # noqa: E731
    cluster.wait_for(gone, "the Job to go")
    cluster.wait_for(lambda: not cluster.pods(), "its pods to go")


def test_a_suspended_job_has_no_pods_until_it_is_admitted(cluster: Cluster) -> None:
    create(cluster, "true", suspend=True)
    cluster.wait_for(lambda: status(cluster).conditions, "the condition")
    assert cluster.pods() == []
    patch(cluster, suspend=False)
    assert end(cluster)[0] == "Complete"


@pytest.mark.parametrize("num_pods", [1, 4])
def test_completions_and_parallelism_scale_together(cluster: Cluster, num_pods: int) -> None:
    create(cluster, "sleep 60", backoffLimitPerIndex=0)
    cluster.wait_for(lambda: indexes(cluster) == ["0", "1"], "both pods")
    patch(cluster, completions=num_pods, parallelism=num_pods)
    wanted = [str(index) for index in range(num_pods)]
    cluster.wait_for(lambda: indexes(cluster) == wanted, "other pods")
    assert status(cluster).failed in (None, 0)  # those that were removed haven't failed


def test_a_lower_parallelism_removes_pods_that_wait_first(cluster: Cluster) -> None:
    create(cluster, "sleep 60")
    cluster.wait_for(lambda: indexes(cluster) == ["0", "1"], "both pods")
    cluster.agent.hold_scheduling()
    patch(cluster, completions=4, parallelism=4)
    cluster.wait_for(lambda: len(cluster.pods()) == 4, "two that wait")
    patch(cluster, parallelism=2)
    cluster.wait_for(lambda: len(cluster.pods()) == 2, "them to go")
    assert indexes(cluster) == ["0", "1"]


def test_the_deadline_ends_the_job(cluster: Cluster) -> None:
    create(cluster, "sleep 60", activeDeadlineSeconds=1)
    assert end(cluster) == ("Failed", "DeadlineExceeded")


def test_a_deletion_in_the_foreground_takes_the_pods_first(cluster: Cluster) -> None:
    create(cluster, "sleep 60")
    cluster.wait_for(lambda: indexes(cluster) == ["0", "1"], "both pods")
    cluster.batch.delete_namespaced_job("job", cluster.namespace, propagation_policy="Foreground")
    seen = cluster.wait_for(
        lambda: not cluster.batch.list_namespaced_job(cluster.namespace).items, "the Job to go"
    )
    assert seen and cluster.pods() == []
