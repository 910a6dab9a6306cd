"""What the status of a pod says, how watching a Job ended, and the explanation for the user."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from datetime import datetime
from enum import StrEnum
from typing import Any, Final

from batchllm_operator.errors import ERROR_MARK

# A kubelet evicts for its node's sake, then with the condition `DisruptionTarget`; or without it
# for what the pod itself has used: more disk than a volume, a container or the pod is allowed.
_ADVICE: Final = {
    "Evicted": (
        "was evicted for its own use of disk: raise the limit that is named, the sizeLimit of a"
        " volume (the chart's pods.scratch, pods.cache, pods.shm) or a container's"
        " ephemeral-storage; finished parts are kept"
    ),
    "OOMKilled": "ran out of memory (OOMKilled): raise the operator's memory",
}
HOPELESS: Final = frozenset({"ErrImageNeverPull", "InvalidImageName"})
_MAX_SAID, _LAST_LINES = 600, 3  # characters, and lines, of what a pod said
STUCK: Final = HOPELESS | {  # of a start: wrong image, unreachable registry, missing Secret
    *("CreateContainerConfigError", "CreateContainerError", "ErrImagePull", "ImageInspectError"),
    *("ImagePullBackOff", "RegistryUnavailable", "RunContainerError"),
}


class Stage(StrEnum):
    """A pod's progress through its life."""

    QUEUED = "queued"  # no node has room for it yet
    STARTING = "starting"  # on a node; its image is being pulled, its volumes are being mounted
    RUNNING = "running"
    ENDED = "ended"  # the main container won't run again


@dataclass(frozen=True, slots=True)
class PodState:
    """A pod at one moment."""

    stage: Stage
    reason: str = ""  # the cluster's, such as `Unschedulable`, `ImagePullBackOff`, `OOMKilled`
    message: str = ""
    exit_code: int | None = None  # exit code of the main container, once it has ended
    is_disrupted: bool = False  # ended by the cluster, or about to be; the Job replaces it
    since: datetime | None = None  # when it entered this stage, if its status tells

    @classmethod
    def of(cls, pod: Any, container_name: str) -> PodState:
        """Read a `V1Pod` of either client (kubernetes or kubernetes_asyncio)."""
        status, code = pod.status, None
        conditions = {c.type: c for c in status.conditions or () if c.status == "True"}
        target, scheduled = conditions.get("DisruptionTarget"), conditions.get("PodScheduled")
        mains = [c for c in status.container_statuses or () if c.name == container_name]
        main = next((c.state for c in mains if c.state), None)
        states = [c.state for c in status.init_container_statuses or () if c.state]
        states += [main] if main else []
        if (main and main.terminated) or status.phase in ("Succeeded", "Failed"):
            ends = [state.terminated for state in states if state.terminated]
            failures = (end for end in ends if end.exit_code)
            says: Any = main.terminated if main and main.terminated else next(failures, None)
            stage, since, code = Stage.ENDED, *_fields(says, "finished_at", "exit_code")
        elif main and main.running:
            stage, says, since = Stage.RUNNING, None, main.running.started_at
        elif scheduled:
            waits = [state.waiting for state in states if state.waiting]
            real = [waiting for waiting in waits if waiting.reason != "PodInitializing"]
            says = next(iter(real or waits), None)
            stage, since = Stage.STARTING, scheduled.last_transition_time
        else:
            says = next((c for c in status.conditions or () if c.type == "PodScheduled"), None)
            stage, since = Stage.QUEUED, pod.metadata.creation_timestamp
        reason, message = _fields(target or says, "reason", "message")
        words = (status.reason or reason or "", status.message or message or "")
        return cls(stage, *words, code, is_disrupted=target is not None, since=since)

    @property
    def said(self) -> str:
        """The command's own error if there is one, else the message's last lines; on one line."""
        _, mark, error = self.message.rpartition(ERROR_MARK)
        if mark:
            line = " ".join(error.split())
            return line if len(line) <= _MAX_SAID else line[:_MAX_SAID] + "..."
        lines = [line for line in self.message.splitlines() if line.strip()]
        line = " ".join(" ".join(lines[-_LAST_LINES:]).split())
        line = line if len(line) <= _MAX_SAID else "..." + line[-_MAX_SAID:]
        return line if len(lines) <= _LAST_LINES else f"... {line}"

    def failure(self) -> str:
        """What ended the pod by its own fault, and what to do about it."""
        words = f"failed with exit code {self.exit_code}"
        if self.reason in _ADVICE:
            words = _ADVICE[self.reason]
        elif self.exit_code is None:
            words = f"failed ({self.reason or 'no reason given'})"
        elif self.exit_code == 137:
            words = "was killed (exit code 137): by its node for lack of memory, or after its"
            words += " grace period"
        return words + (f"; it said: {self.said}" if self.message else "")

    def __str__(self) -> str:
        text = f"{self.stage} ({self.reason})" if self.reason else str(self.stage)
        return f"{text}: {' '.join(self.message.split())}" if self.message else text


class EndKind(StrEnum):
    """Why there is nothing left to watch."""

    COMPLETE = "complete"
    FAILED = "failed"  # or deleted from outside
    LATE = "late"  # a limit is over: the Job is of no more use, but its pods live or wait
    UNSEEN = "unseen"  # the cluster's API doesn't show the Job, which may still run
    PAUSED = "paused"  # the Job lives on; it is time to see what is left for it to do


@dataclass(frozen=True, slots=True)
class JobEnd:
    """How a Job ended, and what the watch has seen; sent in a trigger's event as a dictionary."""

    kind: EndKind
    text: str = ""  # for the task's log: what happened, and what to do about it
    is_final: bool = False  # whether a retry can't help
    idle_since: str = ""  # when no pod was first seen to run, in ISO format; empty if one does
    num_pods: int = 0  # how many the Job is to have, as its label says; 0 if unknown
    parallelism: int = 0  # how many may run at a time; 0 if unknown
    num_running: int = 0
    num_waiting: int = 0
    num_succeeded: int = 0
    told: tuple[str, ...] = ()  # pods that failed, and whose last lines were logged
    last_lines: tuple[str, ...] = ()  # of their logs: the triggerer's own log doesn't last

    def as_event(self) -> dict[str, Any]:
        return asdict(self) | {"kind": str(self.kind)}

    @classmethod
    def from_event(cls, event: Mapping[str, Any]) -> JobEnd:
        texts = {name: tuple(event[name]) for name in ("last_lines", "told")}
        return cls(**{**event, "kind": EndKind(event["kind"]), **texts})


def _fields(part: Any, *names: str) -> tuple[Any, ...]:
    return tuple(getattr(part, name, None) for name in names)
