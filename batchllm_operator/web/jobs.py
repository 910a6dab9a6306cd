"""All jobs with their latest runs, from Airflow's database alone.

A job is listed once its plan task has stored a plan's URI, is running or has failed. Its runs are
sorted by partition: a day that runs again stays between its neighbours.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from typing import Any, Final

from airflow.models.dagrun import DagRun
from airflow.models.renderedtifields import RenderedTaskInstanceFields
from airflow.models.taskinstance import TaskInstance
from airflow.models.xcom import XComModel
from sqlalchemy import and_, null, select
from sqlalchemy.orm import Session

from batchllm_operator.web.job_state import JobState, job_state
from batchllm_operator.web.runs import (
    ACTIVE,
    COMMIT,
    ENDED,
    FAILED,
    PLAN_URI_KEY,
    PLANS,
    REPORT,
    RETURN_KEY,
    SUMMARY_KEY,
    JobInRun,
    JobRef,
    decoded_xcom,
    readable_uri,
    same_task,
    state_name,
)

NUM_RUNS: Final = 30
"""Runs shown of a job: those of the newest partitions."""
_NUM_CANDIDATES: Final = 300
"""Latest runs of a job from which these are chosen."""
_MAX_NAME_CHARS: Final = 250
_MOST: Final = 1e24
"""Upper bound of an outcome's numbers: tasks can return anything."""


@dataclass(frozen=True, slots=True)
class JobRun:
    """One run of a job."""

    job: JobInRun
    run_after: datetime
    run_state: str
    partition: str | None
    """That of its plan, or, before there is a plan, the expected one if known."""
    outcome: Mapping[str, Any] = field(default_factory=dict)
    """The return values of commit and report; `number` reads numbers from it."""
    planned: Mapping[str, Any] = field(default_factory=dict)
    """The plan's counts and predictions, where there is no outcome yet."""

    @property
    def is_planned(self) -> bool:
        return readable_uri(self.job.noted) is not None

    @property
    def may_be_planned(self) -> bool:
        """Whether there is a plan, or may still be one."""
        return self.is_planned or self.run_state not in ENDED

    @property
    def is_failed(self) -> bool:
        return self.run_state in FAILED

    def number(self, name: str) -> float | None:
        """A number of the outcome, or else of the plan; None for anything else."""
        value = self.outcome.get(name, self.planned.get(name))
        if isinstance(value, bool) or not isinstance(value, int | float):
            return None
        return value if abs(value) < _MOST else None  # excludes NaN, infinity and huge integers


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
        found: dict[str, JobRun] = {}
        for run in self.runs:
            if run.partition is not None and (run.outcome or run.partition not in found):
                found[run.partition] = run
        return found

    @property
    def latest_done(self) -> JobRun:
        """The latest run with an outcome, of the newest partition with one; else `latest`."""
        return next((run for run in reversed(self.runs) if run.outcome), self.latest)

    def before(self, run: JobRun) -> JobRun | None:
        """The run of the newest earlier partition with an outcome."""
        earlier = [
            each
            for partition, each in self.by_partition.items()
            if each.outcome and partition < (run.partition or "")
        ]
        return max(earlier, key=lambda each: each.partition or "", default=None)

    @property
    def name(self) -> str:
        """The name in the latest plan; before there is one, the task's id."""
        found = (readable_uri(run.job.noted) for run in reversed(self.runs))
        return next((uri.job for uri in found if uri is not None), self.task_id)


def list_jobs(session: Session, may_read: Callable[[str], bool]) -> list[Job]:
    """The jobs of the DAGs that `may_read` accepts, by name."""
    tasks = sorted(_planning_tasks(session))
    readable = {dag_id for dag_id in {dag_id for dag_id, _ in tasks} if may_read(dag_id)}
    found = [_job(session, dag_id, task_id) for dag_id, task_id in tasks if dag_id in readable]
    jobs = [job for job in found if job is not None]
    return sorted(jobs, key=lambda job: (job.name.casefold(), job.dag_id, job.task_id))


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
        .where(TaskInstance.operator.in_(PLANS))
        .order_by(DagRun.run_after.desc(), DagRun.id.desc(), TaskInstance.map_index.desc())
        .limit(_NUM_CANDIDATES)
    ).all()
    if not rows:  # removed meanwhile
        return None
    noted = _noted(session, dag_id, task_id, {row[0] for row in rows}, PLAN_URI_KEY)
    found = []
    for run_id, run_state, run_after, map_index, state in reversed(rows):
        ref = JobRef(dag_id, run_id, task_id, map_index)
        uri = readable_uri(noted.get((run_id, map_index)))
        job = JobInRun(ref, state_name(state), noted.get((run_id, map_index)))
        ds = None if uri is None else uri.ds
        found.append(JobRun(job, run_after, state_name(run_state), ds))
    unplanned = [run.job.ref for run in found if run.partition is None]
    expected = _expected(session, unplanned) if unplanned else {}
    found = [replace(run, partition=expected.get(run.job.ref, run.partition)) for run in found]
    found.sort(key=lambda run: (run.partition is not None, run.partition or ""))
    runs = found[-NUM_RUNS:]
    run_ids = {run.job.ref.run_id for run in runs}
    outcomes = _outcomes(session, dag_id, run_ids)
    planned = _noted(session, dag_id, task_id, run_ids, SUMMARY_KEY)
    done = tuple(_with_figures(run, outcomes, planned) for run in runs)
    latest = _latest(done)
    return Job(dag_id, task_id, done, latest, job_state(session, latest.job))


