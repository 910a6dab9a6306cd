"""The trigger that watches a Job while its task is deferred."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from dataclasses import asdict
from typing import Any, Final

from airflow.providers.cncf.kubernetes.version_compat import AIRFLOW_V_3_3_PLUS
from airflow.triggers.base import BaseTrigger, TriggerEvent
from asgiref.sync import sync_to_async

from batchllm_operator.operators.credentials import Credentials
from batchllm_operator.operators.jobs.cluster_job import ClusterJob
from batchllm_operator.operators.jobs.watch import JobWatch, WatchedJob

LIVE_STATES: Final = frozenset({"awaiting_input", "deferred", "running", "up_for_reschedule"})
"""A try has begun and goes on. In all other states no try has the task's Job: it has ended, was
cleared (`restarting`, no state), or hasn't begun (`scheduled`, `queued`)."""
_STATE_LIMIT_S: Final = 10.0
"""Limit for reading the task's state: a cancelled trigger has thirty seconds."""

_unfinished: Final[set[asyncio.Task[None]]] = set()
"""Strong references: the event loop keeps only weak ones."""


class JobTrigger(BaseTrigger):
    """Watches a Job and fires one event, a `JobEnd`.

    When the user kills the task, the Job is deleted: in `on_kill` from Airflow 3.3 on, before that
    in `cleanup` once no try of the task lives. A restart of the triggerer leaves the Job alone.
    """

    def __init__(self, **watched: Any) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._watched = WatchedJob(**watched)
        self._has_fired = False

    def serialize(self) -> tuple[str, dict[str, Any]]:
        return f"{__name__}.JobTrigger", asdict(self._watched)

    async def run(self) -> AsyncIterator[TriggerEvent]:
        """Fire once, when the watch has ended."""
        masked = await self._masker()
        async with self._watched.job(self.log) as job:
            end = await JobWatch(job, self._watched, self._log_line, masked).until_end()
            if end.holds_resources:  # the worker may come late, or never
                await self._delete(job)
        self._has_fired = True
        yield TriggerEvent(end.as_event())  # type: ignore[no-untyped-call]

    def _log_line(self, line: str) -> None:
        self.log.info("%s", line)

    async def on_kill(self) -> None:
        """Delete the Job when a user has killed the task (Airflow 3.3 and later).

        A triggerer that was cut off calls this, too; but then a try of the task lives.
        """
        await self._delete_if_killed(if_unknown=True)

    async def cleanup(self) -> None:
        """Delete the Job before Airflow 3.3, if no try of the task lives any more."""
        if not AIRFLOW_V_3_3_PLUS:
            await self._delete_if_killed(if_unknown=False)

    async def get_task_state(self) -> str | None:
        from airflow.sdk.execution_time.task_runner import RuntimeTaskInstance

        states = RuntimeTaskInstance.get_task_states
        return await sync_to_async(task_state)(self.task_instance, states)

    async def _delete_if_killed(self, *, if_unknown: bool) -> None:
        """Airflow cancels a trigger every second until it has ended, so this is shielded."""

        async def delete() -> None:
            try:
                state = await asyncio.wait_for(self.get_task_state(), _STATE_LIMIT_S)
                is_killed = state not in LIVE_STATES
            # Any error: an unwatched Job costs more than one that is created again.
            except Exception as error:  # noqa: BLE001
                self.log.warning("Can't tell why the trigger was cancelled: %r", error)
                is_killed = if_unknown
            if is_killed:
                async with self._watched.job(self.log) as job:
                    await self._delete(job)

        if not self._has_fired:
            task = asyncio.create_task(delete())
            _unfinished.add(task)
            task.add_done_callback(_unfinished.discard)
            await asyncio.shield(task)

    async def _delete(self, job: ClusterJob) -> None:
        """Delete the Job; if that fails, the worker does it when it resumes."""
        self.log.info("Deleting Job %s in namespace %s", job.name, job.namespace)
        try:
            await job.delete(self._watched.uid)
        # Any error: the event has to be fired, and a cancelled trigger has to end.
        except Exception as error:  # noqa: BLE001
            self.log.error("Job %s couldn't be deleted: %r", job.name, error)

    async def _masker(self) -> Callable[[str], str]:
        """A function that masks the connections' secrets, which this process hasn't read yet."""
        connections = (self._watched.aws_conn_id, self._watched.connection_env)
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
