"""Jobs in one DAG run, from Airflow's database: their plan tasks, and the plans' URIs from XComs.

Tasks are recognised by the class of their operator, which Airflow stores with each task of a run.
Subclasses of our operators aren't recognised.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from airflow.models.dagrun import DagRun
from airflow.models.renderedtifields import RenderedTaskInstanceFields
from airflow.models.taskinstance import TaskInstance
from airflow.models.xcom import XComModel
from sqlalchemy import ColumnElement, and_, select
from sqlalchemy.orm import Session

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
"""As in `operators.plan`, which takes long to import."""
SUMMARY_KEY: Final = "plan"
"""The plan's counts and predictions; as in `operators.planning`."""
RETURN_KEY: Final = "return_value"

_MAP_INDEX: Final = re.compile(r"-1|[0-9]{1,9}", re.ASCII)

ACTIVE: Final = ("scheduled", "queued", "running", "restarting", "deferred", "up_for_retry")
FAILED: Final = ("failed", "upstream_failed")
ENDED: Final = ("success", "failed")
"""Final states of a DAG run."""


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
        dag_id, run_id, task_id, index, *more = [*text.split("/"), "", "", "", ""][:5]
        if any(more) or not _MAP_INDEX.fullmatch(index):
            return None
        return cls(dag_id, run_id, task_id, int(index))

    @property
    def group(self) -> str:
        """The id of the task group with the job's tasks; empty outside of groups."""
        return self.task_id.rpartition(".")[0]


@dataclass(frozen=True, slots=True)
class JobInRun:
    """A job in a DAG run, by its plan task."""

    ref: JobRef
    state: str
    """State of the plan task; `none` until Airflow schedules it."""
    noted: Any = None
    """The plan task's XCom with the plan's URI; None if there is none."""

    def plan_uri(self) -> PlanURI | None:
        """The checked URI; None before there is one. Raises `PlanError` if it isn't a plan's."""
        return None if self.noted is None else PlanURI.parse(self.noted)

    @property
    def title(self) -> str:
        """The job's name and partition if known, else the task's id."""
        plan_uri = readable_uri(self.noted)
        name = self.ref.task_id if plan_uri is None else f"{plan_uri.job}, {plan_uri.ds}"
        return name if self.ref.map_index < 0 or plan_uri else f"{name} [{self.ref.map_index}]"


def readable_uri(noted: Any) -> PlanURI | None:
    try:
        return PlanURI.parse(noted)
    except PlanError:
        return None


def run_state(session: Session, dag_id: str, run_id: str) -> str | None:
    state = session.scalar(
        select(DagRun.state).where(DagRun.dag_id == dag_id, DagRun.run_id == run_id)
    )
    return None if state is None else str(getattr(state, "value", state))


def jobs_of_run(session: Session, dag_id: str, run_id: str) -> list[JobInRun]:
    rows = session.execute(
        select(TaskInstance.task_id, TaskInstance.map_index, TaskInstance.state, XComModel.value)
        .join(XComModel, and_(same_task(XComModel), XComModel.key == PLAN_URI_KEY), isouter=True)
        .where(
            TaskInstance.dag_id == dag_id,
            TaskInstance.run_id == run_id,
            TaskInstance.operator.in_(PLANS),
        )
        .order_by(TaskInstance.task_id, TaskInstance.map_index)
    )
    return [
        JobInRun(JobRef(dag_id, run_id, task_id, map_index), state_name(state), decoded_xcom(value))
        for task_id, map_index, state, value in rows
    ]


@dataclass(frozen=True, slots=True)
class TaskState:
    """A task of a run; of a mapped one, one of its instances."""

    task_id: str
    map_index: int
    operator: str
    state: str


def task_states(
    session: Session, dag_id: str, run_id: str, operators: Collection[str]
) -> list[TaskState]:
    """The tasks of a run whose operator is among `operators`."""
    task = TaskInstance
    rows = session.execute(
        select(task.task_id, task.map_index, task.operator, task.state)
        .where(task.dag_id == dag_id, task.run_id == run_id, task.operator.in_(operators))
        .order_by(task.task_id, task.map_index)
    )
    return [
        TaskState(task_id, map_index, str(operator), state_name(state))
        for task_id, map_index, operator, state in rows
    ]


def job_of_task(
    session: Session, dag_id: str, run_id: str, task_id: str, map_index: int
) -> JobInRun | None:
    """A generate task's job; None if unknown. A task that has begun has rendered fields."""
    row = session.execute(
        select(RenderedTaskInstanceFields.rendered_fields, TaskInstance.task_id)
        .select_from(TaskInstance)
        .join(RenderedTaskInstanceFields, same_task(RenderedTaskInstanceFields), isouter=True)
        .where(
            TaskInstance.dag_id == dag_id,
            TaskInstance.run_id == run_id,
            TaskInstance.task_id == task_id,
            TaskInstance.map_index == map_index,
            TaskInstance.operator == GENERATE,
        )
    ).first()
    jobs = [job for job in jobs_of_run(session, dag_id, run_id) if job.noted is not None]
    if row is None or not jobs:
        return None
    rendered = row[0] if isinstance(row[0], Mapping) else {}
    for job in jobs:
        if rendered.get("plan_uri") == job.noted:
            return job
    group = task_id.rpartition(".")[0]
    candidates = jobs if len(jobs) == 1 else [job for job in jobs if job.ref.group == group]
    return candidates[0] if len(candidates) == 1 else None


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
    """A task's state; `none` until Airflow schedules it."""
    return "none" if state is None else str(getattr(state, "value", state))


def same_task(table: Any) -> ColumnElement[bool]:
    """The join condition that a row of `table` belongs to the task instance."""
    columns: Iterable[str] = ("dag_id", "run_id", "task_id", "map_index")
    return and_(*(getattr(table, name) == getattr(TaskInstance, name) for name in columns))
