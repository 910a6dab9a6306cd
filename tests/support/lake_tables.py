"""One table in each format, for the tests that all formats pass, and what other programs do to it.

A format is added by a class like `IcebergLake` and an entry in `LAKES`, and in `FORMATS` of
conftest.py.
"""

from __future__ import annotations

import io
import os
import tempfile
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from batchllm_operator.errors import StorageError
from batchllm_operator.lake import LakeTable, Publication, open_table, published_schema
from batchllm_operator.storage import Folder

DS = "2026-01-31"
HIVE_NULL = "__HIVE_DEFAULT_PARTITION__"
ON_S3 = pytest.mark.parametrize("lake_uri", ["s3"], indirect=True)
"""For tests whose tables lie on S3, not on local disk; alone, or as a module's `pytestmark`."""
IN_STORES = pytest.mark.parametrize("lake_uri", ["s3", "gs", "azure"], indirect=True)
"""The same, in the store of each cloud."""


class Lake:
    """An empty place for one table of a format, partitioned by strings in column `ds`."""

    has_versions: bool
    """Whether a snapshot can be read after a later write."""
    address: str
    """What a spec calls the table."""
    staging: str
    """A folder for a job that writes the table."""
    folder: Folder
    """Where `data_files` lie."""
    commit: tuple[Any, str]
    """Object and name of the function whose answer says whether a commit has happened."""
    read: tuple[Any, str]
    """Object and name of a function without which the table can't be looked at."""
    lost: Exception
    """What `commit` raises when the connection is lost."""
    unreadable: Exception
    """What `read` raises then."""

    def append(self, partition: Any, rows: pa.Table, **options: Any) -> None:
        """Another program adds a file of rows to a partition: a text, or a scalar of another type
        where the table is made by it; None is null.
        """
        raise NotImplementedError

    def create(self, columns: pa.Schema) -> None:
        """Another program creates the table, with these columns besides `ds`."""
        raise NotImplementedError

    def forget(self) -> None:
        """Make all versions but the newest unreadable."""
        raise NotImplementedError

    def data_files(self) -> list[str]:
        """Names of all data files, those included that no version refers to."""
        return [name for name in self.folder.find() if name.endswith(".parquet")]


class ParquetLake(Lake):
    """A plain dataset. Its commits go through one function of ours."""

    has_versions = False
    lost: Exception = StorageError("connection lost")
    unreadable: Exception = lost

    def __init__(
        self, uri: str, spool: Path, monkeypatch: pytest.MonkeyPatch, name: str = "table"
    ) -> None:
        self.address, self.staging = f"{uri}/{name}", f"{uri}/staging"
        self.folder = Folder.open(self.address)
        is_local = self.folder.is_local
        self.commit = (Folder, "publish_file") if is_local else (type(self.folder.fs), "put_if")
        self.read = (Folder, "find")
        self._num_files = 0

    def append(self, partition: Any, rows: pa.Table, **options: Any) -> None:
        from urllib.parse import quote

        sink = io.BytesIO()
        pq.write_table(rows, sink, **options)
        self._num_files += 1
        value = HIVE_NULL if partition is None else quote(partition, safe="")
        name = f"ds={value}/part-{self._num_files:05d}.parquet"
        self.folder.write_bytes(name, sink.getvalue())


