"""The task's state in Airflow while a try runs here, and what it means for the pod."""

from __future__ import annotations

import logging
import threading
from queue import Empty, SimpleQueue
from typing import Any, Final

LIVE_STATES: Final = frozenset({"awaiting_input", "deferred", "running", "up_for_reschedule"})
"""A try has begun and goes on. In all other states no try has the task's pod: it has ended, was
cleared (`restarting`, no state), or hasn't begun (`scheduled`, `queued`)."""


UNKNOWN: Final = "unknown"


def task_state(ti: Any, log: logging.Logger | Any, limit_s: float | None = None) -> str | None:
    """The task's state in Airflow's database, None if it has none or no longer exists.

    `UNKNOWN` if Airflow doesn't answer, or not within `limit_s`.
    """
    answers: SimpleQueue[Any] = SimpleQueue()

    def ask() -> None:
        try:
            answers.put(
                ti.get_task_states(
                    dag_id=ti.dag_id,
                    task_ids=[ti.task_id],
                    run_ids=[ti.run_id],
                    map_index=ti.map_index,
                )
            )
        # Any error: the pods have to be handled anyway.
        except Exception as error:  # noqa: BLE001
            answers.put(error)

    if limit_s is None:
        ask()
    else:  # a thread, as the call has no timeout of its own
        threading.Thread(target=ask, name="task state", daemon=True).start()
    try:
        states = answers.get(timeout=limit_s)
    except Empty:
        states = TimeoutError(f"no answer within {limit_s:g} s")
    if isinstance(states, Exception):
        log.warning("Can't tell the state of this task: %s", states)
        return UNKNOWN
    state = next(iter(states.get(ti.run_id, {}).values()), None)
    return None if state is None else str(state)


def will_be_retried(ti: Any) -> bool:
    return bool(ti.try_number <= ti.max_tries)


def is_anothers(state: str | None) -> bool:
    """Whether another try has the task in this state: this try would be `running`."""
    return state in LIVE_STATES and state != "running"
