"""The state of a job in a DAG run, by the states of its tasks."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace

from sqlalchemy.orm import Session

from batchllm_operator.amounts import counted
from batchllm_operator.web.runs import (
    ACTIVE,
    COMMIT,
    FAILED,
    GENERATE,
    PLANS,
    JobInRun,
    TaskState,
    task_states,
)


@dataclass(frozen=True, slots=True)
class JobState:
    text: str
    is_failed: bool = False
    logging_task: tuple[str, int] | None = None
    """Id and map index of the task whose log tells more; None if no single one does."""


def job_state(session: Session, job: JobInRun) -> JobState:
    """The job's stage, and whether it has failed there.

    The job's tasks are those in the task group of its plan task. If several plan tasks share a
    group, or have none, or are mapped, the others can't be assigned, and only the plan task counts.
    """
    ref = job.ref
    if job.state != "success":
        stage = _stage("planning", "planned", job.state)
        return replace(stage, logging_task=(ref.task_id, ref.map_index))
    tasks = [
        task
        for task in task_states(session, ref.dag_id, ref.run_id, (*PLANS, GENERATE, COMMIT))
        if task.task_id.rpartition(".")[0] == ref.group
    ]
    if sum(task.operator in PLANS for task in tasks) > 1:
        return JobState("planned")
    commit = next((task for task in tasks if task.operator == COMMIT), None)
    if commit and (commit.state in ("success", "failed") or commit.state in ACTIVE):
        stage = _stage("committing", "committed", commit.state)
        return replace(stage, logging_task=(commit.task_id, commit.map_index))
    return _generating([task for task in tasks if task.operator == GENERATE])


def _generating(tasks: list[TaskState]) -> JobState:
    """Tasks are workers."""
    counts = Counter(task.state for task in tasks)
    all_tasks = counted(len(tasks), "task")
    done = f"{counts['success']:,} of {all_tasks}"
    if num_failed := sum(counts[state] for state in FAILED):
        text = f"generating failed ({num_failed:,} of {all_tasks})"
        # A task that failed because of another one before it has no log.
        failed = next((task for task in tasks if task.state == "failed"), None)
        log = None if failed is None else (failed.task_id, failed.map_index)
        return JobState(text, is_failed=True, logging_task=log)
    if any(counts[state] for state in ACTIVE):
        return JobState(f"generating ({done})")
    return JobState("planned" if not counts["success"] else f"generated ({done})")


def _stage(doing: str, done: str, state: str) -> JobState:
    if state == "success":
        return JobState(done)
    if state in FAILED:
        return JobState(f"{doing} failed", is_failed=True)
    if state in ("none", "scheduled", "queued"):
        return JobState(f"waiting for {doing}")
    if state in ACTIVE:
        return JobState(f"{doing}{' again' if state == 'up_for_retry' else ''}")
    return JobState(f"{doing}: {state}")
