"""Jobs in DAG runs, from Airflow's database: their plan tasks, and what those have noted in XComs.

Tasks are recognised by the class of their operator, which Airflow stores with each task of a run.
Subclasses of our operators aren't recognised. The folders in which a job's plans may be read are
those of the DAG, or of `[batchllm] report_roots`; never of an XCom, which some users may edit.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from datetime import datetime
from fnmatch import fnmatchcase
from typing import Annotated, Any, Final

from airflow.configuration import conf
from airflow.models.dag import DagModel
from airflow.models.dagrun import DagRun
from airflow.models.renderedtifields import RenderedTaskInstanceFields
from airflow.models.serialized_dag import SerializedDagModel
from airflow.models.taskinstance import TaskInstance
from airflow.models.xcom import XComModel
from pydantic import Field, TypeAdapter, ValidationError
from sqlalchemy import ColumnElement, and_, select
from sqlalchemy.orm import Session, aliased

from batchllm_operator.errors import PlanError
from batchllm_operator.web.plan_uri import PlanURI

PLANS: Final = (
    "BatchLLMPlanOperator",
    "BatchLLMSparkKubernetesPlanOperator",
    "BatchLLMSparkSubmitPlanOperator",
)
GENERATE: Final = "BatchLLMGenerateOperator"
COMMIT: Final = "BatchLLMCommitOperator"
REPORT: Final = "BatchLLMReportOperator"

PLAN_URI_KEY: Final = "plan_uri"
"""As in `operators.planning`, which takes long to import."""
_SUMMARY_KEY: Final = "plan"
"""The plan's counts and predictions; as in `operators.planning`."""

ACTIVE: Final = ("scheduled", "queued", "running", "restarting", "deferred", "up_for_retry")
FAILED: Final = ("failed", "upstream_failed")
_ENDED: Final = ("success", "failed")

_REF: Final = re.compile(r"([^/]+)/([^/]+)/([^/]+)/(-1|[0-9]{1,9})", re.ASCII)
_MAX_NAME_CHARS: Final = 250
_MOST: Final = 1e24
"""Upper bound of an outcome's numbers: tasks can return anything."""

_SETTING: Final = "[batchllm] report_roots"
_ROOT_FIELD: Final = "report_root"
"""Field of operators that plan, which Airflow keeps with the parsed DAG."""
_TEAM: Final = "team:"
_ROOTS: Final = TypeAdapter(dict[str, list[Annotated[str, Field(min_length=1)]]])


@dataclass(frozen=True, slots=True)
class JobRef:
    """Identifies a job in a DAG run by its plan task."""

    dag_id: str
    run_id: str
    task_id: str
    map_index: int
    """-1 unless the task is mapped."""

    def __str__(self) -> str:
        """The text that `of` parses; Airflow's ids have no slashes."""
        return f"{self.dag_id}/{self.run_id}/{self.task_id}/{self.map_index}"

    @classmethod
    def of(cls, text: str) -> JobRef | None:
        match = _REF.fullmatch(text)
        return None if match is None else cls(match[1], match[2], match[3], int(match[4]))

    @property
    def first(self) -> JobRef:
        """That of the job's first round."""
        return replace(self, task_id=first_of(self.task_id))


@dataclass(frozen=True, slots=True)
class JobRun:
    """One run of a job: its plan task in a DAG run."""

    ref: JobRef
    state: str
    """State of the plan task; `none` until Airflow schedules it."""
    run_state: str
    run_after: datetime
    noted: Any
    """The plan task's XCom with the plan's URI; None if there is none."""
    plan_uri: PlanURI | None
    """None before there is a plan, and if `noted` isn't the URI of one."""
    partition: str | None
    """That of its plan, or, before there is a plan, the expected one if known."""
    planned: Mapping[str, Any]
    """The plan's counts and predictions."""
    outcome: Mapping[str, Any] = field(default_factory=dict)
    """The return values of commit and report; `number` reads numbers from it."""

    @property
    def title(self) -> str:
        if self.plan_uri is not None:
            return f"{self.plan_uri.job}, {self.plan_uri.ds}"
        mapped = f" [{self.ref.map_index}]" if self.ref.map_index >= 0 else ""
        return f"{self.ref.task_id}{mapped}"

    @property
    def has_ended(self) -> bool:
        return self.run_state in _ENDED

    @property
    def may_be_planned(self) -> bool:
        """Whether there is a plan, or may still be one."""
        return self.plan_uri is not None or not self.has_ended

    @property
    def is_failed(self) -> bool:
        return self.run_state in FAILED

    def number(self, name: str) -> float | None:
        """A number of the outcome or, before it, of the plan; None for anything else."""
        value = (self.outcome or self.planned).get(name)
        if isinstance(value, bool) or not isinstance(value, int | float):
            return None
        return value if abs(value) < _MOST else None  # excludes NaN, infinity and huge integers