def _with_figures(
    run: JobRun,
    outcomes: Mapping[str, Mapping[str, Mapping[str, Any]]],
    planned: Mapping[tuple[str, int], Any],
) -> JobRun:
    """The run with its outcome, or until then with what its plan says."""
    ref, uri = run.job.ref, run.job.noted
    if not isinstance(uri, str):
        return run
    if outcome := outcomes[ref.run_id].get(uri):
        return replace(run, outcome=outcome)
    found = planned.get((ref.run_id, ref.map_index))
    return replace(run, planned=found) if isinstance(found, Mapping) else run


def _latest(runs: Sequence[JobRun]) -> JobRun:
    """`Job.latest` for `runs` as in `Job.runs`."""
    since = max((run.run_after for run in runs if run.may_be_planned), default=None)
    counted = (
        run
        for run in reversed(runs)
        if since is None or run.may_be_planned or run.run_after >= since
    )
    return next(counted)


def _expected(session: Session, refs: Collection[JobRef]) -> dict[JobRef, str]:
    """Partitions that jobs will plan: from the task's rendered fields, else from the run."""
    of_run: dict[str, str] = {}
    (dag_id,) = {ref.dag_id for ref in refs}
    run_ids = {ref.run_id for ref in refs}
    key = getattr(DagRun, "partition_key", null())  # from Airflow 3.2 on
    rows = session.execute(
        select(DagRun.run_id, DagRun.conf, key, DagRun.logical_date).where(
            DagRun.dag_id == dag_id, DagRun.run_id.in_(run_ids)
        )
    )
    for run_id, conf, partition_key, logical_date in rows:
        given = conf.get("ds") if isinstance(conf, Mapping) else None
        date = None if logical_date is None else logical_date.strftime("%Y-%m-%d")
        ds = next((each for each in (given, partition_key, date) if _is_name(each)), None)
        if ds is not None:
            of_run[run_id] = ds
    fields = RenderedTaskInstanceFields
    rendered = session.execute(
        select(fields.run_id, fields.task_id, fields.map_index, fields.rendered_fields).where(
            fields.dag_id == dag_id, fields.run_id.in_(run_ids)
        )
    )
    of_task = {
        JobRef(dag_id, run_id, task_id, map_index): values["ds"]
        for run_id, task_id, map_index, values in rendered
        if isinstance(values, Mapping) and _is_name(values.get("ds"))
    }
    found = {ref: of_task.get(ref, of_run.get(ref.run_id)) for ref in refs}
    return {ref: ds for ref, ds in found.items() if ds is not None}


def _is_name(value: Any) -> bool:
    """Whether it can be a partition's name: a run's `conf` can hold anything."""
    return isinstance(value, str) and 0 < len(value) <= _MAX_NAME_CHARS and value.isprintable()


def _noted(
    session: Session, dag_id: str, task_id: str, run_ids: set[str], key: str
) -> dict[tuple[str, int], Any]:
    """The plan task's XComs of a key, by run and map index."""
    rows = session.execute(
        select(XComModel.run_id, XComModel.map_index, XComModel.value).where(
            XComModel.dag_id == dag_id,
            XComModel.task_id == task_id,
            XComModel.run_id.in_(run_ids),
            XComModel.key == key,
        )
    )
    return {(run_id, map_index): decoded_xcom(value) for run_id, map_index, value in rows}


def _outcomes(
    session: Session, dag_id: str, run_ids: set[str]
) -> defaultdict[str, dict[str, dict[str, Any]]]:
    """Return values of commit and report tasks, by run and the plan's URI in them."""
    rows = session.execute(
        select(XComModel.run_id, XComModel.value)
        .join(TaskInstance, same_task(XComModel))
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
