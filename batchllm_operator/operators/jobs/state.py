"""Interprets the status of a pod; no calls, no clock."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from enum import StrEnum
from typing import Any, Final


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
HOPELESS: Final = frozenset({"ErrImageNeverPull", "InvalidImageName"})
_STUCK: Final = HOPELESS | {
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
    is_disrupted: bool = False
    """The cluster has ended the pod, or is about to; the Job controller replaces it."""
    since: datetime | None = None
    """When it entered this stage, if its status tells."""

    @property
    def is_stuck(self) -> bool:
        """Starting, and failing at it: wrong image, unreachable registry, missing Secret."""
        return self.stage is Stage.STARTING and self.reason in _STUCK

    @classmethod
    def of(cls, pod: Any, container_name: str) -> PodState:
        """Read a `V1Pod` of either client (kubernetes or kubernetes_asyncio)."""
        status = pod.status
        container = next(
            (c for c in status.container_statuses or () if c.name == container_name), None
        )
        state = container.state if container is not None else None
        conditions = {c.type: c for c in status.conditions or () if c.status == "True"}
        target = conditions.get("DisruptionTarget")
        is_disrupted = target is not None
        terminated = state.terminated if state is not None else None
        if terminated is not None or status.phase in ("Succeeded", "Failed"):
            terminated = terminated or _failed_init_container(status)
            said = _said(target or terminated)
            return cls(
                Stage.ENDED,
                reason=status.reason or said["reason"],
                message=status.message or said["message"],
                exit_code=terminated.exit_code if terminated else None,
                is_disrupted=is_disrupted,
                since=terminated.finished_at if terminated else None,
            )
        if state is not None and state.running is not None:
            since = state.running.started_at
            return cls(Stage.RUNNING, since=since, is_disrupted=is_disrupted, **_said(target))
        scheduled = conditions.get("PodScheduled")
        if scheduled is None:
            refused = next((c for c in status.conditions or () if c.type == "PodScheduled"), None)
            since = pod.metadata.creation_timestamp
            return cls(Stage.QUEUED, since=since, **_said(target or refused))
        since = scheduled.last_transition_time
        said = _said(target or _waiting(status, container))
        return cls(Stage.STARTING, since=since, is_disrupted=is_disrupted, **said)

    def __str__(self) -> str:
        """Stage, reason and message, for a log."""
        text = f"{self.stage} ({self.reason})" if self.reason else str(self.stage)
        return f"{text}: {' '.join(self.message.split())}" if self.message else text


def _said(part: Any) -> dict[str, Any]:
    """Reason and message of a part of a status, empty if it is absent."""
    return {name: getattr(part, name, "") or "" for name in ("reason", "message")}


def _waiting(status: Any, container: Any) -> Any:
    """What a starting pod waits for: in an init container, else in its main one."""
    for each in [*(status.init_container_statuses or []), container]:
        waiting = each.state.waiting if each is not None and each.state is not None else None
        if waiting is not None and (each is container or waiting.reason != "PodInitializing"):
            return waiting
    return None


def _failed_init_container(status: Any) -> Any:
    ended = [
        container.state.terminated
        for container in status.init_container_statuses or ()
        if container.state is not None and container.state.terminated is not None
    ]
    return next((end for end in ended if end.exit_code != 0), None)
