"""A Delta table's transaction log, which delta-rs (`deltalake`) reads and writes."""

from __future__ import annotations

import os
import re
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from batchllm_operator.errors import SpecError, StorageError, TableError
from batchllm_operator.lake.delta.columns import logical_columns, physical_columns
from batchllm_operator.lake.delta.version import TableVersion
from batchllm_operator.lake.publishing import RefusedCommit, looking_again
from batchllm_operator.secrets import Masker
from batchllm_operator.storage import Folder, fsync

if TYPE_CHECKING:
    from deltalake.transaction import AddAction

_READ_FEATURES: Final = {
    "columnMapping",
    "deletionVectors",
    "timestampNtz",
    "v2Checkpoint",
    "vacuumProtocolCheck",
}
_COLOUR: Final = re.compile(r"\x1b\[[0-9;]*m")
_MOST_MESSAGE_CHARS: Final = 500


@dataclass(frozen=True, slots=True)
class NextVersion:
    """The version after `seen`; after None, the table's first, of the columns `new`."""

    seen: TableVersion | None
    place: tuple[str, str]
    """The partition column, and the value as the log has it."""
    new: pa.Schema
    """Columns that the table lacks."""


class DeltaLog:
    """The log of the table in a folder, which need not exist yet."""

    def __init__(self, folder: Folder) -> None:
        """Raises `SpecError` for a place of the table that delta-rs doesn't take."""
        self.uri = f"delta+{folder.uri}"
        self.folder = folder
        self._options = None if folder.is_local else _options(folder.uri)
        # delta-rs decodes these twice, or reads another location.
        refused = {"%"} if folder.is_local else {"%", "?", "#"}
        if marks := refused & set(folder.uri):
            raise SpecError(
                f"{self.uri}: a Delta table can't lie at a place with {min(marks)!r} in its name"
            )
        import deltalake  # noqa: F401 - else the first use says that it is missing

    def latest(self) -> TableVersion | None:
        """The table as it is now; None if there is none."""
        from deltalake.exceptions import TableNotFoundError

        try:
            damaged = (
                "its log is damaged, or has what deltalake can't read; repair or copy the table"
            )
            with self._reading(damaged):
                return self._load()
        except TableNotFoundError:
            return None

    def vectors(self, version: TableVersion) -> dict[str, npt.NDArray[np.bool_]]:
        """By file, for those that have deleted rows: [rows of the file] False where deleted."""
        if "deletionVectors" not in (version.raw.protocol().reader_features or ()):
            return {}
        with self._reading(
            "a deletion vector is damaged or, as after a vacuum, gone; plan again, or restore it"
        ):
            return dict(version.vectors())

    @contextmanager
    def _reading(self, damaged: str) -> Iterator[None]:
        from deltalake.exceptions import DeltaError, TableNotFoundError

        try:
            yield
        except TableNotFoundError:
            raise
        except OSError as error:
            raise StorageError(f"table {self.uri}: {_text(error)}") from None
        except DeltaError as error:
            raise TableError(f"table {self.uri}: {damaged}: {_text(error)}") from None

    def commit(
        self, following: NextVersion, files: Sequence[AddAction], properties: Mapping[str, str]
    ) -> RefusedCommit | None:
        """Write the next version, with `files` as the partition's only files.

        delta-rs's retries are off: they would commit on top of versions unknown to the caller.
        `properties` are stored with the commit in the table's history.
        """
        try:
            self._write(following, files, properties)
            return None
        except Exception as error:  # noqa: BLE001 - delta-rs has no common base
            text = _text(error)
            is_storage = isinstance(error, OSError) and not isinstance(error, PermissionError)
        seen = following.seen
        with looking_again(self.uri, following.place[1]):
            now = self.latest()
        if (now and now.number) != (seen and seen.number):
            return RefusedCommit("another commit to the table came first")
        if is_storage:  # on S3 the request may still arrive
            return RefusedCommit(text, may_arrive=not self.folder.is_local, may_repeat=False)
        text = (
            f"deltalake can't write such a version of the table: {text}; drop what it lacks from"
            " the table, or choose another output table"
        )
        return RefusedCommit(text, may_repeat=False, kind=TableError)

    def rehearse(self, following: NextVersion, *, replaces: bool) -> RefusedCommit | None:
        """Why `commit` would be refused; None if it wouldn't.

        The version is written to a copy of the table on local disk, which has its protocol,
        properties and columns, and a file of the partition if the commit `replaces` any.
        """
        from deltalake.transaction import AddAction

        values = dict([following.place])
        with tempfile.TemporaryDirectory(prefix="batchllm-delta-") as folder:
            copy = DeltaLog(Folder.open(folder))
            if following.seen is not None:
                log = Path(folder, "_delta_log")
                following.seen.write_empty_copy(log, values if replaces else None)
                following = replace(following, seen=copy.latest())
            return copy.commit(following, [AddAction("new.parquet", 1, values, 1, True, "{}")], {})

    def _write(
        self, following: NextVersion, files: Sequence[AddAction], properties: Mapping[str, str]
    ) -> None:
        from deltalake import CommitProperties, Schema
        from deltalake.transaction import create_table_with_add_actions

        seen, new, (column, value) = following.seen, following.new, following.place
        commit = CommitProperties(dict(properties), max_commit_retries=0)
        if seen is None:
            create_table_with_add_actions(
                self.folder.uri,
                Schema.from_arrow(new.append(pa.field(column, pa.string()))),
                list(files),
                mode="error",
                partition_by=column,
                storage_options=self._options,
                commit_properties=commit,
            )
        else:
            schema = seen.raw.schema()
            if new:
                schema = Schema([*schema.fields, *Schema.from_arrow(new).fields])
            seen.raw.create_write_transaction(
                list(files),
                "overwrite",
                schema,
                list(seen.partition_columns),
                [(column, "=", value)],
                commit_properties=commit,
            )
        if self.folder.is_local:  # delta-rs doesn't flush the log to disk
            number = 0 if seen is None else seen.number + 1
            entry = Path(self.folder.full_path(f"_delta_log/{number:020}.json"))
            for path in (entry, entry.parent, entry.parent.parent):
                fsync(path)

    def _load(self) -> TableVersion:
        from deltalake import DeltaTable

        raw = DeltaTable(self.folder.uri, storage_options=self._options)
        metadata, protocol = raw.metadata(), raw.protocol()
        known = protocol.reader_features or ()
        if features := set(known) - _READ_FEATURES:
            raise TableError(
                f"table {self.uri}: has Delta reader features that this package can't read:"
                f" {', '.join(sorted(features))}; drop them, or copy the table to one without them"
            )
        schema, columns = pa.schema(raw.schema().to_arrow()), tuple(metadata.partition_columns)
        mode, in_files = metadata.configuration.get("delta.columnMapping.mode", "none"), None
        if mode != "none" and (protocol.min_reader_version == 2 or "columnMapping" in known):
            schema, in_files = logical_columns(schema), physical_columns(schema, mode)
        return TableVersion(self.uri, raw.version(), schema, in_files, columns, raw)


