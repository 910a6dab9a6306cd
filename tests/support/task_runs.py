"""Operators run as Airflow runs them, but in this process: worker, triggerer and retries."""

import asyncio
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any, Literal
from uuid import UUID

from airflow.providers.common.compat.sdk import TaskDeferred
from uuid6 import uuid7

Mode = Literal["sync", "deferred"]


@dataclass
class TaskInstance:
    """What an operator sees of its task instance; `state` is what the API server says of it."""

    task_id: str = "generate"
    dag_id: str = "job"
    run_id: str = "scheduled__2026-01-31"
    map_index: int = -1
    try_number: int = 1
    max_tries: int = 2
    start_date: datetime = field(default_factory=lambda: datetime.now(UTC))
    state: str | None = "running"
    pushed: dict[str, Any] = field(default_factory=dict)
    id: UUID = field(default_factory=uuid7)

    def xcom_push(self, key: str, value: Any) -> None:
        self.pushed[key] = value

    def get_task_states(self, **wanted: Any) -> dict[str, dict[str, str | None]]:
        assert wanted["task_ids"] == [self.task_id] and wanted["run_ids"] == [self.run_id]
        return {self.run_id: {self.task_id: self.state}}


class TaskRun:
    """One try of a task, in a thread.

    `sync` waits in the worker. `deferred` runs the trigger as the triggerer does: made again
    from what it says of itself, in an event loop of its own.
    """

    def __init__(self, make_task: Callable[[], Any], ti: TaskInstance, mode: Mode) -> None:
        self.ti, self._mode, self._make_task = ti, mode, make_task
        self.task: Any = None
        self.result: Any = None
        self.error: BaseException | None = None
        self.num_deferrals = 0
        self.state_takes_s = 0.0  # until Airflow tells a trigger the state of its task
        self.trigger: Any = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._waiting: asyncio.Task[Any] | None = None
        self._restarting = False
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    @property
    def context(self) -> dict[str, Any]:
        run = type("Run", (), {"run_id": self.ti.run_id})()
        return {"ti": self.ti, "run_id": self.ti.run_id, "dag": None, "dag_run": run}

    @property
    def is_alive(self) -> bool:
        return self._thread.is_alive()

    @property
    def is_deferred(self) -> bool:
        return self._waiting is not None

    def wait(self) -> Any:
        """The task's return value; raises what it raised."""
        self.join()
        if self.error is not None:
            raise self.error
        return self.result

    def failure(self) -> BaseException:
        """What the task raised, which it has to."""
        self.join()
        assert self.error is not None, f"the task succeeded: {self.result}"
        return self.error

    def join(self) -> None:
        """Let it come to its end."""
        self._thread.join(180)
        assert not self.is_alive, "the task doesn't end"

    def kill(self, state: str | None) -> None:
        """What a user who marks or clears the task does (`state`), or the end of its worker."""
        self.ti.state = state
        if not self.is_deferred:
            self.task.on_kill()
            return
        assert self._loop is not None and self._waiting is not None
        self._loop.call_soon_threadsafe(self._cancel_until_over)

    def restart_triggerer(self) -> None:
        """End the trigger and start it again from the database, as another triggerer does."""
        assert self._loop is not None and self._waiting is not None
        self._restarting = True
        self._loop.call_soon_threadsafe(self._waiting.cancel)

    def _run(self) -> None:
        method, arguments = "execute", dict[str, Any]()
        try:
            while True:
                self.task = self._make_task()  # each time in a new process
                if self._mode == "sync":
                    self.task.deferrable = False
                function = getattr(type(self.task), method)
                function = getattr(function, "__wrapped__", function)  # past a guard of Airflow's
                try:
                    self.result = function(self.task, self.context, **arguments)
                    return
                except TaskDeferred as deferral:
                    self.num_deferrals += 1
                    event = self._event(deferral.trigger)
                    method = deferral.method_name
                    arguments = {"event": event, **(deferral.kwargs or {})}
        except BaseException as error:  # noqa: BLE001 - raised where the run is awaited
            self.error = error

    def _event(self, trigger: Any) -> Any:
        while True:
            path, arguments = trigger.serialize()
            module, _, name = path.rpartition(".")
            trigger = getattr(__import__(module, fromlist=[name]), name)(**arguments)
            trigger.get_task_state = self._state
            self.trigger = trigger
            try:
                return asyncio.run(self._first(trigger))
            except asyncio.CancelledError:
                self._waiting = None
                if not self._restarting:
                    raise
                self._restarting = False

    async def _state(self) -> str | None:
        await asyncio.sleep(self.state_takes_s)
        return "deferred" if self.ti.state == "running" else self.ti.state

    async def _first(self, trigger: Any) -> Any:
        self._loop = asyncio.get_running_loop()
        self._waiting = asyncio.create_task(self._run_trigger(trigger))
        try:
            return await self._waiting
        finally:
            self._waiting = None
            if others := asyncio.all_tasks() - {asyncio.current_task()}:
                await asyncio.wait(others, timeout=30)  # the triggerer's event loop goes on
            await _no_connections(limit_s=10)

    async def _run_trigger(self, trigger: Any) -> Any:
        try:
            async for event in trigger.run():
                return event.payload
            raise AssertionError("the trigger ended without an event")
        finally:
            await trigger.cleanup()

    def _cancel_until_over(self) -> None:
        """As Airflow does; its pause is a second."""
        if self._loop is not None and self._waiting is not None:
            self._waiting.cancel()
            self._loop.call_later(0.3, self._cancel_until_over)


async def _no_connections(limit_s: float) -> None:
    """Wait until this loop's connections have said farewell; asyncio has no call for that."""
    selector = vars(asyncio.get_running_loop())["_selector"]
    give_up_at = time.monotonic() + limit_s
    while len(selector.get_map()) > 1 and time.monotonic() < give_up_at:  # one wakes the loop
        await asyncio.sleep(0.01)
