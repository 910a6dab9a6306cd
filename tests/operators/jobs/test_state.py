"""What is read from a pod's status, for statuses as clusters write them."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import pytest
from kubernetes.client import ApiClient

from batchllm_operator.operators.jobs.end import EndKind, JobEnd, PodState, Stage

CREATED = "2026-01-31T00:00:00Z"
SCHEDULED = {"type": "PodScheduled", "status": "True", "lastTransitionTime": CREATED}


def failure(**fields: Any) -> JobEnd:
    return JobEnd(EndKind.FAILED, "job-1", pod="pod-1", **fields)


def state_of(status: dict[str, Any], **metadata: Any) -> PodState:
    pod = {
        "metadata": {"name": "p", "creationTimestamp": CREATED, **metadata},
        "spec": {"containers": [{"name": "base"}, {"name": "sidecar"}]},
        "status": status,
    }
    response = SimpleNamespace(data=json.dumps(pod))
    return PodState.of(ApiClient().deserialize(response, "V1Pod"), "base")


def container(state: dict[str, Any], name: str = "base") -> dict[str, Any]:
    return {
        "name": name,
        "state": state,
        "ready": False,
        "restartCount": 0,
        "image": "",
        "imageID": "",
    }


def waiting(reason: str, message: str = "") -> dict[str, Any]:
    return {"waiting": {"reason": reason, "message": message}}


def terminated(exit_code: int, reason: str = "Error", message: str = "") -> dict[str, Any]:
    return {"terminated": {"exitCode": exit_code, "reason": reason, "message": message}}


def test_a_pod_without_a_node_is_queued() -> None:
    unschedulable = {
        "type": "PodScheduled",
        "status": "False",
        "reason": "Unschedulable",
        "message": "0/3 nodes are available:\n3 Insufficient nvidia.com/gpu.",
    }
    state = state_of({"phase": "Pending", "conditions": [unschedulable]})
    assert (state.stage, state.reason) == (Stage.QUEUED, "Unschedulable")
    assert state.since is not None and state.since.isoformat().startswith("2026-01-31")
    text = "queued (Unschedulable): 0/3 nodes are available: 3 Insufficient nvidia.com/gpu."
    assert str(state) == text
    assert state_of({"phase": "Pending"}).stage is Stage.QUEUED  # nobody has looked at it yet


@pytest.mark.parametrize(
    ("reason", "is_stuck"),
    [
        ("ContainerCreating", False),
        ("PodInitializing", False),
        ("ErrImagePull", True),
        ("ImagePullBackOff", True),
        ("CreateContainerConfigError", True),
        ("InvalidImageName", True),
        ("ErrImageNeverPull", True),
    ],
)
def test_a_pod_with_a_node_is_starting(reason: str, is_stuck: bool) -> None:
    status = {"phase": "Pending", "conditions": [SCHEDULED]}
    status["containerStatuses"] = [
        container({"running": {}}, "sidecar"),
        container(waiting(reason)),
    ]
    state = state_of(status)
    assert (state.stage, state.reason) == (Stage.STARTING, reason)
    assert state.is_stuck == is_stuck


def test_an_init_container_that_cannot_start_is_told() -> None:
    status = {
        "phase": "Pending",
        "conditions": [SCHEDULED],
        "initContainerStatuses": [container(waiting("ErrImagePull", "no such image"), "first")],
        "containerStatuses": [container(waiting("PodInitializing"))],
    }
    assert (state_of(status).reason, state_of(status).is_stuck) == ("ErrImagePull", True)


def test_the_main_container_decides() -> None:
    sidecar_ended = [container({"running": {}}), container(terminated(1), "sidecar")]
    running = state_of({"phase": "Running", "containerStatuses": sidecar_ended})
    assert running.stage is Stage.RUNNING
    base_ended = [container(terminated(2, "Error", "said")), container({"running": {}}, "sidecar")]
    ended = state_of({"phase": "Running", "containerStatuses": base_ended})
    assert (ended.stage, ended.exit_code, ended.message) == (Stage.ENDED, 2, "said")


@pytest.mark.parametrize(
    "message",
    [
        'Usage of EmptyDir volume "cache" exceeds the limit "20Gi". ',
        "Pod ephemeral local storage usage exceeds the total limit of containers 10Gi. ",
        'Container base exceeded its local ephemeral storage limit "10Gi". ',
    ],
)
@pytest.mark.parametrize("reason", ["", "Error", "ContainerStatusUnknown"])
def test_an_eviction_for_its_own_disk_use_is_the_pods_failure(message: str, reason: str) -> None:
    """A kubelet then sets no condition; of the containers it may know nothing."""
    statuses = [container(terminated(137, reason))] if reason else []
    status = {"phase": "Failed", "reason": "Evicted", "message": message}
    state = state_of({**status, "containerStatuses": statuses})
    assert (state.stage, state.is_disrupted, state.message) == (Stage.ENDED, False, message)
    end = failure(reason=state.reason, message=message, exit_code=137)
    assert not end.is_final
    assert "its own use of disk" in end.explanation() and message.strip() in end.explanation()


@pytest.mark.parametrize("stage", ["queued", "starting", "running", "ended"])
def test_a_condition_says_why_the_cluster_ends_a_pod(stage: str) -> None:
    target = {"type": "DisruptionTarget", "status": "True", "reason": "EvictionByEvictionAPI"}
    conditions = [{**target, "message": "Eviction API: evicting"}]
    conditions += [] if stage == "queued" else [SCHEDULED]
    status: dict[str, Any] = {"phase": "Pending", "conditions": conditions}
    if stage == "running":
        status |= {"phase": "Running", "containerStatuses": [container({"running": {}})]}
    if stage == "ended":
        status |= {"phase": "Failed", "containerStatuses": [container(terminated(143))]}
    state = state_of(status)
    assert (state.stage, state.reason) == (stage, "EvictionByEvictionAPI")
    assert state.message == "Eviction API: evicting"
    assert stage == "queued" or state.is_disrupted


def test_what_the_job_ends_is_none() -> None:
    killed = [container(terminated(137, "OOMKilled"))]
    state = state_of({"phase": "Failed", "containerStatuses": killed})
    assert (state.reason, state.exit_code, state.is_disrupted) == ("OOMKilled", 137, False)
    late = state_of({"phase": "Failed", "reason": "DeadlineExceeded", "containerStatuses": killed})
    assert (late.reason, late.is_disrupted) == ("DeadlineExceeded", False)


@pytest.mark.parametrize("exit_code", [1, 137])
def test_an_end_quotes_the_last_lines_of_the_log(exit_code: int) -> None:
    log = "\n".join(f"line {number}" for number in range(20)) + "\n\n"
    end = failure(message=log, exit_code=exit_code)
    assert end.explanation().endswith("it said: ... line 17 line 18 line 19")
    few = failure(message="line 1\nline 2", exit_code=exit_code)
    assert few.explanation().endswith("it said: line 1 line 2")


def test_an_end_quotes_an_error_from_its_beginning() -> None:
    """Whatever the engine's processes write after it."""
    log = f"starting\nbatchllm: error: table a: no column b\n{'rank 0 goes away. ' * 99}"
    said = failure(message=log, exit_code=2).explanation()
    assert "it said: table a: no column b rank 0" in said and len(said) < 700


