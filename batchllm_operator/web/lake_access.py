"""The pages' only access to the lake: a plan's manifest, report and progress.

Each is checked to belong to the plan before it is shown. Requests never name a path.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final, TypeVar

from airflow.models.connection import Connection
from airflow.providers.common.compat.sdk import AirflowException

from batchllm_operator.errors import BatchLLMError, PlanError, StorageError
from batchllm_operator.shards.committed import COMMITTED_FILE
from batchllm_operator.shards.job_status import read_status
from batchllm_operator.shards.status import JobStatus
from batchllm_operator.storage import Folder
from batchllm_operator.stored_plan.manifest import MANIFEST_FILE, PlanManifest
from batchllm_operator.stored_plan.run_report import REPORT_FILE, RunReport
from batchllm_operator.stored_plan.stored_plan import RUNS_FOLDER, StoredPlan
from batchllm_operator.web.access import PageError
from batchllm_operator.web.files_without_links import LINKS, FilesWithoutLinks
from batchllm_operator.web.kept import Kept
from batchllm_operator.web.plan_uri import PlanURI

_T = TypeVar("_T")

CONNECTION_SETTING: Final = "BATCHLLM_AWS_CONN_ID"
"""Environment variable: the Airflow connection whose AWS credentials read the lake."""

_MAX_BYTES: Final = 64 << 20
"""Upper bound of a manifest or report: larger ones aren't ours, or would crash the API server."""
_PLANS: Final[Kept[tuple[StoredPlan, frozenset[str]]]] = Kept(30.0)
"""Each with the secrets that opened it, to mask them in later messages."""
_REPORTS: Final[Kept[RunReport | None]] = Kept(2.0)
_STATUSES: Final[Kept[JobStatus | None]] = Kept(2.0)
_READERS: Final = threading.BoundedSemaphore(8)
"""A storage that doesn't answer blocks at most this many threads of the API server."""
_READER_WAIT_S: Final = 5.0
_SLOW: Final = "The lake takes long to answer; look again in a moment."


class LakeReader:
    """Reads one plan, if it is below one of `roots`. Its methods block: call them in a thread.

    Each raises PageError: 404 if the plan is missing, 409 if a file is wrong, 503 if the lake can't
    be read.
    """

    def __init__(self, uri: PlanURI, roots: tuple[str, ...]) -> None:
        self._uri, self._roots = uri, roots
        self._secrets: frozenset[str] = frozenset()

    def report(self) -> RunReport | None:
        return self._kept(_REPORTS, self._read_report)

    def status(self) -> JobStatus | None:
        """The run's status; None after the commit, as the report has everything then."""
        return self._kept(_STATUSES, self._read_status)

    def _read_report(self) -> RunReport | None:
        plan = self._plan()
        try:
            data = _bounded(plan.folder, REPORT_FILE)
        except FileNotFoundError:
            if not plan.folder.exists(COMMITTED_FILE):
                return None
            try:  # committed between the two looks, perhaps
                data = _bounded(plan.folder, REPORT_FILE)
            except FileNotFoundError:
                raise PageError(
                    404, f"The plan is committed, but its {REPORT_FILE} isn't there any more."
                ) from None
        report = RunReport.from_bytes(data, source=self._uri.uri)
        if report.run_id != plan.manifest.run_id:
            raise PlanError(f"report of plan {self._uri.uri}: belongs elsewhere")
        return report

    def _read_status(self) -> JobStatus | None:
        plan = self._plan()
        if plan.folder.exists(COMMITTED_FILE):  # reading on would open the output table
            return None
        if plan.folder.is_local and Path(plan.folder.full_path(RUNS_FOLDER)).is_symlink():
            raise PlanError(LINKS)
        return read_status(plan)

    @property
    def _key(self) -> tuple[PlanURI, tuple[str, ...]]:
        """A cached plan is shared only by DAGs with the same roots."""
        return self._uri, self._roots

    def _plan(self) -> StoredPlan:
        plan, self._secrets = _PLANS.get(self._key, self._open_plan)
        return plan

    def _open_plan(self) -> tuple[StoredPlan, frozenset[str]]:
        folder = Folder.open(self._uri.place(self._roots), **self._options())
        if self._uri.local_path is not None:
            folder = Folder(FilesWithoutLinks(), folder.path)
        try:
            data = _bounded(folder, MANIFEST_FILE)
        except FileNotFoundError:
            raise PageError(
                404,
                "The plan of this run isn't in the lake any more: `batchllm gc` removes plans that"
                " are no longer needed, or it was removed by hand.",
            ) from None
        manifest = PlanManifest.from_bytes(data, source=self._uri.uri)
        where = (manifest.spec.name, manifest.ds, manifest.plan_id)
        if where != (self._uri.job, self._uri.ds, self._uri.plan_id):
            raise PlanError(f"plan {self._uri.uri}: belongs elsewhere")
        return StoredPlan(folder, manifest), self._secrets

    def _options(self) -> dict[str, Any]:
        """Options for S3 that override the API server's own environment."""
        conn_id = os.environ.get(CONNECTION_SETTING)
        if not conn_id or self._uri.local_path is not None:
            return {}
        from batchllm_operator.operators.credentials import Credentials  # a second to import

        connection = Connection.get_connection_from_secrets(conn_id)
        credentials = Credentials.from_connection(conn_id, connection)
        self._secrets = credentials.secrets
        variables = dict(credentials.variables)
        options: dict[str, Any] = {
            option: variables[name] for name, option in _S3_OPTIONS if name in variables
        }
        if region := variables.get("AWS_DEFAULT_REGION"):
            options["client_kwargs"] = {"region_name": region}
        return options

    def _kept(self, kept: Kept[_T], read: Callable[[], _T]) -> _T:
        """The cached value, or the one that this thread reads now."""
        try:
            return kept.get(self._key, lambda: self._guarded(read))
        except TimeoutError:
            raise PageError(503, _SLOW) from None

    def _guarded(self, read: Callable[[], _T]) -> _T:
        if not _READERS.acquire(timeout=_READER_WAIT_S):
            raise PageError(503, _SLOW)
        try:
            return read()
        except StorageError as error:
            text = f"The lake can't be read: {error}"
            raise PageError(503, text, secrets=self._secrets) from error
        except (BatchLLMError, AirflowException) as error:
            raise PageError(409, f"{error}", secrets=self._secrets) from error
        finally:
            _READERS.release()


_S3_OPTIONS: Final = (
    ("AWS_ACCESS_KEY_ID", "key"),
    ("AWS_SECRET_ACCESS_KEY", "secret"),
    ("AWS_SESSION_TOKEN", "token"),
    ("AWS_ENDPOINT_URL", "endpoint_url"),
)


def _bounded(folder: Folder, name: str) -> bytes:
    """The content of a file of at most 64 MiB."""
    try:
        with folder.open_file(name) as file:
            data = file.read(_MAX_BYTES + 1)
    except (FileNotFoundError, StorageError):
        raise
    except OSError as error:
        raise StorageError(f"{folder.uri}/{name}: {error}") from error
    if len(data) > _MAX_BYTES:
        raise PlanError(f"{folder.uri}/{name}: is larger than any of ours")
    return data
