"""The tables of a job as other programs write and read them: pyarrow, pyiceberg, deltalake."""

import io
import os
import tempfile
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final, TypeAlias

import pyarrow as pa
import pyarrow.dataset as ds
import pyarrow.fs as pafs
import pyarrow.parquet as pq

DS: Final = "2026-01-31"
BUCKET: Final = "faults"
_NO_ROWS: Final = pa.table({})
_KEY, _REGION = "test", "us-east-1"


Rows: TypeAlias = pa.Table | Sequence[Mapping[str, Any]]


class Tables(ABC):
    """Input and output of a job in one format, in an empty place."""

    def __init__(self, root: Path, endpoint: str | None) -> None:
        """`endpoint` is S3's; None for the local disk."""
        self._path = f"{BUCKET}/{root.name}" if endpoint else f"{root}/lake"
        self._uri = f"s3://{self._path}" if endpoint else self._path

    def address(self, name: str) -> str:
        """What a spec calls the table."""
        return f"{self._uri}/{name}"

    @abstractmethod
    def replace_input(self, rows: Rows) -> None:
        """Put these rows in place of the input partition's."""

    @abstractmethod
    def output(self) -> pa.Table:
        """The output partition's rows, by a reader that isn't ours; none if there is no table."""


def s3_client(endpoint: str) -> pafs.S3FileSystem:
    """The storage behind `endpoint`, as pyarrow calls it."""
    keys = {"access_key": _KEY, "secret_key": _KEY, "region": _REGION}
    return pafs.S3FileSystem(endpoint_override=endpoint, allow_bucket_creation=True, **keys)


class ParquetTables(Tables):
    """Plain datasets, `ds=<value>/*.parquet`."""

    def __init__(self, root: Path, endpoint: str | None) -> None:
        super().__init__(root, endpoint)
        self._fs: pafs.FileSystem = s3_client(endpoint) if endpoint else pafs.LocalFileSystem()

    def replace_input(self, rows: Rows) -> None:
        folder = f"{self._path}/documents/ds={DS}"
        self._fs.create_dir(folder)
        sink = io.BytesIO()
        pq.write_table(_as_table(rows), sink)
        with self._fs.open_output_stream(f"{folder}/a.parquet") as stream:
            stream.write(sink.getvalue())

    def output(self) -> pa.Table:
        folder = f"{self._path}/out"
        if self._fs.get_file_info(folder).type == pafs.FileType.NotFound:
            return _NO_ROWS
        found = ds.dataset(folder, filesystem=self._fs, partitioning="hive", format="parquet")
        return found.to_table() if found.files else _NO_ROWS


class IcebergTables(Tables):
    """Tables of a SQL catalog in a file."""

    def __init__(self, root: Path, endpoint: str | None) -> None:
        from pyiceberg.catalog.sql import SqlCatalog

        self._settings = iceberg_settings(root, endpoint)
        self._catalog = SqlCatalog("faults", **self._settings)
        self._catalog.create_namespace_if_not_exists("ns")

    def address(self, name: str) -> str:
        return f"iceberg://faults/ns.{name}"

    def replace_input(self, rows: Rows) -> None:
        from pyiceberg.expressions import EqualTo
        from pyiceberg.partitioning import PartitionField, PartitionSpec
        from pyiceberg.transforms import IdentityTransform

        from batchllm_operator.lake.iceberg.schema import iceberg_schema

        table = _with_ds(rows)
        if not self._catalog.table_exists("ns.documents"):
            schema = iceberg_schema(table.schema)
            field = PartitionField(
                schema.find_field("ds").field_id, 1000, IdentityTransform(), "ds"
            )
            self._catalog.create_table(
                "ns.documents", schema, partition_spec=PartitionSpec(field)
            ).append(table)
            return
        day = EqualTo("ds", DS)  # type: ignore[arg-type, call-arg]
        self._catalog.load_table("ns.documents").overwrite(table, day)

    def output(self) -> pa.Table:
        from pyiceberg.exceptions import NoSuchTableError

        try:
            table = self._catalog.load_table("ns.out")
        except NoSuchTableError:
            return _NO_ROWS
        return table.scan().to_arrow()


