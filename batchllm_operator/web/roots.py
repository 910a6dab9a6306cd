"""The folders in which a job's plans may be read.

They are those of the DAG, or of `[batchllm] report_roots`; never of an XCom, which some users may
edit.
"""

from __future__ import annotations

from fnmatch import fnmatchcase
from typing import Annotated, Any, Final

from airflow.configuration import conf
from airflow.models.dag import DagModel
from airflow.models.serialized_dag import SerializedDagModel
from airflow.models.taskinstance import TaskInstance
from pydantic import Field, TypeAdapter, ValidationError
from sqlalchemy import select
from sqlalchemy.orm import Session

from batchllm_operator.errors import PlanError
from batchllm_operator.web.runs import JobRef

_SETTING: Final = "[batchllm] report_roots"
_ROOT_FIELD: Final = "report_root"
"""Field of operators that plan, which Airflow keeps with the parsed DAG."""
_TEAM: Final = "team:"
_ROOTS: Final = TypeAdapter(dict[str, list[Annotated[str, Field(min_length=1)]]])


def report_roots(session: Session, ref: JobRef) -> tuple[str, ...]:
    """Folders and URIs below which the job's plan may be read.

    Those of the setting if it has an entry for the DAG or its team, else the job's own folder of
    plans, from the serialized DAG.

    Raises:
        PlanError: the setting is invalid, or there are no roots.
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
