"""Watches one Job until its end, from a worker or from the triggerer.

Its requests don't depend on the number of pods: one a poll for the Job, and a few a minute for what
its waiting, running and failed pods say.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any, Final

from kubernetes_asyncio.client.exceptions import ApiException

from batchllm_operator.amounts import counted
from batchllm_operator.errors import FINAL_EXIT_CODES
from batchllm_operator.operators.jobs.calls import ANSWERLESS, FORBIDDEN, Cluster, message_of
from batchllm_operator.operators.jobs.cluster_job import MAX_PODS, ClusterJob, ended_condition
from batchllm_operator.operators.jobs.end import HOPELESS, POLICY, EndKind, JobEnd, PodState, Stage
from batchllm_operator.operators.jobs.owner import LABEL, Attempt

_LOOK_S: Final = 60.0  # between two looks at the pods
_NUM_LOGS: Final = 3  # failed pods whose last lines one look logs
_NUM_LINES, _LINE_LENGTH, _MAX_LINES = 20, 500, 100
"""Of a failed pod's log; and lines that the end carries, which Airflow's database keeps."""


@dataclass(frozen=True, slots=True)
class WatchedJob(Cluster):
    """A Job and the limits of its watch, in seconds; JSON-serializable."""

    name: str
    namespace: str
    uid: str  # another Job of the name isn't meant
    attempt: dict[str, str]  # the `Attempt` that has the Job
    container_name: str  # the main container of its pods
    queue_s: float  # while no pod has a node, or may be created
    start_s: float  # from a pod's having a node until its main container runs, while no other runs
    stuck_s: float  # as `start_s`, once it fails to pull an image or to find a Secret
    api_s: float  # without an answer from the API
    poll_s: float
    pause_s: float | None = None  # until the watch pauses. None if it never does
    deadline: str | None = None  # when the task's `execution_timeout` is reached, in ISO format
    aws_conn_id: str | None = None
    """Connection whose secrets are masked in the pods' texts, as in `connection_env`."""
    connection_env: dict[str, str] = field(default_factory=dict)
    before: dict[str, Any] | None = None  # how the last watch has paused: a `JobEnd`

    def job(self, log: Any) -> ClusterJob:
        attempt, options = Attempt(**self.attempt), {"log": log, "patience_s": self.api_s}
        return ClusterJob(self, self.name, self.namespace, attempt, **options)