def job_runs(
    session: Session, *which: ColumnElement[bool], limit: int | None = None
) -> list[JobRun]:
    """The jobs of the latest `limit` plan tasks that meet all conditions, the latest last.

    Rounds of a job are one, the last that has begun.
    """
    task, fields = TaskInstance, RenderedTaskInstanceFields
    uri, summary = aliased(XComModel), aliased(XComModel)
    rows = session.execute(
        select(
            task.dag_id,
            task.run_id,
            task.task_id,
            task.map_index,
            task.state,
            DagRun.state.label("run_state"),
            DagRun.run_after,
            DagRun.conf,
            DagRun.logical_date,
            DagRun.partition_key,
            uri.value.label("plan_uri"),
            summary.value.label("summary"),
            fields.rendered_fields,
        )
        .join(DagRun, and_(DagRun.dag_id == task.dag_id, DagRun.run_id == task.run_id))
        .join(uri, and_(same_task(uri), uri.key == PLAN_URI_KEY), isouter=True)
        .join(summary, and_(same_task(summary), summary.key == _SUMMARY_KEY), isouter=True)
        .join(fields, and_(same_task(fields), uri.key.is_(None)), isouter=True)
        .where(task.operator.in_(PLANS), *which)
        .order_by(
            DagRun.run_after.desc(), DagRun.id.desc(), task.task_id.desc(), task.map_index.desc()
        )
        .limit(limit)
    ).all()
    jobs: dict[JobRef, JobRun] = {}
    for run in map(_job_run, reversed(rows)):
        if run.ref.first not in jobs:
            jobs[run.ref] = run
        elif run.noted is not None or run.state in (*ACTIVE, "failed"):
            jobs[run.ref.first] = run
    return list(jobs.values())


def _job_run(row: Any) -> JobRun:
    noted = decoded_xcom(row.plan_uri)
    try:
        uri = PlanURI.parse(noted)
    except PlanError:
        uri = None
    return JobRun(
        ref=JobRef(row.dag_id, row.run_id, row.task_id, row.map_index),
        state=state_name(row.state),
        run_state=state_name(row.run_state),
        run_after=row.run_after,
        noted=noted,
        plan_uri=uri,
        partition=_expected_ds(row) if uri is None else uri.ds,
        planned=_mapping(decoded_xcom(row.summary)),
    )


def jobs_of_run(session: Session, dag_id: str, run_id: str) -> list[JobRun]:
    """The jobs in a DAG run, by task and map index."""
    return job_runs(session, TaskInstance.dag_id == dag_id, TaskInstance.run_id == run_id)


def job_of_task(
    session: Session, dag_id: str, run_id: str, task_id: str, map_index: int
) -> JobRun | None:
    """A generate task's job; None if unknown. A task that has begun has rendered fields."""
    task, fields = TaskInstance, RenderedTaskInstanceFields
    row = session.execute(
        select(task.task_id, fields.rendered_fields)
        .join(fields, same_task(fields), isouter=True)
        .where(
            task.dag_id == dag_id,
            task.run_id == run_id,
            task.task_id == task_id,
            task.map_index == map_index,
            task.operator == GENERATE,
        )
    ).first()
    jobs = [job for job in jobs_of_run(session, dag_id, run_id) if job.noted is not None]
    if row is None or not jobs:
        return None
    rendered_uri = _mapping(row.rendered_fields).get("plan_uri")
    for job in jobs:
        if rendered_uri == job.noted:
            return job
    if len(jobs) > 1:
        jobs = [job for job in jobs if group_of(job.ref.task_id) == group_of(task_id)]
    return jobs[0] if len(jobs) == 1 else None


