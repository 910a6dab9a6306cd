"""What the status of a pod says, how watching a Job ended, and the explanation for the user."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from datetime import datetime
from enum import StrEnum
from typing import Any, Final

from batchllm_operator.errors import ERROR_MARK, FINAL_EXIT_CODES

EVICTED: Final = "Evicted"
"""A kubelet's reason: for its node's sake, then with the condition `DisruptionTarget`; or without
it for what the pod itself has used: more disk than a volume, a container or the pod is allowed."""
HOPELESS: Final = frozenset({"ErrImageNeverPull", "InvalidImageName"})
_STUCK: Final = HOPELESS | {
    *("CreateContainerConfigError", "CreateContainerError", "ErrImagePull", "ImageInspectError"),
    *("ImagePullBackOff", "RegistryUnavailable", "RunContainerError"),
}
POLICY: Final = "PodFailurePolicy"
"""Reason of a Job that one exit code has ended: in ours, one that no retry mends."""


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
    reason: str = ""
    """The cluster's reason, such as `Unschedulable`, `ImagePullBackOff`, `OOMKilled`."""
    message: str = ""
    exit_code: int | None = None  # exit code of the main container, once it has ended
    is_disrupted: bool = False
    """The cluster has ended the pod, or is about to; the Job controller replaces it."""
    since: datetime | None = None  # when it entered this stage, if its status tells

    @property
    def is_stuck(self) -> bool:
        """Starting, and failing at it: wrong image, unreachable registry, missing Secret."""
        return self.stage is Stage.STARTING and self.reason in _STUCK

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

    def __str__(self) -> str:
        """Stage, reason and message, for a log."""
        text = f"{self.stage} ({self.reason})" if self.reason else str(self.stage)
        return f"{text}: {' '.join(self.message.split())}" if self.message else text


class EndKind(StrEnum):
    """Why there is nothing left to watch."""

    COMPLETE = "complete"
    FAILED = "failed"
    GONE = "gone"  # deleted from outside
    QUEUE_LIMIT = "queue_limit"
    START_LIMIT = "start_limit"
    STUCK = "stuck"  # its pods can't start: image, Secret, volume
    TIMEOUT = "timeout"
    API_LOST = "api_lost"  # the cluster's API didn't answer for too long; the Job may still run
    FORBIDDEN = "forbidden"  # the watcher may not read Jobs; the Job may still run
    PAUSED = "paused"  # the Job lives on; it is time to see what is left for it to do