class IcebergLake(Lake):
    """A table of a SQL catalog in a file; the warehouse is where the test's lake is."""

    has_versions = True
    lost: Exception = ConnectionError("connection lost")
    unreadable: Exception = lost

    def __init__(
        self, uri: str, spool: Path, monkeypatch: pytest.MonkeyPatch, name: str = "table"
    ) -> None:
        import pyiceberg.catalog
        from pyiceberg.catalog.sql import SqlCatalog
        from pyiceberg.utils.config import Config

        # Without a double of the API by which Arrow reaches Google, only plans are there.
        place = f"{spool}/warehouse" if uri.startswith("gs://") else uri
        self.folder = Folder.open(place)
        settings = {
            "TYPE": "sql",
            "URI": f"sqlite:///{spool}/catalog.db",
            "WAREHOUSE": place if "://" in place else f"file://{place}",
        }
        if uri.startswith("abfss://"):
            account, _, folder = uri.partition("@")[2].partition("/")
            settings |= {
                "WAREHOUSE": f"{uri.partition('@')[0]}/{folder}",
                "PY_IO_IMPL": "pyiceberg.io.pyarrow.PyArrowFileIO",
                "ADLS__ACCOUNT_NAME": account.partition(".")[0],
                "ADLS__ACCOUNT_KEY": os.environ["AZURE_STORAGE_ACCOUNT_KEY"],
            }
            server = os.environ["AZURE_STORAGE_ENDPOINT"].split("/")[2]
            for api in ("BLOB", "DFS"):
                settings[f"ADLS__{api}_STORAGE_AUTHORITY"] = server
                settings[f"ADLS__{api}_STORAGE_SCHEME"] = "http"
        if uri.startswith("s3://"):
            settings |= {
                "S3__ENDPOINT": os.environ["AWS_ENDPOINT_URL"],
                "S3__ACCESS_KEY_ID": "test",
                "S3__SECRET_ACCESS_KEY": "test",
                "S3__REGION": "us-east-1",
            }
        for setting, value in settings.items():
            monkeypatch.setenv(f"PYICEBERG_CATALOG__TESTS__{setting}", value)
        # It was read when pyiceberg was imported.
        monkeypatch.setattr(pyiceberg.catalog, "_ENV_CONFIG", Config())
        self.catalog = pyiceberg.catalog.load_catalog("tests")
        weakref.finalize(self, self.catalog.close)
        self.catalog.create_namespace_if_not_exists("ns")
        self.name = f"ns.{name}"
        self.address, self.staging = f"iceberg://tests/{self.name}", f"{uri}/staging"
        self.commit = (SqlCatalog, "commit_table")
        self.read = (SqlCatalog, "load_table")

    def load(self) -> Any:
        """The table, as pyiceberg has it."""
        return self.catalog.load_table(self.name)

    def append(self, partition: Any, rows: pa.Table, **options: Any) -> None:
        from batchllm_operator.lake.iceberg.schema import ICEBERG
        from batchllm_operator.lake.schema import stored_schema

        rows = rows.cast(stored_schema("test", rows.schema, ICEBERG))
        ds = _column(partition, rows.num_rows)
        if not self.catalog.table_exists(self.name):
            self.create(rows.schema, ds.type)
        self.load().append(rows.append_column("ds", ds))

    def create(self, columns: pa.Schema, kind: pa.DataType | None = None) -> None:
        from pyiceberg.partitioning import PartitionField, PartitionSpec
        from pyiceberg.transforms import IdentityTransform

        from batchllm_operator.lake.iceberg.schema import iceberg_schema

        schema = iceberg_schema(columns.append(pa.field("ds", kind or pa.string())))
        field = PartitionField(schema.find_field("ds").field_id, 1000, IdentityTransform(), "ds")
        self.catalog.create_table(self.name, schema, partition_spec=PartitionSpec(field))

    def forget(self) -> None:
        table = self.load()
        newest = table.current_snapshot().snapshot_id
        old = [each.snapshot_id for each in table.snapshots() if each.snapshot_id != newest]
        table.maintenance.expire_snapshots().by_ids(old).commit()