def round_of(task_id: str) -> str:
    """What ends the ids of later rounds' tasks in `batchllm_task_group`, such as `_2`; or empty."""
    match = re.search(r"(?:\A|\.)(?:plan|generate)(_[2-9]|_[1-9][0-9])\Z", task_id)
    return match[1] if match else ""


def first_of(task_id: str) -> str:
    """The id of the first round's task."""
    return task_id.removesuffix(round_of(task_id))


def group_of(task_id: str) -> str:
    """The id of the task's group; empty outside of groups."""
    return task_id.rpartition(".")[0]


def decoded_xcom(value: Any) -> Any:
    """An XCom's value as plain JSON: classes that it names are not instantiated.

    With a custom XCom backend, values are references, which are useless here.
    """
    if isinstance(value, str):
        try:
            return json.loads(value)
        except (ValueError, RecursionError):
            return value
    return value


def state_name(state: Any) -> str:
    """The state of a run or task; `none` until Airflow schedules the task."""
    return "none" if state is None else str(getattr(state, "value", state))


def same_task(table: Any) -> ColumnElement[bool]:
    """The join condition that a row of `table` belongs to the task instance."""
    columns = ("dag_id", "run_id", "task_id", "map_index")
    return and_(*(getattr(table, name) == getattr(TaskInstance, name) for name in columns))


def _expected_ds(row: Any) -> str | None:
    """The partition that a task will plan: by its rendered fields, or else by its run.

    All of them can hold anything.
    """
    date = None if row.logical_date is None else row.logical_date.strftime("%Y-%m-%d")
    rendered, given = (_mapping(value).get("ds") for value in (row.rendered_fields, row.conf))
    for name in (rendered, given, row.partition_key, date):
        if isinstance(name, str) and 0 < len(name) <= _MAX_NAME_CHARS and name.isprintable():
            return name
    return None


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def report_roots(session: Session, ref: JobRef) -> tuple[str, ...]:
    """Folders and URIs below which the job's plan may be read.

    Those of the setting if it has an entry for the DAG or its team, else the job's own folder of
    plans, from the serialized DAG. Raises `PlanError`: the setting is invalid, or there are no
    roots.
    """
    roots = _configured(ref.dag_id)
    if roots is None:
        root = _of_dag(session, ref)
        roots = () if root is None else (root,)
    if not roots:
        raise PlanError(
            "where this job's plans lie isn't known, for its spec couldn't be read where the DAG is"
            f" parsed; name the folder or URI in {_SETTING} of Airflow's API server, such as"
            ' {"DAG_ID": ["s3://BUCKET/TABLE"]}'
        )
    return roots


def _configured(dag_id: str) -> tuple[str, ...] | None:
    """The roots of all entries for the DAG; None if there is no such entry."""
    try:
        setting = _ROOTS.validate_json(conf.get("batchllm", "report_roots", fallback="") or "{}")
    except ValidationError:
        raise PlanError(
            f"{_SETTING} of Airflow's API server isn't a JSON object of lists, such as"
            ' {"DAG_ID": ["s3://BUCKET/TABLE"], "team:NAME": ["/lake/team"]}'
        ) from None
    teams = {key for key in setting if key.startswith(_TEAM)}
    team = DagModel.get_team_name(dag_id) if teams else None
    entries = [
        roots
        for key, roots in setting.items()
        if (key == f"{_TEAM}{team}" if key in teams else fnmatchcase(dag_id, key))
    ]
    return tuple(root for roots in entries for root in roots) if entries else None


def _of_dag(session: Session, ref: JobRef) -> str | None:
    """The root of the plan task's operator: in the run's version of the DAG, then the latest."""
    task = TaskInstance
    of_run = session.scalar(
        select(SerializedDagModel)
        .join(task, SerializedDagModel.dag_version_id == task.dag_version_id)
        .where(
            SerializedDagModel.dag_id == ref.dag_id,
            task.dag_id == ref.dag_id,
            task.run_id == ref.run_id,
            task.task_id == ref.task_id,
            task.map_index == ref.map_index,
        )
    )
    for stored in (of_run, SerializedDagModel.get(ref.dag_id, session=session)):
        data: Any = {} if stored is None else stored.data or {}
        for serialized in data.get("dag", {}).get("tasks", ()):
            fields = serialized.get("__var", {})
            root = fields.get(_ROOT_FIELD)
            if fields.get("task_id") == ref.task_id and isinstance(root, str) and root:
                return root
    return None
