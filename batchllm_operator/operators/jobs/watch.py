"""Watches one Job until its end, from a worker or from the triggerer.

Its requests don't depend on the number of pods: one a poll for the Job, and a few a minute for what
its waiting, running and failed pods say.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Final

from kubernetes_asyncio.client.exceptions import ApiException

from batchllm_operator.amounts import counted
from batchllm_operator.errors import FINAL_EXIT_CODES
from batchllm_operator.operators.jobs.api_errors import ANSWERLESS, FORBIDDEN, message_of
from batchllm_operator.operators.jobs.cluster_job import ClusterJob, ended_condition
from batchllm_operator.operators.jobs.end import POLICY, EndKind, JobEnd
from batchllm_operator.operators.jobs.owner import LABEL
from batchllm_operator.operators.jobs.state import HOPELESS, PodState, Stage

_LOOK_S: Final = 60.0
"""Between two looks at the pods."""
_NUM_LOGS: Final = 3
"""Failed pods whose last lines one look logs."""
_NUM_LINES, _LINE_LENGTH, _MAX_LINES = 20, 500, 100
"""Of a failed pod's log; and lines that the end carries, which Airflow's database keeps."""


@dataclass(frozen=True, slots=True)
class WatchLimits:
    """Time limits of a Job, in seconds."""

    queue_s: float
    """While no pod has a node, or may be created."""
    start_s: float
    """From a pod's having a node until its main container runs, while no other runs."""
    stuck_s: float
    """As `start_s`, once it fails to pull an image or to find a Secret."""
    api_s: float
    """Without an answer from the API."""
    poll_s: float
    pause_s: float | None = None
    """Until the watch pauses. None if it never does."""


