"""The pages' only access to the lake: a plan's manifest, report and progress.

Each is checked to belong to the plan before it is shown. Requests never name a path.
"""

from __future__ import annotations

import os
import stat
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Hashable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, Final, Generic, TypeVar

from airflow.models.connection import Connection
from airflow.providers.common.compat.sdk import AirflowException
from fsspec.implementations.local import LocalFileSystem

from batchllm_operator.errors import BatchLLMError, PlanError, StorageError
from batchllm_operator.shards.job_status import read_status
from batchllm_operator.shards.reports import COMMITTED_FILE
from batchllm_operator.shards.status import JobStatus
from batchllm_operator.storage import Folder
from batchllm_operator.stored_plan.manifest import MANIFEST_FILE, PlanManifest
from batchllm_operator.stored_plan.run_report import REPORT_FILE, RunReport
from batchllm_operator.stored_plan.stored_plan import RUNS_FOLDER, StoredPlan
from batchllm_operator.web.access import PageError
from batchllm_operator.web.plan_uri import PlanURI

_T = TypeVar("_T")

_CONNECTION_SETTING: Final = "BATCHLLM_AWS_CONN_ID"
"""Environment variable: the Airflow connection whose AWS credentials read the lake."""
_S3_OPTIONS: Final = (
    ("AWS_ACCESS_KEY_ID", "key"),
    ("AWS_SECRET_ACCESS_KEY", "secret"),
    ("AWS_SESSION_TOKEN", "token"),
    ("AWS_ENDPOINT_URL", "endpoint_url"),
)
_MAX_BYTES: Final = 64 << 20
"""Upper bound of a manifest or report: larger ones aren't ours, or would crash the API server."""
_MAX_ENTRIES: Final = 64
_READERS: Final = threading.BoundedSemaphore(8)
"""A storage that doesn't answer blocks at most this many threads of the API server."""
_READER_WAIT_S: Final = 5.0
_SLOW: Final = "The lake takes long to answer; look again in a moment."
_LINKS: Final = "the plan's folder has symbolic links in it"
_FOLDER: Final = os.O_DIRECTORY | getattr(os, "O_PATH", os.O_RDONLY)  # enough to traverse a folder


@dataclass(slots=True)
class _Entry:
    lock: threading.Lock = field(default_factory=threading.Lock)
    made_at: float = float("-inf")
    value: Any = None


@dataclass(slots=True)
class Kept(Generic[_T]):
    """Values by key, each computed again once it is older than `keep_s` seconds.

    Many viewers cost no more than one: while a value is computed, other callers wait for it, but
    not for long, as their threads are Airflow's. Exceptions aren't cached.
    """

    keep_s: float
    wait_s: float = 5.0
    clock: Callable[[], float] = time.monotonic
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _entries: OrderedDict[Hashable, _Entry] = field(default_factory=OrderedDict)

    def get(self, key: Hashable, make: Callable[[], _T]) -> _T:
        """The value of `key`, computed by `make` if there is no recent one.

        Raises:
            TimeoutError: the wait for another thread's computation took more than `wait_s` seconds.
        """
        with self._lock:
            entry = self._entries.setdefault(key, _Entry())
            self._entries.move_to_end(key)
            while len(self._entries) > _MAX_ENTRIES:
                self._entries.popitem(last=False)
        if not entry.lock.acquire(timeout=self.wait_s):
            raise TimeoutError
        try:
            if self.clock() - entry.made_at >= self.keep_s:
                entry.value, entry.made_at = make(), self.clock()
            value: _T = entry.value
            return value
        finally:
            entry.lock.release()


_CONNECTIONS: Final[Kept[tuple[dict[str, Any], frozenset[str]]]] = Kept(30.0)
"""By connection: a backend of secrets isn't asked at every look."""
_LOOKS: Final[Kept[RunReport | JobStatus]] = Kept(2.0)


def look(uri: PlanURI, roots: tuple[str, ...]) -> RunReport | JobStatus:
    """The status of a plan below one of `roots` until the commit, its report afterwards.

    Blocks: call it in a thread. DAGs share what is kept of a plan only if they have the same roots.
    Raises `PageError`: 404 if the plan or the report is missing, 409 if a file is wrong, 503 if the
    lake can't be read.
    """
    try:
        return _LOOKS.get((uri, roots), lambda: _look(uri, roots))
    except TimeoutError:
        raise PageError(503, _SLOW) from None


