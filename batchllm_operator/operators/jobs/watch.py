"""Watches one Job until its end, from a worker or, by a trigger, from the triggerer.

Its requests don't depend on the number of pods: one a poll for the Job, and a few a minute for what
its waiting, running and failed pods say.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import asdict, replace
from datetime import UTC, datetime
from typing import Any, Final

from airflow.triggers.base import BaseTrigger, TriggerEvent
from asgiref.sync import sync_to_async
from kubernetes_asyncio.client.exceptions import ApiException

from batchllm_operator.amounts import counted
from batchllm_operator.errors import FINAL_EXIT_CODES
from batchllm_operator.operators.credentials import Credentials
from batchllm_operator.operators.jobs.calls import ANSWERLESS, FORBIDDEN, message_of
from batchllm_operator.operators.jobs.cluster_job import MAX_PODS, ClusterJob, ended_condition
from batchllm_operator.operators.jobs.end import HOPELESS, STUCK, EndKind, JobEnd, PodState, Stage
from batchllm_operator.operators.jobs.owner import NUM_PODS, WatchedJob

_POLICY: Final = "PodFailurePolicy"  # a Job's reason: an exit code that no retry mends has ended it
_LOOK_S: Final = 60.0  # between two looks at the pods
_NUM_LOGS: Final = 3  # failed pods whose last lines one look logs
_NUM_LINES, _LINE_LENGTH, _MAX_LINES = 20, 500, 100
"""Of a failed pod's log; and lines that the end carries, which Airflow's database keeps."""
LIVE_STATES: Final = frozenset({"awaiting_input", "deferred", "running", "up_for_reschedule"})
"""A try has begun and goes on. In all other states no try has the task's Job: it has ended, was
cleared (`restarting`, no state), or hasn't begun (`scheduled`, `queued`)."""
_STATE_LIMIT_S: Final = 10.0  # for reading the task's state

_unfinished: Final[set[asyncio.Task[None]]] = set()  # the event loop keeps only weak references


