"""All jobs that have run here, with their latest runs, from Airflow's database alone.

A job is registered by having run: its plan task has noted a plan's URI, or is at work on its first,
or has failed to.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, Final

from airflow.models.dagrun import DagRun
from airflow.models.taskinstance import TaskInstance
from airflow.models.xcom import XComModel
from sqlalchemy import and_, select
from sqlalchemy.orm import Session

from batchllm_operator.report.web.job_state import JobState, job_state
from batchllm_operator.report.web.runs import (
    ACTIVE,
    COMMIT,
    FAILED,
    PLAN,
    PLAN_URI_KEY,
    REPORT,
    RETURN_KEY,
    JobInRun,
    JobRef,
    decoded_xcom,
    readable_uri,
    same_task,
    state_name,
)

NUM_RUNS: Final = 30
"""Runs of a job that its trend shows."""
_MOST: Final = 1e24
"""That a number of an outcome may be: tasks can return anything."""


@dataclass(frozen=True, slots=True)
class JobRun:
    """One run of a job."""

    job: JobInRun
    run_after: datetime
    run_state: str
    outcome: Mapping[str, Any] = field(default_factory=dict)
    """What commit and report have returned; numbers are read by `number`."""

    @property
    def ds(self) -> str | None:
        """The partition, once it is planned."""
        plan_uri = readable_uri(self.job.noted)
        return None if plan_uri is None else plan_uri.ds

    def number(self, name: str) -> float | None:
        """A number of the outcome that is one; None for anything else."""
        value = self.outcome.get(name)
        if isinstance(value, bool) or not isinstance(value, int | float):
            return None
        return value if abs(value) < _MOST else None  # neither NaN nor what no float can hold


@dataclass(frozen=True, slots=True)
class Job:
    """A task that plans a job, and the runs of its DAG."""

    dag_id: str
    task_id: str
    runs: tuple[JobRun, ...]
    """The earliest first; at least one."""
    state: JobState
    """Of the latest run."""

    @property
    def latest(self) -> JobRun:
        """The run that is or was due last."""
        return self.runs[-1]

    @property
    def latest_done(self) -> JobRun:
        """The latest run with an outcome, or else the latest."""
        return next((run for run in reversed(self.runs) if run.outcome), self.latest)

    @property
    def name(self) -> str:
        """As in the latest plan; the task's id before there is one."""
        found = (readable_uri(run.job.noted) for run in reversed(self.runs))
        return next((uri.job for uri in found if uri is not None), self.task_id)


def list_jobs(session: Session, may_read: Callable[[str], bool]) -> list[Job]:
    """The jobs of the DAGs that `may_read` lets through, by name."""
    tasks = sorted(_planning_tasks(session))
    readable = {dag_id for dag_id in {dag_id for dag_id, _ in tasks} if may_read(dag_id)}
    found = [_job(session, dag_id, task_id) for dag_id, task_id in tasks if dag_id in readable]
    jobs = [job for job in found if job is not None]
    return sorted(jobs, key=lambda job: (job.name.casefold(), job.dag_id, job.task_id))


def _planning_tasks(session: Session) -> set[tuple[str, str]]:
    """DAG and id of each task that has planned, is at it, or failed; by Airflow's own indexes."""
    noted = (
        select(XComModel.dag_id, XComModel.task_id)
        .join(
            TaskInstance,
            same_task(XComModel),
        )
        .where(XComModel.key == PLAN_URI_KEY, TaskInstance.operator == PLAN)
    )
    unplanned = select(TaskInstance.dag_id, TaskInstance.task_id).where(
        TaskInstance.state.in_((*ACTIVE, *FAILED)), TaskInstance.operator == PLAN
    )
    queries = (noted.distinct(), unplanned.distinct())
    return {(dag_id, task_id) for query in queries for dag_id, task_id in session.execute(query)}


def _job(session: Session, dag_id: str, task_id: str) -> Job | None:
    rows = session.execute(
        select(
            DagRun.run_id,
            DagRun.state,
            DagRun.run_after,
            TaskInstance.map_index,
            TaskInstance.state,
        )
        .join(
            TaskInstance,
            and_(DagRun.dag_id == TaskInstance.dag_id, DagRun.run_id == TaskInstance.run_id),
        )
        .where(TaskInstance.dag_id == dag_id, TaskInstance.task_id == task_id)
        .where(TaskInstance.operator == PLAN)
        .order_by(DagRun.run_after.desc(), DagRun.id.desc(), TaskInstance.map_index.desc())
        .limit(NUM_RUNS)
    ).all()
    if not rows:  # removed since
        return None
    run_ids = {row[0] for row in rows}
    noted = _noted(session, dag_id, task_id, run_ids)
    outcomes = _outcomes(session, dag_id, run_ids)
    runs = []
    for run_id, run_state, run_after, map_index, state in reversed(rows):
        ref = JobRef(dag_id, run_id, task_id, map_index)
        job = JobInRun(ref, state_name(state), noted.get((run_id, map_index)))
        outcome = outcomes[run_id].get(job.noted, {}) if isinstance(job.noted, str) else {}
        runs.append(JobRun(job, run_after, state_name(run_state), outcome))
    return Job(dag_id, task_id, tuple(runs), job_state(session, runs[-1].job))


def _noted(
    session: Session, dag_id: str, task_id: str, run_ids: set[str]
) -> dict[tuple[str, int], Any]:
    """What the plan task has noted as URIs, by run and map index."""
    rows = session.execute(
        select(XComModel.run_id, XComModel.map_index, XComModel.value).where(
            XComModel.dag_id == dag_id,
            XComModel.task_id == task_id,
            XComModel.run_id.in_(run_ids),
            XComModel.key == PLAN_URI_KEY,
        )
    )
    return {(run_id, map_index): decoded_xcom(value) for run_id, map_index, value in rows}


def _outcomes(
    session: Session, dag_id: str, run_ids: set[str]
) -> defaultdict[str, dict[str, dict[str, Any]]]:
    """What commit and report tasks have returned, by run and the plan's URI that they name."""
    rows = session.execute(
        select(XComModel.run_id, XComModel.value)
        .join(
            TaskInstance,
            same_task(XComModel),
        )
        .where(
            XComModel.dag_id == dag_id,
            XComModel.run_id.in_(run_ids),
            XComModel.key == RETURN_KEY,
            TaskInstance.operator.in_((COMMIT, REPORT)),
        )
    )
    found: defaultdict[str, dict[str, dict[str, Any]]] = defaultdict(dict)
    for run_id, raw in rows:
        value = decoded_xcom(raw)
        if isinstance(value, Mapping) and isinstance(plan_uri := value.get("plan_uri"), str):
            found[run_id].setdefault(plan_uri, {}).update(value)
    return found
