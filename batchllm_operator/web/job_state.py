"""The state of a job in a DAG run, by the states of its tasks."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from sqlalchemy.orm import Session

from batchllm_operator.amounts import counted
from batchllm_operator.web.runs import (
    ACTIVE,
    COMMIT,
    FAILED,
    GENERATE,
    PLANS,
    JobInRun,
    task_states,
)


@dataclass(frozen=True, slots=True)
class JobState:
    text: str
    is_failed: bool = False


def job_state(session: Session, job: JobInRun) -> JobState:
    """The job's stage, and whether it has failed there.

    The job's tasks are those in the task group of its plan task. If several plan tasks share a
    group, or have none, or are mapped, the others can't be assigned, and only the plan task counts.
    """
    ref = job.ref
    if job.state != "success":
        return _stage("planning", "planned", job.state)
    states = [
        (operator, state)
        for task_id, operator, state in task_states(
            session, ref.dag_id, ref.run_id, (*PLANS, GENERATE, COMMIT)
        )
        if task_id.rpartition(".")[0] == ref.group
    ]
    if sum(operator in PLANS for operator, _ in states) > 1:
        return JobState("planned")
    tasks = [state for operator, state in states if operator == GENERATE]
    commits = [state for operator, state in states if operator == COMMIT]
    if commits and (commits[0] == "success" or commits[0] in ACTIVE or commits[0] == "failed"):
        return _stage("committing", "committed", commits[0])
    return _generating(tasks)


def _generating(tasks: list[str]) -> JobState:
    """Tasks are shards or workers, which isn't known without reading their fields."""
    counts = Counter(tasks)
    all_tasks = counted(len(tasks), "task")
    done = f"{counts['success']:,} of {all_tasks}"
    if num_failed := sum(counts[state] for state in FAILED):
        return JobState(f"generating failed ({num_failed:,} of {all_tasks})", is_failed=True)
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
