"""All jobs with their latest runs and states, from Airflow's database alone.

A job is listed once its plan task has stored a plan's URI, is running or has failed. Its runs are
sorted by partition: a day that runs again stays between its neighbours.
"""

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from airflow.models.taskinstance import TaskInstance
from airflow.models.xcom import XComModel
from sqlalchemy import select
from sqlalchemy.orm import Session

from batchllm_operator.web.runs import (
    ACTIVE,
    COMMIT,
    FAILED,
    GENERATE,
    PLAN_URI_KEY,
    PLANS,
    REPORT,
    JobRun,
    decoded_xcom,
    first_of,
    group_of,
    job_runs,
    round_of,
    same_task,
    state_name,
)

_NUM_RUNS: Final = 30
"""Runs shown of a job: those of the newest partitions."""
_NUM_CANDIDATES: Final = 300
"""Latest runs of a job from which these are chosen."""
_TOLD_FIRST: Final = (*FAILED, *reversed(ACTIVE), "none", "success")
"""Of a mapped task, the first of these states that one of its instances has is shown."""


@dataclass(frozen=True, slots=True)
class JobState:
    text: str
    is_failed: bool = False
    logging_task: tuple[str, int] | None = None
    """Id and map index of the task whose log tells more; None if no single one does."""


@dataclass(frozen=True, slots=True)
class Job:
    """A task that plans a job, and the runs of its DAG."""

    dag_id: str
    task_id: str
    runs: tuple[JobRun, ...]
    """At least one, by partition, then by time; runs with an unknown partition come first."""
    latest: JobRun
    """The latest run of the newest partition. A run that has ended without a plan counts until a
    later run: its partition, such as a mistyped one, may never come."""
    state: JobState

    @property
    def by_partition(self) -> dict[str, JobRun]:
        """One run per partition, earliest first: the latest with an outcome, else the latest."""
        runs: dict[str, JobRun] = {}
        for run in self.runs:
            if run.partition is not None and (run.outcome or run.partition not in runs):
                runs[run.partition] = run
        return runs

    @property
    def latest_done(self) -> JobRun:
        """The latest run with an outcome, of the newest partition with one; else `latest`."""
        return next((run for run in reversed(self.runs) if run.outcome), self.latest)

    def before(self, run: JobRun) -> JobRun | None:
        """The run of the newest earlier partition with an outcome."""
        earlier = [
            other
            for partition, other in self.by_partition.items()
            if other.outcome and partition < (run.partition or "")
        ]
        return earlier[-1] if earlier else None

    @property
    def name(self) -> str:
        """The name in the latest plan; before there is one, the task's id."""
        uris = (run.plan_uri for run in reversed(self.runs))
        return next((uri.job for uri in uris if uri is not None), self.task_id)


def list_jobs(session: Session, may_read: Callable[[str], bool]) -> list[Job]:
    """The jobs of the DAGs that `may_read` accepts, by name."""
    tasks = _planning_tasks(session)
    later = {task for task in tasks if round_of(task[1])}
    tasks -= {(dag_id, id) for dag_id, id in later if (dag_id, first_of(id)) in tasks}
    readable = {dag_id for dag_id in {dag_id for dag_id, _ in tasks} if may_read(dag_id)}
    jobs = [_job(session, dag_id, task_id) for dag_id, task_id in tasks if dag_id in readable]
    listed = [job for job in jobs if job is not None]
    return sorted(listed, key=lambda job: (job.name.casefold(), job.dag_id, job.task_id))


def _planning_tasks(session: Session) -> set[tuple[str, str]]:
    """DAG and id of each task that has planned, is planning, or failed; uses Airflow's indexes."""
    noted = (
        select(XComModel.dag_id, XComModel.task_id)
        .join(TaskInstance, same_task(XComModel))
        .where(XComModel.key == PLAN_URI_KEY, TaskInstance.operator.in_(PLANS))
    )
    unplanned = select(TaskInstance.dag_id, TaskInstance.task_id).where(
        TaskInstance.state.in_((*ACTIVE, *FAILED)), TaskInstance.operator.in_(PLANS)
    )
    queries = (noted.distinct(), unplanned.distinct())
    return {(dag_id, task_id) for query in queries for dag_id, task_id in session.execute(query)}


def _job(session: Session, dag_id: str, task_id: str) -> Job | None:
    """The job of a task; None if its runs were removed meanwhile."""
    own = TaskInstance.task_id
    of_task = own.startswith(f"{task_id}_", autoescape=True) | (own == task_id)
    found = job_runs(session, TaskInstance.dag_id == dag_id, of_task, limit=_NUM_CANDIDATES)
    candidates = [run for run in found if task_id in (run.ref.task_id, first_of(run.ref.task_id))]
    runs = sorted(candidates, key=lambda run: run.partition or "")[-_NUM_RUNS:]
    if not runs:
        return None
    outcomes = _outcomes(session, dag_id, {run.ref.run_id for run in runs})
    runs = [replace(run, outcome=outcomes[run.ref.run_id, str(run.noted)]) for run in runs]
    latest = _latest(runs)
    return Job(dag_id, task_id, tuple(runs), latest, job_state(session, latest))


def _latest(runs: Sequence[JobRun]) -> JobRun:
    """`Job.latest` for `runs` as in `Job.runs`."""
    since = max((run.run_after for run in runs if run.may_be_planned), default=None)
    return next(
        run
        for run in reversed(runs)
        if since is None or run.may_be_planned or run.run_after >= since
    )


def _outcomes(
    session: Session, dag_id: str, run_ids: set[str]
) -> defaultdict[tuple[str, str], dict[str, Any]]:
    """Return values of commit and report tasks, by run and the plan's URI in them."""
    rows = session.execute(
        select(XComModel.run_id, XComModel.value)
        .join(TaskInstance, same_task(XComModel))
        .where(
            XComModel.dag_id == dag_id,
            XComModel.run_id.in_(run_ids),
            XComModel.key == "return_value",
            TaskInstance.operator.in_((COMMIT, REPORT)),
        )
    )
    outcomes: defaultdict[tuple[str, str], dict[str, Any]] = defaultdict(dict)
    for run_id, raw in rows:
        value = decoded_xcom(raw)
        if isinstance(value, Mapping) and isinstance(plan_uri := value.get("plan_uri"), str):
            outcomes[run_id, plan_uri].update(value)
    return outcomes


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
    plans = [row for row in tasks if row.operator in PLANS]
    if len({(first_of(row.task_id), row.map_index) for row in plans}) > 1:
        return JobState("planned")
    if len(plans) > 1:
        own = round_of(ref.task_id)
        tasks = [row for row in tasks if row.operator != GENERATE or round_of(row.task_id) == own]
    for operator, doing, done in (
        (COMMIT, "committing", "committed"),
        (GENERATE, "generating", "generated"),
    ):
        if by_state := {state_name(row.state): row for row in tasks if row.operator == operator}:
            state = next(state for state in (*_TOLD_FIRST, *by_state) if state in by_state)
            row = by_state[state]
            if state in ("success", "failed", *ACTIVE) or operator == GENERATE:
                return _stage(doing, done, state, (row.task_id, row.map_index))
    return JobState("planned")


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
