"""Interprets a pod's status; no calls, no clock."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from enum import StrEnum
from typing import Any, Final

ENDING_MARGIN_S: Final = 60.0
"""Time after the grace period that a kubelet may take to report a pod's end."""


class Stage(StrEnum):
    """A pod's progress through its life."""

    QUEUED = "queued"
    """No node has room for it yet."""
    STARTING = "starting"
    """On a node; its image is being pulled, its volumes are being mounted."""
    RUNNING = "running"
    ENDED = "ended"
    """The main container won't run again."""


EVICTED: Final = "Evicted"
"""A kubelet's reason: for its node's sake, then with the condition `DisruptionTarget`; or without
it for what the pod itself has used: more disk than a volume, a container or the pod is allowed."""
# Reasons of kubelet, scheduler and node life-cycle controllers for a disruption: preemption,
# shutdown of the node, or a node without resources for a pod that it admitted (when a device
# plugin restarts, for example).
_DISRUPTIONS: Final = {
    *("NodeAffinity", "NodeLost", "NodeShutdown", "Preempted", "Preempting"),
    *("Shutdown", "Terminated", "TopologyAffinityError", "UnexpectedAdmissionError"),
}
_NOTHING_LEFT: Final = "OutOf"
"""Prefix of a kubelet's reason when a resource, such as nvidia.com/gpu, was used up."""
_RESET: Final = "ContainerStatusUnknown"
"""A container's reason when its node was reset, so that its end is unknown."""
_HOPELESS: Final = frozenset({"ErrImageNeverPull", "InvalidImageName"})
_STUCK: Final = _HOPELESS | {
    *("CreateContainerConfigError", "CreateContainerError", "ErrImagePull", "ImageInspectError"),
    *("ImagePullBackOff", "RegistryUnavailable", "RunContainerError"),
}


@dataclass(frozen=True, slots=True)
class PodState:
    """A pod at one moment."""

    stage: Stage
    reason: str = ""
    """The cluster's reason, such as `Unschedulable`, `ImagePullBackOff`, `OOMKilled`."""
    message: str = ""
    exit_code: int | None = None
    """Exit code of the main container, once it has ended."""
    is_being_deleted: bool = False
    is_disrupted: bool = False
    """The cluster has ended the pod, or is about to."""
    has_started: bool = False
    """Whether there is a log to read."""
    is_over: bool = False
    """All containers have ended, so the node's resources are free."""
    since: datetime | None = None
    """When it entered this stage, if its status tells."""

    @property
    def is_stuck(self) -> bool:
        """Starting, and failing at it: wrong image, unreachable registry, missing Secret."""
        return self.stage is Stage.STARTING and self.reason in _STUCK

    @property
    def is_hopeless(self) -> bool:
        """Starting, and waiting won't help."""
        return self.stage is Stage.STARTING and self.reason in _HOPELESS

    @property
    def is_live(self) -> bool:
        """Whether it runs or will run, and isn't being deleted."""
        return self.stage is not Stage.ENDED and not self.is_being_deleted

    @classmethod
    def of(cls, pod: Any, container_name: str) -> PodState:
        """Read a `V1Pod` of either client (kubernetes or kubernetes_asyncio)."""
        status, metadata = pod.status, pod.metadata
        container = _status_of(status, container_name)
        terminated = container.state.terminated if container and container.state else None
        started = container is not None and (
            terminated is not None or container.state.running is not None
        )
        conditions = {c.type: c for c in (status.conditions or [])} if status else {}
        target = conditions.get("DisruptionTarget")
        if target is not None and target.status != "True":
            target = None
        shared: dict[str, Any] = {
            "is_being_deleted": metadata.deletion_timestamp is not None,
            "is_disrupted": target is not None or _is_disrupted(status, terminated),
            "has_started": started,
        }
        phase = status.phase if status else None
        if terminated is not None or phase in ("Succeeded", "Failed"):
            terminated = terminated or _failed_init_container(status)
            said = _said(target or terminated)
            return cls(
                Stage.ENDED,
                reason=status.reason or said["reason"],
                message=status.message or said["message"],
                exit_code=terminated.exit_code if terminated else None,
                since=terminated.finished_at if terminated else None,
                is_over=phase in ("Succeeded", "Failed"),
                **shared,
            )
        if container is not None and container.state and container.state.running is not None:
            since = container.state.running.started_at
            return cls(Stage.RUNNING, since=since, **_said(target), **shared)
        scheduled = conditions.get("PodScheduled")
        if scheduled is None or scheduled.status != "True":
            since = metadata.creation_timestamp
            return cls(Stage.QUEUED, since=since, **_said(target or scheduled), **shared)
        since, said = scheduled.last_transition_time, _said(target or _waiting(status, container))
        return cls(Stage.STARTING, since=since, **said, **shared)

    def __str__(self) -> str:
        """Stage, reason and message, for a log."""
        words: list[str] = [self.stage]
        if self.reason:
            words.append(f"({self.reason})")
        text = " ".join(words)
        return f"{text}: {' '.join(self.message.split())}" if self.message else text


def _said(found: Any) -> dict[str, Any]:
    """Reason and message of a part of a status, empty if it is absent."""
    return {name: getattr(found, name, "") or "" for name in ("reason", "message")}


def _status_of(status: Any, container_name: str) -> Any:
    statuses = (status.container_statuses if status else None) or []
    return next((each for each in statuses if each.name == container_name), None)


def _waiting(status: Any, container: Any) -> Any:
    """What a starting pod waits for: in an init container, else in its main one."""
    for each in [*(status.init_container_statuses or []), container]:
        waiting = each.state.waiting if each is not None and each.state is not None else None
        if waiting is not None and (each is container or waiting.reason != "PodInitializing"):
            return waiting
    return None


def _failed_init_container(status: Any) -> Any:
    ended = [
        each.state.terminated
        for each in status.init_container_statuses or []
        if each.state is not None and each.state.terminated is not None
    ]
    return next((each for each in ended if each.exit_code != 0), None)


def _is_disrupted(status: Any, terminated: Any) -> bool:
    """Whether the cluster has ended the pod, if no condition says so."""
    reason = (status.reason if status else "") or ""
    if terminated is not None and terminated.reason == _RESET:
        return reason != EVICTED
    return reason in _DISRUPTIONS or reason.startswith(_NOTHING_LEFT)