class JobWatch:
    """Polls a Job, logs how it is and what its pods say, masked, and returns how it ended."""

    def __init__(self, job: ClusterJob, masked: Callable[[str], str]) -> None:
        self._job, self._of, self._masked = job, job.of, masked
        self._began_at, self._look_at, self._last_text = time.monotonic(), 0.0, ""
        before = JobEnd(EndKind.PAUSED)
        if job.of.before is not None:
            before = replace(JobEnd.from_event(job.of.before), last_lines=())
        self._seen, self._had_succeeded = before, before.num_succeeded

    async def until_end(self) -> JobEnd:
        """Watch until the Job has ended, can't start, or can no longer be read, or pause."""
        while True:
            # Not at once: Airflow fails a try that goes on before it has noted the deferral.
            await asyncio.sleep(self._of.poll_s)
            deadline = self._of.deadline
            if deadline and datetime.now(UTC) >= datetime.fromisoformat(deadline):
                text = "reached the task's execution_timeout; finished parts are kept"
                return self._end(EndKind.LATE, text)
            try:
                end = await self._poll()
            except ANSWERLESS as error:
                why = "the cluster's API didn't answer for too long"
                if isinstance(error, ApiException) and error.status == FORBIDDEN:
                    why = "its watcher lacks a right: give the triggerer's (or, with"
                    why += " deferrable=False, the worker's) service account the chart's Role"
                text = f"is left alone, and the next try looks for it; {why}; the last error: "
                return self._end(EndKind.UNSEEN, text, message_of(error))
            if end is not None:
                return end

    async def _poll(self) -> JobEnd | None:
        """Read the Job once, and look at its pods if it is time; None if the watch goes on."""
        job = await self._job.call_job("read")
        if job is None or job.metadata.uid != self._of.uid:
            text = "was deleted from outside before its results were whole"
            return self._end(EndKind.FAILED, text)
        if (condition := ended_condition(job)) is not None:
            return await self._ended(condition)
        self._note(num_succeeded=job.status.succeeded or 0)
        of, now = self._of, time.monotonic()
        if now < self._look_at and not self._is_pause_due():
            return None
        self._look_at = now + min(_LOOK_S, of.queue_s, of.start_s, of.stuck_s)
        is_ending = job.status.terminating or job.metadata.deletion_timestamp is not None
        if is_ending or self._job.ending_since:
            await self._job.remove_stuck_pods()
        if job.status.failed:
            await self._log_failed()
        end = await self._look(job)
        if end is None and self._is_pause_due():
            end = self._end(EndKind.PAUSED, "was ended because every shard seemed to be finished")
        return end

    def _is_pause_due(self) -> bool:
        """Whether to pause now; not while pods end: the next watch would restart their clock."""
        pause_s = self._of.pause_s
        if pause_s is None or self._job.ending_since:
            return False
        if self._seen.num_succeeded > self._had_succeeded:  # nothing was left for a worker
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
        self._note(
            num_pods=int((job.metadata.labels or {}).get(NUM_PODS, 0)),
            parallelism=job.spec.parallelism or 0,
            num_running=num_running,
            num_waiting=num_waiting,
        )
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
            lines = await self._job.last_lines(running[0].metadata.name, self._of.container_name, 1)
            text += f"; {lines[-1]}" if lines else ""
        if text != self._last_text:
            self._last_text = text
            self._log(f"Job {self._of.name}: {text}")
        if num_running:
            self._note(idle_since="")
            return None
        return self._judge_idle(waiting, why)

    def _judge_idle(self, waiting: list[tuple[str, PodState]], why: str) -> JobEnd | None:
        now = datetime.now(UTC)
        self._note(idle_since=self._seen.idle_since or now.isoformat())
        idle_s = (now - datetime.fromisoformat(self._seen.idle_since)).total_seconds()
        starting = [(name, state) for name, state in waiting if state.stage is Stage.STARTING]
        for name, state in starting:
            waited_s = (now - (state.since or now)).total_seconds()
            is_final = state.reason in HOPELESS
            if is_final or (state.reason in STUCK and waited_s > self._of.stuck_s):
                text = f"is deleted, as its pod {name} can't start ({state.reason}): "
                return self._end(EndKind.LATE, text, state.said, is_final=is_final)
            if waited_s > self._of.start_s:
                text = f"is deleted, as no pod started in time (start_timeout): {state.reason} "
                return self._end(EndKind.LATE, text, state.said)
        if not starting and idle_s > self._of.queue_s:
            text = "is deleted, as no pod found room in time (queue_timeout): "
            return self._end(EndKind.LATE, text, why)
        return None

    async def _pods(self, phase: str) -> list[tuple[str, PodState]]:
        pods = await self._job.pods(phase)
        pods.sort(key=lambda pod: pod.metadata.creation_timestamp)
        return [(pod.metadata.name, PodState.of(pod, self._of.container_name)) for pod in pods]

    async def _log_failed(self) -> list[tuple[str, PodState]]:
        """Log the last lines of pods that have failed; returns all of them, the latest last."""
        states, lines = await self._pods("Failed"), list(self._seen.last_lines)
        fresh = [(name, state) for name, state in states if name not in self._seen.told]
        for name, state in fresh[-_NUM_LOGS:]:
            said = await self._job.last_lines(name, self._of.container_name, _NUM_LINES)
            for line in (f"Pod {name}: {state}", *(f"  {line}" for line in said)):
                lines.append(self._log(line, _LINE_LENGTH))
        told = (*self._seen.told, *(name for name, _ in fresh))
        self._note(told=told, last_lines=tuple(lines[-_MAX_LINES:]))
        return states

    def _log(self, text: str, length: int | None = None) -> str:
        text = self._masked(text)[:length]
        self._job.log.info("%s", text)
        return text

    async def _ended(self, condition: Any) -> JobEnd:
        if condition.type == "Complete":
            text = "ended well, but its results aren't in the lake: do its pods run the right"
            text += " image, and do they write where this worker reads?"
            return self._end(EndKind.COMPLETE, text)
        try:
            failed = await self._log_failed()
        except ANSWERLESS:  # the Job's own reason has to do
            failed = []
        own = [(name, state) for name, state in failed if not state.is_disrupted]
        own.sort(key=lambda item: item[1].exit_code in FINAL_EXIT_CODES)
        is_final = bool(own) and own[-1][1].exit_code in FINAL_EXIT_CODES
        if condition.reason == "DeadlineExceeded":
            text = "it ran longer than active_deadline_seconds; finished parts are kept"
            return self._end(EndKind.FAILED, f"failed: {text}")
        text = f"{condition.reason or 'no reason given'}: {condition.message}"
        # A pod that the policy names may be gone, or beyond those that were read.
        if own and (is_final or condition.reason != _POLICY):
            text = f"pod {own[-1][0]} {own[-1][1].failure()}"
        is_final = is_final or condition.reason == _POLICY
        return self._end(EndKind.FAILED, "failed: ", text, is_final=is_final)

    def _note(self, **seen: Any) -> None:
        self._seen = replace(self._seen, **seen)

    def _end(self, kind: EndKind, text: str, said: str = "", *, is_final: bool = False) -> JobEnd:
        text = f"Job {self._of.name} {text}{self._masked(said) if said else ''}".rstrip()
        return replace(self._seen, kind=kind, text=text, is_final=is_final)