def test_a_failed_init_container_is_told() -> None:
    ended = terminated(3, "Error", "no such model")
    state = state_of(
        {
            "phase": "Failed",
            "initContainerStatuses": [container(ended, "fetch")],
            "containerStatuses": [container(waiting("PodInitializing"))],
        }
    )
    assert state.stage is Stage.ENDED
    assert "no such model" in state.message


@pytest.mark.parametrize("kind", list(EndKind))
def test_an_end_survives_an_event_and_explains_itself(kind: EndKind) -> None:
    end = JobEnd(
        *(kind, "job-1", "uid"),
        reason="Reason",
        message="it said so",
        exit_code=3,
        last_lines=("one", "two"),
        told=("p",),
    )
    assert JobEnd.from_event(json.loads(json.dumps(end.as_event()))) == end
    assert "job-1" in end.explanation().lower() and "\n" not in end.explanation()


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"exit_code": 137, "reason": "OOMKilled"}, "raise the operator's memory"),
        ({"exit_code": 137, "reason": "Error"}, "was killed"),
        ({"exit_code": None, "reason": "DeadlineExceeded"}, "active_deadline_seconds"),
        ({"exit_code": None, "reason": "OutOfnvidia.com/gpu"}, "failed (OutOfnvidia.com/gpu)"),
        ({"exit_code": 1, "message": "a\nbatchllm: error: no GPU"}, "exit code 1; it said: no GPU"),
    ],
)
def test_the_ways_to_fail_are_told_apart(fields: dict[str, Any], words: str) -> None:
    assert words in failure(**fields).explanation()


@pytest.mark.parametrize(
    ("kind", "fields", "is_final"),
    [
        (EndKind.FAILED, {"exit_code": 1}, False),
        (EndKind.FAILED, {"exit_code": 2}, True),
        (EndKind.FAILED, {"exit_code": 137}, False),
        (EndKind.STUCK, {"reason": "InvalidImageName"}, True),
        (EndKind.STUCK, {"reason": "ImagePullBackOff"}, False),
        (EndKind.GONE, {}, False),
        (EndKind.QUEUE_LIMIT, {}, False),
    ],
)
def test_what_a_retry_cannot_mend(kind: EndKind, fields: dict[str, Any], is_final: bool) -> None:
    assert JobEnd(kind, "job-1", **fields).is_final == is_final