class DeltaLake(Lake):
    """A table in a folder; other programs write it with delta-rs."""

    has_versions = True
    lost: Exception = OSError("connection lost")
    unreadable: Exception = StorageError("connection lost")

    def __init__(
        self, uri: str, spool: Path, monkeypatch: pytest.MonkeyPatch, name: str = "table"
    ) -> None:
        from batchllm_operator.lake.delta.log import DeltaLog

        self.folder = Folder.open(f"{uri}/{name}")
        self.address, self.staging = f"delta+{uri}/{name}", f"{uri}/staging"
        self.commit = (DeltaLog, "_write")
        self.read = (DeltaLog, "_load")

    def append(self, partition: Any, rows: pa.Table, **options: Any) -> None:
        write_delta(self.folder, rows.append_column("ds", _column(partition, rows.num_rows)))

    def create(self, columns: pa.Schema) -> None:
        from deltalake import DeltaTable, Schema

        schema = Schema.from_arrow(columns.append(pa.field("ds", pa.string())))
        DeltaTable.create(
            self.folder.uri, schema, partition_by="ds", storage_options=delta_options(self.folder)
        )

    def forget(self) -> None:
        from deltalake import DeltaTable

        table = DeltaTable(self.folder.uri, storage_options=delta_options(self.folder))
        table.create_checkpoint()
        for version in range(table.version()):
            self.folder.remove(f"_delta_log/{version:020}.json")


def delta_options(folder: Folder) -> dict[str, str]:
    on_s3 = {"aws_conditional_put": "etag"} if folder.uri.startswith("s3") else {}
    return {} if folder.is_local else {**on_s3, "allow_http": "true"}


def write_delta(folder: Folder, rows: pa.Table, **how: Any) -> None:
    """Another program adds rows, or does as `how` says."""
    from deltalake import write_deltalake

    defaults = {"partition_by": "ds", "mode": "append", "schema_mode": "merge"}
    options = delta_options(folder)
    write_deltalake(folder.uri, rows, storage_options=options, **defaults | how)


def _column(partition: Any, num_rows: int) -> pa.Array:
    is_typed = isinstance(partition, pa.Scalar)
    return pa.repeat(partition if is_typed else pa.scalar(partition, pa.string()), num_rows)


LAKES: dict[str, Callable[..., Lake]] = {
    "parquet": ParquetLake,
    "iceberg": IcebergLake,
    "delta": DeltaLake,
}


def open_lake(lake: Lake) -> LakeTable:
    return open_table(lake.address, "ds")


def of_plan(plan_id: str = "p1", partition: str = DS, job: str = "job") -> Publication:
    return Publication(job, partition, plan_id)


def published_file(path: Path, rows: pa.Table, whose: Publication) -> Path:
    """A local file of rows as commit writes it."""
    rows = rows.append_column("run_id", pa.array([whose.run_id] * rows.num_rows, pa.string()))
    pq.write_table(rows.cast(published_schema(rows.schema, whose)), path)
    return path


def publish(
    table: LakeTable, rows: pa.Table, whose: Publication | None = None, **options: Any
) -> None:
    """Publish rows as commit does, over what the partition holds unless `replaces` says else."""
    whose = whose or of_plan()
    if "replaces" not in options:
        options["replaces"] = table.published(whose.partition)
    with tempfile.TemporaryDirectory() as folder:
        table.publish(whose, published_file(Path(folder, "rows"), rows, whose), **options)


def failing(error: Exception) -> Any:
    """Around a function: it isn't called, and this is raised."""

    def around(real: Any, *args: Any, **kwargs: Any) -> Any:
        raise error

    return around


def losing(error: Exception) -> Any:
    """Around a function: it is called, and instead of its answer this is raised."""

    def around(real: Any, *args: Any, **kwargs: Any) -> Any:
        real(*args, **kwargs)
        raise error

    return around


@contextmanager
def wrapped(target: tuple[Any, str], around: Any) -> Iterator[None]:
    """While inside, calls of the function go to `around`, with the function itself first."""
    owner, name = target
    function = getattr(owner, name)

    def replacement(*args: Any, **kwargs: Any) -> Any:
        return around(function, *args, **kwargs)

    with mock.patch.object(owner, name, replacement):
        yield
