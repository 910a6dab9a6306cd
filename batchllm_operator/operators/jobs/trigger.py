"""The trigger that watches a Job while its task is deferred."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from dataclasses import asdict, dataclass
from datetime import datetime
from typing import Any, Final

from airflow.providers.cncf.kubernetes.version_compat import AIRFLOW_V_3_3_PLUS
from airflow.triggers.base import BaseTrigger, TriggerEvent
from asgiref.sync import sync_to_async

from batchllm_operator.operators.credentials import Credentials
from batchllm_operator.operators.jobs.calls import Cluster
from batchllm_operator.operators.jobs.cluster_job import ClusterJob
from batchllm_operator.operators.jobs.end import JobEnd
from batchllm_operator.operators.jobs.owner import Attempt
from batchllm_operator.operators.jobs.watch import JobWatch, WatchLimits

LIVE_STATES: Final = frozenset({"awaiting_input", "deferred", "running", "up_for_reschedule"})
"""A try has begun and goes on. In all other states no try has the task's Job: it has ended, was
cleared (`restarting`, no state), or hasn't begun (`scheduled`, `queued`)."""
_STATE_LIMIT_S: Final = 10.0
"""Limit for reading the task's state: a cancelled trigger has thirty seconds."""

_unfinished: Final[set[asyncio.Task[None]]] = set()
"""Strong references: the event loop keeps only weak ones."""


async def _to_its_end(work: Coroutine[Any, Any, None]) -> None:
    """Wait for work that continues even if the waiter is cancelled.

    Airflow cancels a trigger every second until it has ended, so the second cancellation would cut
    off the clean-up that the first one began.
    """
    task = asyncio.create_task(work)
    _unfinished.add(task)
    task.add_done_callback(_unfinished.discard)
    await asyncio.shield(task)


@dataclass(frozen=True, slots=True)
class WatchedJob(Cluster):
    """The arguments of `JobTrigger`, JSON-serializable."""

    name: str
    namespace: str
    uid: str
    attempt: dict[str, str]
    """The `Attempt` that has the Job."""
    container_name: str
    limits: dict[str, Any]
    """A `WatchLimits`."""
    deadline: str | None
    """When the task's `execution_timeout` is reached, in ISO format."""
    aws_conn_id: str | None
    """Connection whose secrets are masked in the pods' texts, as in `connection_env`."""
    connection_env: dict[str, str]
    before: dict[str, Any] | None = None
    """How the last watch has paused: a `JobEnd`."""

    def job(self, log: Any, patience_s: float) -> ClusterJob:
        attempt = Attempt(**self.attempt)
        return ClusterJob(self, self.name, self.namespace, attempt, log=log, patience_s=patience_s)

    def watch(
        self, job: ClusterJob, log: Callable[[str], None], masked: Callable[[str], str]
    ) -> JobWatch:
        return JobWatch(
            job,
            self.uid,
            self.container_name,
            WatchLimits(**self.limits),
            log,
            deadline=datetime.fromisoformat(self.deadline) if self.deadline else None,
            masked=masked,
            before=JobEnd.from_event(self.before) if self.before else None,
        )


class JobTrigger(BaseTrigger):
    """Runs a `JobWatch` and fires one event, a `JobEnd`.

    When the user kills the task, the Job is deleted: in `on_kill` from Airflow 3.3 on, before that
    in `cleanup` once no try of the task lives. A restart of the triggerer leaves the Job alone.

    Args:
        arguments: those of `WatchedJob`.
    """

    def __init__(self, **arguments: Any) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._watched = WatchedJob(**arguments)
        self._has_fired = False

    def serialize(self) -> tuple[str, dict[str, Any]]:
        return f"{__name__}.JobTrigger", asdict(self._watched)

    async def run(self) -> AsyncIterator[TriggerEvent]:
        """Fire once, when the watch has ended."""
        masked = await self._masker()
        async with self._job() as job:
            watch = self._watched.watch(job, lambda line: self.log.info("%s", line), masked)
            end = await watch.until_end()
            if end.holds_resources:  # the worker may come late, or never
                await self._delete(job)
        self._has_fired = True
        yield TriggerEvent(end.as_event())  # type: ignore[no-untyped-call]

    async def on_kill(self) -> None:
        """Delete the Job when a user has killed the task (Airflow 3.3 and later).

        A triggerer that was cut off loses its triggers to another one, and calls this, too; but
        then a try of the task lives, and has the Job.
        """
        await _to_its_end(self._delete_if_killed(if_unknown=True))

    async def cleanup(self) -> None:
        """Delete the Job before Airflow 3.3, if no try of the task lives any more."""
        if not AIRFLOW_V_3_3_PLUS:
            await _to_its_end(self._delete_if_killed(if_unknown=False))

    async def get_task_state(self) -> str | None:
        from airflow.sdk.execution_time.task_runner import RuntimeTaskInstance

        return await sync_to_async(task_state)(
            self.task_instance, RuntimeTaskInstance.get_task_states
        )

    async def _delete_if_killed(self, *, if_unknown: bool) -> None:
        if self._has_fired:
            return
        try:
            state = await asyncio.wait_for(self.get_task_state(), _STATE_LIMIT_S)
            is_killed = state not in LIVE_STATES
        # Any error: an unwatched Job costs more than one that is created again.
        except Exception as error:  # noqa: BLE001
            self.log.warning("Can't tell why the trigger was cancelled: %r", error)
            is_killed = if_unknown
        if not is_killed:
            return
        async with self._job() as job:
            await self._delete(job)

    async def _delete(self, job: ClusterJob) -> None:
        """Delete the Job; if that fails, the worker does it when it resumes."""
        self.log.info("Deleting Job %s in namespace %s", job.name, job.namespace)
        try:
            await job.delete(self._watched.uid)
        # Any error: the event has to be fired, and a cancelled trigger has to end.
        except Exception as error:  # noqa: BLE001
            self.log.error("Job %s couldn't be deleted: %r", job.name, error)

    def _job(self) -> ClusterJob:
        return self._watched.job(self.log, self._watched.limits["api_s"])

    async def _masker(self) -> Callable[[str], str]:
        """A function that masks the connections' secrets, which this process hasn't read yet."""
        try:
            credentials = await sync_to_async(Credentials.of)(
                self._watched.aws_conn_id, self._watched.connection_env
            )
        # Any error: the Job has to be watched, but then none of its pods' texts is passed on.
        except Exception as error:  # noqa: BLE001
            self.log.warning("Can't read the connections; pods' lines are left out: %s", error)
            return lambda text: "(left out)"
        return credentials.masker


def task_state(ti: Any, states: Callable[..., Any]) -> str | None:
    """The task's state in Airflow's database, None if it has none or no longer exists."""
    found = states(
        dag_id=ti.dag_id, task_ids=[ti.task_id], run_ids=[ti.run_id], map_index=ti.map_index
    )
    state = next(iter(found.get(ti.run_id, {}).values()), None)
    return None if state is None else str(state)