class JobTrigger(BaseTrigger):
    """Watches a Job while its task is deferred, and fires one event, a `JobEnd`.

    If it is cancelled, it deletes the Job, unless a try of the task lives.
    """

    def __init__(self, **watched: Any) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._watched = WatchedJob(**watched)
        self._has_fired = False

    def serialize(self) -> tuple[str, dict[str, Any]]:
        return f"{__name__}.JobTrigger", asdict(self._watched)

    async def run(self) -> AsyncIterator[TriggerEvent]:
        masked = await self._masker()
        async with ClusterJob(self._watched, self.log) as job:
            end = await JobWatch(job, masked).until_end()
            if end.kind is EndKind.LATE:  # the worker may come late, or never
                await self._delete(job)
        self._has_fired = True
        yield TriggerEvent(end.as_event())  # type: ignore[no-untyped-call]

    async def get_task_state(self) -> str | None:
        from airflow.sdk.execution_time.task_runner import RuntimeTaskInstance

        states = RuntimeTaskInstance.get_task_states
        return await sync_to_async(task_state)(self.task_instance, states)

    async def cleanup(self) -> None:
        """Airflow cancels a trigger every second until it has ended, so this is shielded."""

        async def delete() -> None:
            try:
                state = await asyncio.wait_for(self.get_task_state(), _STATE_LIMIT_S)
            # Any error, as when the triggerer itself ends: another one, or a next try, goes on.
            except Exception as error:  # noqa: BLE001
                self.log.warning("Can't tell why the trigger was cancelled: %r", error)
                return
            if state not in LIVE_STATES:
                async with ClusterJob(self._watched, self.log) as job:
                    await self._delete(job)

        if not self._has_fired:
            task = asyncio.create_task(delete())
            _unfinished.add(task)
            task.add_done_callback(_unfinished.discard)
            await asyncio.shield(task)

    async def _delete(self, job: ClusterJob) -> None:
        """Delete the Job; if that fails, the worker does it when it resumes."""
        self.log.info("Deleting Job %s in namespace %s", job.of.name, job.of.namespace)
        try:
            await job.delete()
        # Any error: the event has to be fired, and a cancelled trigger has to end.
        except Exception as error:  # noqa: BLE001
            self.log.error("Job %s couldn't be deleted: %r", job.of.name, error)

    async def _masker(self) -> Callable[[str], str]:
        """A function that masks the connections' secrets, which this process hasn't read yet."""
        connections = (self._watched.lake_conn_id, self._watched.connection_env)
        try:
            return (await sync_to_async(Credentials.of)(*connections)).masker
        # Any error: the Job has to be watched, but then none of its pods' texts is passed on.
        except Exception as error:  # noqa: BLE001
            self.log.warning("Can't read the connections; pods' lines are left out: %s", error)
            return lambda text: "(left out)"


def task_state(ti: Any, states: Callable[..., Any]) -> str | None:
    """The task's state in Airflow's database, None if it has none or no longer exists."""
    tasks = {"dag_id": ti.dag_id, "task_ids": [ti.task_id], "run_ids": [ti.run_id]}
    states_by_id = states(**tasks, map_index=ti.map_index).get(ti.run_id, {})
    state = next(iter(states_by_id.values()), None)
    return None if state is None else str(state)