class JobWatch:
    """Polls a Job, logs how it is and what its pods say, masked, and returns how it ended."""

    def __init__(
        self,
        job: ClusterJob,
        watched: WatchedJob,
        log: Callable[[str], None],
        masked: Callable[[str], str] = lambda text: text,
    ) -> None:
        self._job, self._limits, self._log_line, self._masked = job, watched, log, masked
        self._uid, self._container = watched.uid, watched.container_name
        self._began_at, self._look_at, self._last_text = time.monotonic(), 0.0, ""
        paused = JobEnd(EndKind.PAUSED, job.name)
        before = JobEnd.from_event(watched.before) if watched.before else paused
        self._idle_since = datetime.fromisoformat(before.idle_since) if before.idle_since else None
        self._had_succeeded, self._told = before.num_succeeded, dict.fromkeys(before.told)
        self._lines: deque[str] = deque(maxlen=_MAX_LINES)
        self._counts: dict[str, int] = {"num_succeeded": before.num_succeeded}

    async def until_end(self) -> JobEnd:
        """Watch until the Job has ended, can't start, or can no longer be read, or pause."""
        while True:
            deadline = self._limits.deadline
            if deadline and datetime.now(UTC) >= datetime.fromisoformat(deadline):
                return self._end(EndKind.TIMEOUT)
            try:
                end = await self._poll()
            except ANSWERLESS as error:
                is_forbidden = isinstance(error, ApiException) and error.status == FORBIDDEN
                kind = EndKind.FORBIDDEN if is_forbidden else EndKind.API_LOST
                return self._end(kind, message=message_of(error))
            if end is not None:
                return end
            await asyncio.sleep(self._limits.poll_s)

    async def _poll(self) -> JobEnd | None:
        """Read the Job once, and look at its pods if it is time; None if the watch goes on."""
        job = await self._job.read()
        if job is None or job.metadata.uid != self._uid:
            return self._end(EndKind.GONE)
        if (condition := ended_condition(job)) is not None:
            return await self._ended(condition)
        self._counts["num_succeeded"] = job.status.succeeded or 0
        limits, now = self._limits, time.monotonic()
        if now < self._look_at and not self._is_pause_due():
            return None
        self._look_at = now + min(_LOOK_S, limits.queue_s, limits.start_s, limits.stuck_s)
        is_ending = job.status.terminating or job.metadata.deletion_timestamp is not None
        if is_ending or self._job.has_ending_pods:
            await self._job.remove_stuck_pods()
        if job.status.failed:
            await self._log_failed()
        end = await self._look(job)
        return end or (self._end(EndKind.PAUSED) if self._is_pause_due() else None)

    def _is_pause_due(self) -> bool:
        """Whether to pause now; not while pods end: the next watch would restart their clock."""
        pause_s = self._limits.pause_s
        if pause_s is None or self._job.has_ending_pods:
            return False
        if self._counts["num_succeeded"] > self._had_succeeded:  # nothing was left for a worker
            pause_s = min(pause_s, _LOOK_S / 4)
        return time.monotonic() - self._began_at >= pause_s

    async def _look(self, job: Any) -> JobEnd | None:
        """Log what runs and what waits, and why; end the watch if nothing runs for too long."""
        num_active, num_ready = job.status.active or 0, job.status.ready or 0
        waiting = await self._pods("Pending") if num_active > num_ready else []
        waiting = [(name, state) for name, state in waiting if state.stage is not Stage.RUNNING]
        running = await self._job.pods("Running") if num_active else []
        running = [pod for pod in running if pod.metadata.deletion_timestamp is None]
        num_waiting = num_active - num_ready
        if len(waiting) < MAX_PODS:  # a pod may run whose template's readiness probe fails
            num_waiting = min(num_waiting, len(waiting))
        num_running = num_active - num_waiting if running or num_ready else 0
        self._counts |= {
            "num_pods": int((job.metadata.labels or {}).get(f"{LABEL}/num-pods", 0)),
            "parallelism": job.spec.parallelism or 0,
            "num_running": num_running,
            "num_waiting": num_waiting,
        }
        why = ""
        if job.spec.suspend:
            why = "it is suspended until its queue admits it"
        elif waiting:
            why = str(waiting[0][1])
        elif not num_active and (events := await self._job.events()):
            why = events[-1]
        text = f"{num_running} of {counted(job.spec.parallelism or 0, 'worker')} run"
        text += f"; waiting: {why}" if why else ""
        if running:  # each worker's last line tells the progress of all
            lines = await self._job.last_lines(running[0].metadata.name, self._container, 1)
            text += f"; {lines[-1]}" if lines else ""
        if text != self._last_text:
            self._last_text = text
            self._log(f"Job {self._job.name}: {text}")
        if num_running:
            self._idle_since = None
            return None
        return self._judge_idle(waiting, why)

    def _judge_idle(self, waiting: list[tuple[str, PodState]], why: str) -> JobEnd | None:
        now = datetime.now(UTC)
        self._idle_since = self._idle_since or now
        starting = [(name, state) for name, state in waiting if state.stage is Stage.STARTING]
        for name, state in starting:
            waited_s = (now - (state.since or now)).total_seconds()
            if state.reason in HOPELESS or (state.is_stuck and waited_s > self._limits.stuck_s):
                return self._end(EndKind.STUCK, name, state)
            if waited_s > self._limits.start_s:
                return self._end(EndKind.START_LIMIT, name, state)
        if not starting and (now - self._idle_since).total_seconds() > self._limits.queue_s:
            return self._end(EndKind.QUEUE_LIMIT, message=why)
        return None

    async def _pods(self, phase: str) -> list[tuple[str, PodState]]:
        """Names and states of pods, the latest last."""
        pods = await self._job.pods(phase)
        pods.sort(key=lambda pod: pod.metadata.creation_timestamp)
        return [(pod.metadata.name, PodState.of(pod, self._container)) for pod in pods]

    async def _log_failed(self) -> list[tuple[str, PodState]]:
        """Log the last lines of pods that have failed; returns all of them, the latest last."""
        states = await self._pods("Failed")
        fresh = [(name, state) for name, state in states if name not in self._told]
        for name, state in fresh[-_NUM_LOGS:]:
            lines = await self._job.last_lines(name, self._container, _NUM_LINES)
            for line in (f"Pod {name}: {state}", *(f"  {line}" for line in lines)):
                self._lines.append(self._log(line, _LINE_LENGTH))
        self._told |= dict.fromkeys(name for name, _ in fresh)
        return states

    def _log(self, text: str, length: int | None = None) -> str:
        text = self._masked(text)[:length]
        self._log_line(text)
        return text

    async def _ended(self, condition: Any) -> JobEnd:
        if condition.type == "Complete":
            return self._end(EndKind.COMPLETE)
        try:
            failed = await self._log_failed()
        except ANSWERLESS:  # the Job's own reason has to do
            failed = []
        own = [(name, state) for name, state in failed if not state.is_disrupted]
        own.sort(key=lambda item: item[1].exit_code in FINAL_EXIT_CODES)
        is_final = bool(own) and own[-1][1].exit_code in FINAL_EXIT_CODES
        # A pod that the policy names may be gone, or beyond those that were read.
        is_unnamed = condition.reason == POLICY and not is_final
        if condition.reason == "DeadlineExceeded" or not own or is_unnamed:
            reason, message = condition.reason or "", condition.message or ""
            return self._end(EndKind.FAILED, reason=reason, message=message)
        return self._end(EndKind.FAILED, *own[-1])

    def _end(
        self, kind: EndKind, pod: str = "", state: PodState | None = None, **words: str
    ) -> JobEnd:
        if state is not None:
            words = {"reason": state.reason, "message": state.message}
        return JobEnd(
            kind,
            self._job.name,
            uid=self._uid,
            reason=words.get("reason", ""),
            message=self._masked(words.get("message", "")),
            pod=pod,
            exit_code=state.exit_code if state else None,
            idle_since=self._idle_since.isoformat() if self._idle_since else "",
            told=tuple(self._told),
            last_lines=tuple(self._lines),
            **self._counts,
        )