class JobWatch:
    """Polls a Job, logs how it is, and returns how it ended.

    Args:
        job: the Job; its `patience_s` is how long the API may fail to answer.
        uid: of the Job: another one of its name isn't meant.
        container_name: the main container of its pods.
        limits: its time limits.
        log: receives lines about the Job and of its pods' logs.
        deadline: when the task's `execution_timeout` is reached.
        masked: masks secrets in the pods' texts.
        before: how the watch before this one has paused.
    """

    def __init__(
        self,
        job: ClusterJob,
        uid: str,
        container_name: str,
        limits: WatchLimits,
        log: Callable[[str], None],
        *,
        deadline: datetime | None = None,
        masked: Callable[[str], str] = lambda text: text,
        before: JobEnd | None = None,
    ) -> None:
        self._job, self._uid, self._container = job, uid, container_name
        self._limits, self._log, self._masked = limits, log, masked
        self._deadline = deadline
        self._began_at = time.monotonic()
        self._look_at = 0.0
        self._said = ""
        since = before.idle_since if before else ""
        self._idle_since = datetime.fromisoformat(since) if since else None
        self._num_succeeded = before.num_succeeded if before else 0
        self._had_succeeded = self._num_succeeded
        self._told = dict.fromkeys(before.told if before else ())
        self._lines: deque[str] = deque(maxlen=_MAX_LINES)
        self._num_pods = self._num_running = self._num_waiting = 0

    async def until_end(self) -> JobEnd:
        """Watch until the Job has ended, can't start, or can no longer be read, or pause."""
        while True:
            if self._deadline is not None and datetime.now(UTC) >= self._deadline:
                return self._end(EndKind.TIMEOUT)
            try:
                end = await self._look()
            except ANSWERLESS as error:
                status = error.status if isinstance(error, ApiException) else None
                kind = EndKind.FORBIDDEN if status == FORBIDDEN else EndKind.API_LOST
                return self._end(kind, message=message_of(error))
            if end is not None:
                return end
            if self._is_pause_due():
                return self._end(EndKind.PAUSED)
            await asyncio.sleep(self._limits.poll_s)

    def _is_pause_due(self) -> bool:
        """Whether to pause now; not while pods end: the next watch would restart their clock."""
        pause_s = self._limits.pause_s
        if pause_s is None or self._job.has_ending_pods:
            return False
        if self._num_succeeded > self._had_succeeded:  # nothing was left for one of the workers
            pause_s = min(pause_s, _LOOK_S / 4)
        return time.monotonic() - self._began_at >= pause_s

    async def _look(self) -> JobEnd | None:
        """Read the Job once; None if the watch goes on."""
        job = await self._job.read()
        if job is None or job.metadata.uid != self._uid:
            return self._end(EndKind.GONE)
        condition, status = ended_condition(job), job.status
        if condition is not None:
            return await self._ended(condition)
        self._num_pods = int((job.metadata.labels or {}).get(f"{LABEL}/num-pods", 0))
        self._num_running = status.ready or 0
        self._num_waiting = (status.active or 0) - self._num_running
        self._num_succeeded = status.succeeded or 0
        if self._num_running:
            self._idle_since = None
        elif self._idle_since is None:
            self._idle_since = datetime.now(UTC)
        if time.monotonic() < self._look_at:
            return None
        limits = self._limits
        self._look_at = time.monotonic() + min(
            _LOOK_S, limits.queue_s, limits.start_s, limits.stuck_s
        )
        is_ending = status.terminating or job.metadata.deletion_timestamp is not None
        if is_ending or self._job.has_ending_pods:
            await self._job.remove_stuck_pods()
        if status.failed:
            await self._tell_failed()
        return await self._judge_waiting(job)

    @property
    def _idle_s(self) -> float:
        if self._idle_since is None:
            return 0.0
        return (datetime.now(UTC) - self._idle_since).total_seconds()

    async def _judge_waiting(self, job: Any) -> JobEnd | None:
        """Log what runs and what waits, and why; end the watch if nothing runs for too long."""
        spec = job.spec
        text = f"{self._num_running} of {counted(spec.parallelism or 0, 'worker')} run"
        waiting: list[tuple[str, PodState]] = []
        if self._num_waiting > 0:
            pods = await self._job.pods("Pending")
            states = [(pod.metadata.name, PodState.of(pod, self._container)) for pod in pods]
            waiting = [(name, state) for name, state in states if state.stage is not Stage.RUNNING]
        why = ""
        if spec.suspend:
            why = "it is suspended until its queue admits it"
        elif waiting:
            why = str(waiting[0][1])
        elif not job.status.active and (events := await self._job.events()):
            why = events[-1]
        if why:
            text += f"; waiting: {why}"
        if self._num_running:
            text += await self._progress()
        if text != self._said:
            self._said = text
            self._log(self._masked(f"Job {self._job.name}: {text}"))
        if self._num_running:
            return None
        return self._judge_idle(waiting, why)

    async def _progress(self) -> str:
        """The last line of a running pod: each worker tells the progress of all."""
        for pod in await self._job.pods("Running", limit=1):
            lines = await self._job.last_lines(pod.metadata.name, self._container, 1)
            return f"; {lines[-1]}" if lines else ""
        return ""

    def _judge_idle(self, waiting: list[tuple[str, PodState]], why: str) -> JobEnd | None:
        now = datetime.now(UTC)
        starting = [(name, state) for name, state in waiting if state.stage is Stage.STARTING]
        for name, state in starting:
            waited_s = (now - (state.since or now)).total_seconds()
            if state.reason in HOPELESS or (state.is_stuck and waited_s > self._limits.stuck_s):
                return self._end(EndKind.STUCK, name, state)
            if waited_s > self._limits.start_s:
                return self._end(EndKind.START_LIMIT, name, state)
        if not starting and self._idle_s > self._limits.queue_s:
            return self._end(EndKind.QUEUE_LIMIT, message=why)
        return None

    async def _tell_failed(self) -> list[tuple[str, PodState]]:
        """Log the last lines of pods that have failed; returns all of them, the latest last."""
        pods = await self._job.pods("Failed")
        pods.sort(key=lambda pod: pod.metadata.creation_timestamp)
        states = [(pod.metadata.name, PodState.of(pod, self._container)) for pod in pods]
        fresh = [(name, state) for name, state in states if name not in self._told]
        for name, state in fresh[-_NUM_LOGS:]:
            lines = await self._job.last_lines(name, self._container, _NUM_LINES)
            for line in (f"Pod {name}: {state}", *(f"  {line}" for line in lines)):
                text = self._masked(line)[:_LINE_LENGTH]
                self._lines.append(text)
                self._log(text)
        self._told |= dict.fromkeys(name for name, _ in fresh)
        return states

    async def _ended(self, condition: Any) -> JobEnd:
        if condition.type == "Complete":
            return self._end(EndKind.COMPLETE)
        try:
            failed = await self._tell_failed()
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
        name, state = own[-1]
        return self._end(EndKind.FAILED, name, state)

    def _end(
        self,
        kind: EndKind,
        pod: str = "",
        state: PodState | None = None,
        *,
        reason: str = "",
        message: str = "",
    ) -> JobEnd:
        return JobEnd(
            kind,
            self._job.name,
            uid=self._uid,
            reason=state.reason if state else reason,
            message=self._masked(state.message if state else message),
            pod=pod,
            exit_code=state.exit_code if state else None,
            idle_since=self._idle_since.isoformat() if self._idle_since else "",
            num_pods=self._num_pods,
            num_running=self._num_running,
            num_waiting=self._num_waiting,
            num_succeeded=self._num_succeeded,
            told=tuple(self._told),
            last_lines=tuple(self._lines),
        )