class DeltaTables(Tables):
    """Tables in folders, read and written by delta-rs."""

    def __init__(self, root: Path, endpoint: str | None) -> None:
        super().__init__(root, endpoint)
        self._options = delta_options(endpoint) if endpoint else {}

    def address(self, name: str) -> str:
        return f"delta+{self._uri}/{name}"

    def replace_input(self, rows: Rows) -> None:
        from deltalake import write_deltalake

        write_deltalake(
            f"{self._uri}/documents",
            _with_ds(rows),
            partition_by="ds",
            mode="overwrite",
            storage_options=self._options,
        )

    def output(self) -> pa.Table:
        from deltalake import DeltaTable
        from deltalake.exceptions import TableNotFoundError

        try:
            table = DeltaTable(f"{self._uri}/out", storage_options=self._options)
        except TableNotFoundError:
            return _NO_ROWS
        return pa.table(table.to_pyarrow_table())


FORMATS: Final[dict[str, type[Tables]]] = {
    "parquet": ParquetTables,
    "iceberg": IcebergTables,
    "delta": DeltaTables,
}


def iceberg_settings(root: Path, endpoint: str | None) -> dict[str, str]:
    """Properties of the catalog."""
    settings = {
        "uri": f"sqlite:///{root}/catalog.db",
        "warehouse": f"s3://{BUCKET}/{root.name}" if endpoint else f"file://{root}/lake",
    }
    if endpoint:
        settings |= {
            "s3.endpoint": endpoint,
            "s3.access-key-id": _KEY,
            "s3.secret-access-key": _KEY,
            "s3.region": _REGION,
            "s3.request-timeout": "1",
        }
    return settings


def delta_options(endpoint: str) -> dict[str, str]:
    """How delta-rs reaches the storage."""
    return {
        "aws_endpoint": endpoint,
        "aws_access_key_id": _KEY,
        "aws_secret_access_key": _KEY,
        "aws_region": _REGION,
        "allow_http": "true",
        "conditional_put": "etag",
    }


def _as_table(rows: Rows) -> pa.Table:
    return rows if isinstance(rows, pa.Table) else pa.Table.from_pylist([dict(r) for r in rows])


def _with_ds(rows: Rows) -> pa.Table:
    table = _as_table(rows)
    return table.append_column("ds", pa.array([DS] * table.num_rows, pa.string()))


def environment(root: Path, endpoint: str | None) -> dict[str, str]:
    """What a user of these tables has set."""
    found = {"TMPDIR": str(root / "tmp"), "PYICEBERG_CATALOG__FAULTS__TYPE": "sql"}
    for name, value in iceberg_settings(root, endpoint).items():
        key = name.upper().replace(".", "__").replace("-", "_")
        found[f"PYICEBERG_CATALOG__FAULTS__{key}"] = value
    if endpoint:
        found |= {
            "AWS_ENDPOINT_URL": endpoint,
            "AWS_ACCESS_KEY_ID": _KEY,
            "AWS_SECRET_ACCESS_KEY": _KEY,
            "AWS_DEFAULT_REGION": _REGION,
            "AWS_CONFIG_FILE": os.devnull,
            "AWS_SHARED_CREDENTIALS_FILE": os.devnull,
            "AWS_MAX_ATTEMPTS": "2",
        }
    return found


def set_environment(root: Path, endpoint: str | None) -> None:
    """Make this process's environment that of a user of these tables."""
    import fsspec.config
    import pyiceberg.catalog
    from pyiceberg.utils.config import Config

    for name in [each for each in os.environ if each.startswith(("AWS_", "PYICEBERG_"))]:
        del os.environ[name]
    os.environ |= environment(root, endpoint)
    tempfile.tempdir = None
    # Both read the environment when they were imported.
    pyiceberg.catalog._ENV_CONFIG = Config()
    if endpoint:
        timeouts = {"read_timeout": 1, "connect_timeout": 1}
        fsspec.config.conf["s3"] = {"config_kwargs": timeouts}