def _look(uri: PlanURI, roots: tuple[str, ...]) -> RunReport | JobStatus:
    if not _READERS.acquire(timeout=_READER_WAIT_S):
        raise PageError(503, _SLOW)
    secrets = frozenset[str]()
    try:
        place = uri.place(roots)
        options, secrets = _s3_options(uri)
        plan = _open_plan(uri, Folder.open(place, **options))
        if plan.folder.exists(COMMITTED_FILE):  # the status would open the output table
            return _read_report(plan)
        if plan.folder.is_local and Path(plan.folder.full_path(RUNS_FOLDER)).is_symlink():
            raise PlanError(_LINKS)
        return read_status(plan)
    except StorageError as error:
        raise PageError(503, f"The lake can't be read: {error}", secrets=secrets) from error
    except (BatchLLMError, AirflowException) as error:
        raise PageError(409, f"{error}", secrets=secrets) from error
    finally:
        _READERS.release()


def _open_plan(uri: PlanURI, folder: Folder) -> StoredPlan:
    if uri.local_path is not None:
        folder = Folder(_FilesWithoutLinks(), folder.path)
    gone = (
        "The plan of this run isn't in the lake any more: `batchllm gc` removes plans that are no"
        " longer needed, or it was removed by hand."
    )
    manifest = PlanManifest.from_bytes(_bounded(folder, MANIFEST_FILE, gone), source=uri.uri)
    if (manifest.spec.name, manifest.ds, manifest.plan_id) != (uri.job, uri.ds, uri.plan_id):
        raise PlanError(f"plan {uri.uri}: belongs elsewhere")
    return StoredPlan(folder, manifest)


def _read_report(plan: StoredPlan) -> RunReport:
    gone = f"The plan is committed, but its {REPORT_FILE} isn't there any more."
    data = _bounded(plan.folder, REPORT_FILE, gone)
    report = RunReport.from_bytes(data, source=plan.folder.uri)
    if report.run_id != plan.manifest.run_id:
        raise PlanError(f"report of plan {plan.folder.uri}: belongs elsewhere")
    return report


def _s3_options(uri: PlanURI) -> tuple[dict[str, Any], frozenset[str]]:
    """Options for S3 that override the API server's own environment, and the secrets in them."""
    conn_id = os.environ.get(_CONNECTION_SETTING)
    if not conn_id or not uri.uri.startswith("s3"):
        return {}, frozenset()
    return _CONNECTIONS.get(conn_id, lambda: _options_of(conn_id))


def _options_of(conn_id: str) -> tuple[dict[str, Any], frozenset[str]]:
    from batchllm_operator.operators.credentials import Credentials  # a second to import

    connection = Connection.get_connection_from_secrets(conn_id)
    credentials = Credentials.from_connection(conn_id, connection)
    variables = dict(credentials.variables)
    options: dict[str, Any] = {
        option: variables[name] for name, option in _S3_OPTIONS if name in variables
    }
    if region := variables.get("AWS_DEFAULT_REGION"):
        options["client_kwargs"] = {"region_name": region}
    return options, credentials.secrets


def _bounded(folder: Folder, name: str, gone: str) -> bytes:
    """The content of a file of at most 64 MiB; a `PageError` says `gone` if it is missing."""
    try:
        with folder.open_file(name) as file:
            data = file.read(_MAX_BYTES + 1)
    except FileNotFoundError:
        raise PageError(404, gone) from None
    except OSError as error:
        raise StorageError(f"{folder.uri}/{name}: {error}") from error
    if len(data) > _MAX_BYTES:
        raise PlanError(f"{folder.uri}/{name}: is larger than any of ours")
    return data


class _FilesWithoutLinks(LocalFileSystem):  # type: ignore[misc]  # fsspec ships no types
    """Reads regular files at absolute paths without following symbolic links.

    A plan's folder is checked by its real path. Users with write access could put a symbolic link
    there afterwards, to a file that only Airflow's API server may read.

    Raises PlanError at a link, OSError if it isn't a regular file.
    """

    def _open(self, path: str, mode: str = "rb", *_: Any, **__: Any) -> IO[bytes]:
        *folders, name = path.strip("/").split("/")
        where = os.open("/", _FOLDER)
        try:
            for folder in folders:
                parent, where = where, _open_in(where, folder, _FOLDER)
                os.close(parent)
            file = _open_in(where, name, os.O_RDONLY | os.O_NONBLOCK)  # opening a pipe would block
        finally:
            os.close(where)
        if not stat.S_ISREG(os.fstat(file).st_mode):
            os.close(file)
            raise OSError("isn't a file")
        return os.fdopen(file, "rb")

    def exists(self, path: str, **_: Any) -> bool:
        try:
            self._open(path).close()
        except FileNotFoundError:
            return False
        return True


def _open_in(folder: int, name: str, flags: int) -> int:
    try:
        return os.open(name, flags | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=folder)
    except OSError as error:
        with suppress(OSError):
            if stat.S_ISLNK(os.lstat(name, dir_fd=folder).st_mode):
                raise PlanError(_LINKS) from error
        raise
