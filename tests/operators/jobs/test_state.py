"""What the status of a pod says, and how an end explains itself."""

import json
from typing import Any

import pytest
from kubernetes.client import ApiClient, V1Pod

from batchllm_operator.operators.jobs.end import STUCK, EndKind, JobEnd, PodState, Stage

SCHEDULED = {
    "type": "PodScheduled",
    "status": "True",
    "lastTransitionTime": "2026-01-31T00:00:10Z",
}
TARGET = {
    "type": "DisruptionTarget",
    "status": "True",
    "reason": "EvictionByEvictionAPI",
    "message": "Eviction API: evicting",
}
NO_GPU = "0/3 nodes are available:\n3 Insufficient nvidia.com/gpu."
UNSCHEDULABLE = {**SCHEDULED, "status": "False", "reason": "Unschedulable", "message": NO_GPU}
RUNNING: dict[str, Any] = {"running": {}}


def waiting(reason: str, message: str = "") -> dict[str, Any]:
    return {"waiting": {"reason": reason, "message": message}}


def ended(exit_code: int, reason: str = "Error", message: str = "") -> dict[str, Any]:
    return {"terminated": {"exitCode": exit_code, "reason": reason, "message": message}}


def state_of(
    phase: str,
    *conditions: dict[str, Any],
    main: dict[str, Any] | None = None,
    sidecar: dict[str, Any] | None = None,
    init: dict[str, Any] | None = None,
    **status: str,
) -> PodState:
    def containers(**states: dict[str, Any] | None) -> list[dict[str, Any]]:
        rest = {"ready": False, "restartCount": 0, "image": "", "imageID": ""}
        return [{"name": name, "state": state, **rest} for name, state in states.items() if state]

    body = {
        "metadata": {"name": "p", "creationTimestamp": "2026-01-31T00:00:00Z"},
        "status": {
            "phase": phase,
            "conditions": list(conditions),
            "containerStatuses": containers(sidecar=sidecar, base=main),
            "initContainerStatuses": containers(init=init),
            **status,
        },
    }
    return PodState.of(ApiClient()._ApiClient__deserialize(body, V1Pod), "base")


@pytest.mark.parametrize(
    ("state", "text", "is_stuck"),
    [
        (
            state_of("Pending", UNSCHEDULABLE),
            f"queued (Unschedulable): {' '.join(NO_GPU.split())}",
            False,
        ),
        (state_of("Pending"), "queued", False),  # no scheduler has looked at it yet
        *(
            (
                state_of("Pending", SCHEDULED, sidecar=RUNNING, main=waiting(reason)),
                f"starting ({reason})",
                reason not in ("ContainerCreating", "PodInitializing"),
            )
            for reason in (
                *("ContainerCreating", "PodInitializing", "ErrImagePull", "ImagePullBackOff"),
                *("CreateContainerConfigError", "InvalidImageName", "ErrImageNeverPull"),
            )
        ),
        (
            state_of(
                "Pending",
                SCHEDULED,
                init=waiting("ErrImagePull", "no such image"),
                main=waiting("PodInitializing"),
            ),
            "starting (ErrImagePull): no such image",
            True,
        ),
        (state_of("Running", main=RUNNING, sidecar=ended(1)), "running", False),
        (
            state_of("Running", main=ended(2, message="s"), sidecar=RUNNING),
            "ended (Error): s",
            False,
        ),
        (
            state_of("Failed", init=ended(3, message="no model"), main=waiting("PodInitializing")),
            "ended (Error): no model",
            False,
        ),
        (state_of("Failed", main=ended(137, "OOMKilled")), "ended (OOMKilled)", False),
        (
            state_of("Failed", main=ended(137, "OOMKilled"), reason="DeadlineExceeded"),
            "ended (DeadlineExceeded)",
            False,
        ),
    ],
)
def test_a_pods_state_is_that_of_its_main_container(
    state: PodState, text: str, is_stuck: bool
) -> None:
    assert (str(state), state.reason in STUCK, state.is_disrupted) == (text, is_stuck, False)
    if state.stage in (Stage.QUEUED, Stage.STARTING):
        assert state.since is not None and state.since.isoformat().startswith("2026-01-31")


@pytest.mark.parametrize(
    "message",
    [
        'Usage of EmptyDir volume "cache" exceeds the limit "20Gi". ',
        "Pod ephemeral local storage usage exceeds the total limit of containers 10Gi. ",
        'Container base exceeded its local ephemeral storage limit "10Gi". ',
    ],
)
@pytest.mark.parametrize("main", [None, ended(137), ended(137, "ContainerStatusUnknown")])
def test_an_eviction_for_its_own_disk_use_is_the_pods_failure(message: str, main: Any) -> None:
    """A kubelet then sets no condition; of the containers it may know nothing."""
    state = state_of("Failed", main=main, reason="Evicted", message=message)
    assert (state.stage, state.is_disrupted, state.message) == (Stage.ENDED, False, message)
    assert "its own use of disk" in state.failure() and message.strip() in state.failure()


@pytest.mark.parametrize(
    ("stage", "state"),
    [
        (Stage.QUEUED, state_of("Pending", TARGET)),
        (Stage.STARTING, state_of("Pending", TARGET, SCHEDULED)),
        (Stage.RUNNING, state_of("Running", TARGET, SCHEDULED, main=RUNNING)),
        (Stage.ENDED, state_of("Failed", TARGET, SCHEDULED, main=ended(143))),
    ],
)
def test_a_condition_says_why_the_cluster_ends_a_pod(stage: Stage, state: PodState) -> None:
    assert (state.stage, state.is_disrupted) == (stage, True)
    assert (state.reason, state.message) == (TARGET["reason"], TARGET["message"])


# Ends

LINES = "\n".join(f"line {number}" for number in range(20)) + "\n\n"
GOES = "rank 0 goes away. " * 99


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"exit_code": 137, "reason": "OOMKilled"}, "raise the operator's memory"),
        ({"exit_code": 137, "reason": "Error"}, "was killed"),
        ({"reason": "OutOfnvidia.com/gpu"}, "failed (OutOfnvidia.com/gpu)"),
        ({"exit_code": 1, "message": "a\nbatchllm: error: no GPU"}, "exit code 1; it said: no GPU"),
        ({"exit_code": 1, "message": LINES}, "it said: ... line 17 line 18 line 19"),
        ({"exit_code": 137, "message": "line 1\nline 2"}, "it said: line 1 line 2"),
        ({"exit_code": 2, "message": f"a\nbatchllm: error: no x\n{GOES}"}, "it said: no x rank 0"),
    ],
)
def test_the_ways_to_fail_are_told_apart(fields: dict[str, Any], words: str) -> None:
    said = PodState(Stage.ENDED, **fields).failure()
    assert words in said and len(said) < 700 and "\n" not in said


@pytest.mark.parametrize("kind", list(EndKind))
def test_an_end_survives_an_event(kind: EndKind) -> None:
    end = JobEnd(kind, "it ended", is_final=True, last_lines=("one", "two"), told=("p",))
    assert JobEnd.from_event(json.loads(json.dumps(end.as_event()))) == end