@dataclass(frozen=True, slots=True)
class JobEnd:
    """How a Job ended; sent in a trigger's event as a dictionary."""

    kind: EndKind
    job: str
    uid: str = ""
    reason: str = ""  # the cluster's reason, of the Job or of the pod that tells most
    message: str = ""
    pod: str = ""  # that pod; empty if none tells anything
    exit_code: int | None = None
    idle_since: str = ""
    """When the watch first saw that no pod runs, in ISO format; empty if one does."""
    num_pods: int = 0  # how many the Job is to have, as its label says; 0 if unknown
    parallelism: int = 0  # how many may run at a time; 0 if unknown
    num_running: int = 0
    num_waiting: int = 0
    num_succeeded: int = 0
    told: tuple[str, ...] = ()  # pods that failed, and whose last lines were logged
    last_lines: tuple[str, ...] = ()
    """Of the logs of pods that failed: the triggerer's own log doesn't last."""

    @property
    def is_unseen(self) -> bool:
        return self.kind in (EndKind.API_LOST, EndKind.FORBIDDEN)

    @property
    def holds_resources(self) -> bool:
        """Whether the Job is of no more use, but its pods live or wait."""
        limits = (EndKind.QUEUE_LIMIT, EndKind.START_LIMIT, EndKind.STUCK, EndKind.TIMEOUT)
        return self.kind in limits

    @property
    def is_final(self) -> bool:
        """Whether a retry can't help."""
        if self.kind is EndKind.STUCK:
            return self.reason in HOPELESS
        is_final = self.exit_code in FINAL_EXIT_CODES or self.reason == POLICY
        return self.kind is EndKind.FAILED and is_final

    def as_event(self) -> dict[str, Any]:
        """For `from_event`, through JSON."""
        return asdict(self) | {"kind": str(self.kind)}

    @classmethod
    def from_event(cls, event: Mapping[str, Any]) -> JobEnd:
        texts = {name: tuple(event[name]) for name in ("last_lines", "told")}
        return cls(**{**event, "kind": EndKind(event["kind"]), **texts})

    def explanation(self) -> str:
        """One sentence for the task's log: what happened, and what to do about it."""
        job, text, kept = f"Job {self.job}", _clipped(self.message), "finished parts are kept"
        return {
            EndKind.COMPLETE: (
                f"{job} ended well, but its results aren't in the lake: do its pods run the right"
                " image, and do they write where this worker reads?"
            ),
            EndKind.FAILED: f"{job} failed: {self._failure(text)}",
            EndKind.GONE: f"{job} was deleted from outside before its results were whole",
            EndKind.QUEUE_LIMIT: (
                f"{job}: no pod found room in time (queue_timeout): {text or self.reason}; {kept}"
            ),
            EndKind.START_LIMIT: (
                f"{job}: no pod started in time (start_timeout): {self.reason} {text}".rstrip()
            ),
            EndKind.STUCK: f"{job}: pod {self.pod} can't start ({self.reason}): {text}",
            EndKind.TIMEOUT: f"{job} reached the task's execution_timeout; {kept}",
            EndKind.API_LOST: (
                f"the cluster's API didn't answer for too long ({text}); {job} was left alone, the"
                " next try looks for it"
            ),
            EndKind.FORBIDDEN: (
                f"the watcher of {job} may not read it ({text}): give the triggerer's (or, with"
                " deferrable=False, the worker's) service account the chart's Role; the Job was"
                " left alone, the next try looks for it"
            ),
            EndKind.PAUSED: f"{job} was ended because every shard seemed to be finished",
        }[self.kind]

    def _failure(self, text: str) -> str:
        if self.reason == "DeadlineExceeded":
            return "it ran longer than active_deadline_seconds; finished parts are kept"
        if not self.pod:
            return f"{self.reason or 'no reason given'}: {text}"
        if self.reason == EVICTED:
            words = (
                "was evicted for its own use of disk: raise the limit that is named, the sizeLimit"
                " of a volume (the chart's pods.scratch, pods.cache, pods.shm) or a container's"
                " ephemeral-storage; finished parts are kept"
            )
        elif self.reason == "OOMKilled":
            words = "ran out of memory (OOMKilled): raise the operator's memory"
        elif self.exit_code is None:
            words = f"failed ({self.reason or 'no reason given'})"
        elif self.exit_code == 137:
            words = "was killed (exit code 137): by its node for lack of memory, or after its"
            words += " grace period"
        else:
            words = f"failed with exit code {self.exit_code}"
        return f"pod {self.pod} {words}" + (f"; it said: {text}" if text else "")


def _fields(part: Any, *names: str) -> tuple[Any, ...]:
    return tuple(getattr(part, name, None) for name in names)


def _clipped(text: str, limit: int = 600, num_lines: int = 3) -> str:
    """The command's own error if there is one, else the last lines of the text; on one line."""
    _, mark, error = text.rpartition(ERROR_MARK)
    if mark:
        line = " ".join(error.split())
        return line if len(line) <= limit else line[:limit] + "..."
    lines = [line for line in text.splitlines() if line.strip()]
    line = " ".join(" ".join(lines[-num_lines:]).split())
    line = line if len(line) <= limit else "..." + line[-limit:]
    return line if len(lines) <= num_lines else f"... {line}"
