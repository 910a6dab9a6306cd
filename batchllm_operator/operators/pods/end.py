"""How watching a pod ended, and its explanation for the user."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Any, Final

from batchllm_operator.errors import ERROR_MARK, FINAL_EXIT_CODES
from batchllm_operator.operators.pods.state import EVICTED

_SIGKILL_CODE: Final = 137


class EndKind(StrEnum):
    """Why there is nothing left to watch."""

    EXITED = "exited"
    DISRUPTED = "disrupted"
    """Ended by the cluster: eviction, preemption, loss of the node."""
    GONE = "gone"
    """Deleted from outside."""
    QUEUE_LIMIT = "queue_limit"
    START_LIMIT = "start_limit"
    STUCK = "stuck"
    """It can't start: image, Secret, volume."""
    TIMEOUT = "timeout"
    API_LOST = "api_lost"
    """The cluster's API didn't answer for too long; the pod may still run."""
    FORBIDDEN = "forbidden"
    """The watcher may not read pods; the pod may still run."""
    PAUSED = "paused"
    """The pod lives on; it is time to see whether anything is left for it to do."""
    STOPPED = "stopped"


@dataclass(frozen=True, slots=True)
class PodEnd:
    """How a pod ended; sent in a trigger's event as a dictionary."""

    kind: EndKind
    pod_name: str
    namespace: str
    pod_uid: str = ""
    reason: str = ""
    message: str = ""
    exit_code: int | None = None
    is_unreachable: bool = False
    """The pod's node doesn't answer, so it can only be removed by force."""
    is_over: bool = False
    """All containers have ended; while one runs, the pod holds its resources."""
    log_ns: int = -1
    """Where another watch goes on in the pod's log: `LogReader.last_ns`."""
    log_from_ns: int = -1
    """Where this watch began in it."""
    last_lines: tuple[str, ...] = ()
    """The last lines of that log, if another pod may take this one's place."""

    @property
    def is_disruption(self) -> bool:
        return self.kind in (EndKind.DISRUPTED, EndKind.GONE)

    @property
    def is_unseen(self) -> bool:
        return self.kind in (EndKind.API_LOST, EndKind.FORBIDDEN)

    @property
    def is_known(self) -> bool:
        """Whether the pod is known to be of no more use."""
        return not self.is_unseen and self.kind is not EndKind.PAUSED

    @property
    def may_stay(self) -> bool:
        """Whether the pod holds no resources, and so may be kept for inspection."""
        return self.is_over and not self.is_unreachable

    @property
    def is_final(self) -> bool:
        """Whether a retry can't help."""
        if self.kind is EndKind.STUCK:
            return self.reason in ("InvalidImageName", "ErrImageNeverPull")
        return self.kind is EndKind.EXITED and self.exit_code in FINAL_EXIT_CODES

    def as_event(self) -> dict[str, Any]:
        """For `from_event`, through JSON."""
        return asdict(self) | {"kind": str(self.kind)}

    @classmethod
    def from_event(cls, event: Mapping[str, Any]) -> PodEnd:
        lines = tuple(event["last_lines"])
        return cls(**{**event, "kind": EndKind(event["kind"]), "last_lines": lines})

    def explanation(self) -> str:
        """One sentence for the task's log: what happened, and what to do about it."""
        pod, said = f"pod {self.pod_name}", _clipped(self.message)
        reason = self.reason or "no reason given"
        return {
            EndKind.EXITED: f"{pod} {_exit_words(self)}" + (f"; it said: {said}" if said else ""),
            EndKind.DISRUPTED: f"{pod} was ended by the cluster ({reason}): {said}",
            EndKind.GONE: f"{pod} was deleted from outside before its results were whole",
            EndKind.QUEUE_LIMIT: (
                f"{pod} found no node in time (queue_timeout): {said or self.reason}; finished"
                " parts are kept"
            ),
            EndKind.START_LIMIT: (
                f"{pod} didn't start in time (start_timeout): {self.reason} {said}".rstrip()
            ),
            EndKind.STUCK: f"{pod} can't start ({self.reason}): {said}",
            EndKind.TIMEOUT: f"{pod} reached the task's execution_timeout; finished parts are kept",
            EndKind.API_LOST: (
                f"the cluster's API didn't answer for too long ({said}); {pod} was left alone, the"
                " next try looks for it"
            ),
            EndKind.FORBIDDEN: (
                f"the watcher of {pod} may not read pods: give the triggerer's (or, with"
                " deferrable=False, the worker's) service account the chart's Role; the pod was"
                " left alone, the next try looks for it"
            ),
            EndKind.PAUSED: f"{pod} is to be watched again",
            EndKind.STOPPED: f"{pod} is no longer watched",
        }[self.kind]


def _exit_words(end: PodEnd) -> str:
    if end.reason == "DeadlineExceeded":
        return "ran longer than active_deadline_seconds; finished parts are kept"
    if end.reason == EVICTED:
        return (
            "was evicted for its own use of disk: raise the limit that is named, the sizeLimit of a"
            " volume (the chart's pods.scratch, pods.cache, pods.shm) or a container's"
            " ephemeral-storage; finished parts are kept"
        )
    if end.reason == "OOMKilled":
        return "ran out of memory (OOMKilled): raise the operator's memory"
    if end.exit_code is None:
        return f"failed ({end.reason or 'no reason given'})"
    if end.exit_code == 0:
        return (
            "ended well, but its results aren't in the lake: does it run the right image, and"
            " does it write where this worker reads?"
        )
    if end.exit_code == _SIGKILL_CODE:
        return (
            "was killed (exit code 137): by its node for lack of memory, or after its grace period"
        )
    return f"failed with exit code {end.exit_code}"


def _clipped(text: str, limit: int = 600, num_lines: int = 3) -> str:
    """The command's own error if there is one, else the last lines of the text; on one line."""
    _, mark, error = text.rpartition(ERROR_MARK)
    if mark:
        line = " ".join(error.split())
        return line if len(line) <= limit else line[:limit] + "..."
    lines = [each.strip() for each in text.splitlines() if each.strip()]
    line = " ".join(" ".join(lines[-num_lines:]).split())
    line = line if len(line) <= limit else "..." + line[-limit:]
    return line if len(lines) <= num_lines else f"... {line}"