def _options(uri: str) -> dict[str, str]:
    """Settings that our clients take from the environment and delta-rs doesn't; it finds
    credentials."""
    environment = os.environ
    if not uri.startswith("s3://"):
        return {"allow_http": "true", "max_retries": "4"}
    options = {"aws_conditional_put": "etag"}  # a version is written once; the second writer fails
    endpoint = environment.get("AWS_ENDPOINT_URL_S3") or environment.get("AWS_ENDPOINT_URL")
    if endpoint:
        options["aws_endpoint"] = endpoint
        options["aws_allow_http"] = str(endpoint.startswith("http://")).lower()
    region = environment.get("AWS_REGION") or environment.get("AWS_DEFAULT_REGION")
    if region:
        options["aws_region"] = region
    attempts = environment.get("AWS_MAX_ATTEMPTS", "")
    if attempts.isdecimal():
        options["max_retries"] = str(max(0, int(attempts) - 1))
    return options


def _text(error: BaseException) -> str:
    """The error's message in one line, without colours or secrets that an S3 server echoes."""
    message = _COLOUR.sub("", str(error)).partition("stack backtrace:")[0]
    text = Masker.of(os.environ)(" ".join(message.split()))
    return text if len(text) <= _MOST_MESSAGE_CHARS else f"{text[:_MOST_MESSAGE_CHARS]} ..."
