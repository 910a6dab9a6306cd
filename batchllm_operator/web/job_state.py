"""The state of a job in a DAG run, by the states of its tasks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from airflow.models.taskinstance import TaskInstance
from sqlalchemy import select
from sqlalchemy.orm import Session

from batchllm_operator.amounts import counted
from batchllm_operator.web.runs import (
    ACTIVE,
    COMMIT,
    FAILED,
    GENERATE,
    PLANS,
    JobRun,
    group_of,
    state_name,
)


@dataclass(frozen=True, slots=True)
class JobState:
    text: str
    is_failed: bool = False
    logging_task: tuple[str, int] | None = None
    """Id and map index of the task whose log tells more; None if no single one does."""


def job_state(session: Session, job: JobRun) -> JobState:
    """The job's stage, and whether it has failed there.

    The job's tasks are those in the task group of its plan task. If several plan tasks share a
    group, or have none, or are mapped, the others can't be assigned, and only the plan task counts.
    """
    ref, task = job.ref, TaskInstance
    if job.state != "success":
        return _stage("planning", "planned", job.state, (ref.task_id, ref.map_index))
    rows = session.execute(
        select(task.task_id, task.map_index, task.operator, task.state)
        .where(task.dag_id == ref.dag_id, task.run_id == ref.run_id)
        .where(task.operator.in_((*PLANS, GENERATE, COMMIT)))
        .order_by(task.task_id, task.map_index)
    )
    tasks = [row for row in rows if group_of(row.task_id) == group_of(ref.task_id)]
    if sum(row.operator in PLANS for row in tasks) > 1:
        return JobState("planned")
    for row in tasks:
        state = state_name(row.state)
        if row.operator == COMMIT and state in ("success", "failed", *ACTIVE):
            return _stage("committing", "committed", state, (row.task_id, row.map_index))
    return _generating([row for row in tasks if row.operator == GENERATE])


def _generating(workers: Sequence[Any]) -> JobState:
    counts = Counter(state_name(worker.state) for worker in workers)
    all_tasks = counted(len(workers), "task")
    done = f"{counts['success']:,} of {all_tasks}"
    if num_failed := sum(counts[state] for state in FAILED):
        text = f"generating failed ({num_failed:,} of {all_tasks})"
        # A task that failed because of another one before it has no log.
        logs = (
            (worker.task_id, worker.map_index) for worker in workers if worker.state == "failed"
        )
        return JobState(text, is_failed=True, logging_task=next(logs, None))
    if any(counts[state] for state in ACTIVE):
        return JobState(f"generating ({done})")
    return JobState("planned" if not counts["success"] else f"generated ({done})")


def _stage(doing: str, done: str, state: str, task: tuple[str, int]) -> JobState:
    if state in FAILED:
        return JobState(f"{doing} failed", is_failed=True, logging_task=task)
    if state in ("none", "scheduled", "queued"):
        text = f"waiting for {doing}"
    elif state in ACTIVE:
        text = f"{doing}{' again' if state == 'up_for_retry' else ''}"
    else:
        text = done if state == "success" else f"{doing}: {state}"
    return JobState(text, logging_task=task)
