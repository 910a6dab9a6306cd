"""The URIs of plans from XComs, and the folders in which a job's plans may be read.

Some users may edit XComs, which must not make the API server read arbitrary files. The folders are
those of the DAG, or of `[batchllm] report_roots`; never of an XCom.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import unquote

from airflow.configuration import conf
from airflow.exceptions import AirflowConfigException
from airflow.models.dag import DagModel
from airflow.models.serialized_dag import SerializedDagModel
from airflow.models.taskinstance import TaskInstance
from sqlalchemy import select
from sqlalchemy.orm import Session

from batchllm_operator.errors import PlanError
from batchllm_operator.secrets import holds_credentials

if TYPE_CHECKING:
    from batchllm_operator.web.runs import JobRef

_MAX_CHARS: Final = 4096
_START: Final = re.compile(r"(?:s3a?://[^/\s]+|(?:file://)?)/", re.ASCII)
_END: Final = re.compile(
    r"/_batchllm/(?P<job>[A-Za-z0-9][A-Za-z0-9_\-]*)/(?P<ds>[A-Za-z0-9_.~%\-]+)"
    r"/plan-(?P<plan_id>[0-9a-f]{16})"
)

SECTION: Final = "batchllm"
OPTION: Final = "report_roots"
SETTING: Final = f"[{SECTION}] {OPTION}"
ROOT_FIELD: Final = "report_root"
"""Field of operators that plan, which Airflow keeps with the parsed DAG."""
_TEAM: Final = "team:"


@dataclass(frozen=True, slots=True)
class PlanURI:
    """The URI of a plan, with the path that plans have."""

    uri: str
    job: str
    ds: str
    plan_id: str

    @classmethod
    def parse(cls, value: Any) -> PlanURI:
        """Check the value that a plan task has stored.

        Raises:
            PlanError: it isn't the normalised path of a folder `.../_batchllm/<job>/<ds>/plan-<id>`
                on S3 or a local disk. The message doesn't repeat the value.
        """
        if not isinstance(value, str) or len(value) > _MAX_CHARS or not value.isprintable():
            raise PlanError("the plan task has noted something that isn't the URI of a plan")
        start, end = _START.match(value), _END.search(value)
        names = value[start.end() :].split("/") if start else []
        if end is None or end.end() != len(value) or not names or {"", ".", ".."} & {*names}:
            raise PlanError(
                "the plan task has noted a URI that isn't one of a plan, which would be"
                " .../_batchllm/<job>/<ds>/plan-<id> on S3 or a local disk"
            )
        if holds_credentials(value) or any(mark in value for mark in ("?", "#", "::")):
            raise PlanError(
                "the plan task has noted a URI with credentials, parameters or :: in it"
            )
        return cls(value, end["job"], unquote(end["ds"]), end["plan_id"])

    @property
    def local_path(self) -> str | None:
        return None if self.uri.startswith("s3") else self.uri.removeprefix("file://")

    def place(self, roots: Iterable[str]) -> str:
        """The place to read it from: on a local disk the real path, resolved once, here.

        Raises:
            PlanError: it leads to something else than a plan's folder, or is below none of `roots`.
        """
        path = self.local_path
        place = self.uri
        if path is not None:
            place = os.path.realpath(path)
            if _END.fullmatch(place[place.rfind("/_batchllm/") :]) is None:
                raise PlanError("the plan's folder is a symbolic link to what isn't one")
        if not any(_is_below(place, root) for root in roots):
            raise PlanError(
                "the plan lies in none of the places where this DAG's plans are read: those that"
                " [batchllm] report_roots of Airflow's API server names for it, or else that of its"
                " own job spec"
            )
        return place


def _is_below(place: str, root: str) -> bool:
    """Whether a place is below a root, in the same bucket or on disk."""
    if root.startswith(("s3://", "s3a://")):
        bucket, _, path = root.partition("://")[2].rstrip("/").partition("/")
        root = f"s3://{bucket}/{path}".rstrip("/")
        return bool(bucket) and place.replace("s3a://", "s3://", 1).startswith(f"{root}/")
    root = root.removeprefix("file://")
    if not root.startswith("/") or place.startswith("s3"):
        return False
    return place.startswith(os.path.realpath(root).rstrip("/") + "/")


def report_roots(session: Session, ref: JobRef) -> tuple[str, ...]:
    """Folders and URIs below which the job's plan may be read.

    Those of the setting if it has an entry for the DAG or its team, else the job's own folder of
    plans, from the serialized DAG.

    Raises:
        PlanError: the setting is invalid, or there are no roots.
    """
    roots = _configured(ref.dag_id)
    if roots is None:
        roots = tuple(_of_dag(session, ref))[:1]
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
    entries = [
        roots
        for key, roots in setting.items()
        if (key == f"{_TEAM}{team}" if key in teams else fnmatchcase(dag_id, key))
    ]
    return tuple(root for roots in entries for root in roots) if entries else None


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
    return isinstance(value, list) and all(isinstance(text, str) and text for text in value)
