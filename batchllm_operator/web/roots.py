"""The folders in which a job's plans may be read: from its DAG, or `[batchllm] report_roots`.

Never from an XCom: some users may edit those, and the API server reads with its own rights.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from fnmatch import fnmatchcase
from typing import Any, Final

from airflow.configuration import conf
from airflow.exceptions import AirflowConfigException
from airflow.models.dag import DagModel
from airflow.models.serialized_dag import SerializedDagModel
from airflow.models.taskinstance import TaskInstance
from sqlalchemy import select
from sqlalchemy.orm import Session

from batchllm_operator.errors import PlanError
from batchllm_operator.web.runs import JobRef

SECTION: Final = "batchllm"
OPTION: Final = "report_roots"
SETTING: Final = f"[{SECTION}] {OPTION}"
ROOT_FIELD: Final = "report_root"
"""Field of operators that plan, which Airflow keeps with the parsed DAG."""
_TEAM: Final = "team:"


def report_roots(session: Session, ref: JobRef) -> tuple[str, ...]:
    """Folders and URIs below which the job's plan may be read.

    Those of the setting if it has an entry for the DAG or its team, else the job's own folder of
    plans, from the serialized DAG.

    Raises:
        PlanError: the setting is invalid, or there are no roots.
    """
    roots = _configured(ref.dag_id)
    if roots is None:
        found = next(_of_dag(session, ref), None)
        roots = () if found is None else (found,)
    if not roots:
        raise PlanError(
            "where this job's plans lie isn't known, for its spec couldn't be read where the DAG is"
            f" parsed; name the folder or URI in {SETTING} of Airflow's API server, such as"
            ' {"DAG_ID": ["s3://BUCKET/TABLE"]}'
        )
    return roots


def _configured(dag_id: str) -> tuple[str, ...] | None:
    """The roots of all entries for the DAG; None if there is no such entry."""
    try:
        setting: Any = conf.getjson(SECTION, OPTION, fallback={})
    except AirflowConfigException:
        setting = None
    if not isinstance(setting, Mapping) or not all(map(_is_list_of_texts, setting.values())):
        raise PlanError(
            f"{SETTING} of Airflow's API server isn't a JSON object of lists, such as"
            ' {"DAG_ID": ["s3://BUCKET/TABLE"], "team:NAME": ["/lake/team"]}'
        )
    teams = {key for key in setting if key.startswith(_TEAM)}
    team = DagModel.get_team_name(dag_id) if teams else None
    found = [
        roots
        for key, roots in setting.items()
        if (key == f"{_TEAM}{team}" if key in teams else fnmatchcase(dag_id, key))
    ]
    return tuple(root for roots in found for root in roots) if found else None


def _of_dag(session: Session, ref: JobRef) -> Iterator[str]:
    """The roots of the plan task's operator: in the run's version of the DAG, then the latest."""
    of_run = session.scalar(
        select(SerializedDagModel)
        .join(TaskInstance, SerializedDagModel.dag_version_id == TaskInstance.dag_version_id)
        .where(
            SerializedDagModel.dag_id == ref.dag_id,
            TaskInstance.dag_id == ref.dag_id,
            TaskInstance.run_id == ref.run_id,
            TaskInstance.task_id == ref.task_id,
            TaskInstance.map_index == ref.map_index,
        )
    )
    for stored in (of_run, SerializedDagModel.get(ref.dag_id, session=session)):
        data: Any = {} if stored is None else stored.data or {}
        for task in data.get("dag", {}).get("tasks", ()):
            fields = task.get("__var", {})
            root = fields.get(ROOT_FIELD)
            if fields.get("task_id") == ref.task_id and isinstance(root, str) and root:
                yield root


def _is_list_of_texts(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(each, str) and each for each in value)
