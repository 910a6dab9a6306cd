"""Data files that are put beside a table's, before a commit refers to them."""

from __future__ import annotations

import tempfile
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from batchllm_operator.errors import StorageError
from batchllm_operator.lake.data_files import files_of, files_written, gather, stored_batches
from batchllm_operator.lake.row_stream import align
from batchllm_operator.lake.schema import StoredColumns, plain_type


@dataclass(frozen=True, slots=True)
class StagedFile:
    """A data file that no version of the table refers to yet."""

    name: str
    """As the format names its files."""
    size_bytes: int
    footer: pq.FileMetaData


@dataclass(frozen=True)
class Staging(ABC):
    """Puts data files beside those of a table, in any process: it can be sent to one."""

    uri: str
    schema: pa.Schema
    """Columns of the rows, as they are given."""
    stored: StoredColumns
    """The same columns as the table has, or will have, them."""
    file_schema: pa.Schema
    """Columns of the files."""
    constants: Mapping[str, Any]
    """Values of the files' columns that the rows lack, if they aren't null."""
    options: Mapping[str, Any]
    """Of `pq.ParquetWriter`."""
    most_file_bytes: int
    most_group_rows: int | None

    def put(self, data: Path, number: int = 0) -> list[StagedFile]:
        """Put the rows of local files beside the table's; names sort by `number` first.

        `data` is as for `LakeTable.publish`; files that need other columns are written beside it
        first, one at a time. What isn't published is left to the table's vacuum.

        Raises `TableError`, `StorageError`: a value doesn't fit, or the storage fails.
        """
        staged: list[StagedFile] = []
        name = None
        with tempfile.TemporaryDirectory(prefix="batchllm-staged-", dir=data.parent) as spool:
            try:
                for path in self._files(files_of(data), Path(spool, "data")):
                    footer = pq.read_metadata(path)
                    if footer.num_rows:
                        name = self._new_name(f"{number:06d}-{len(staged):05d}")
                        self._put(path, name)
                        staged.append(StagedFile(name, path.stat().st_size, footer))
                    if path.is_relative_to(spool):
                        path.unlink()
            except BaseException:
                self.remove({*(file.name for file in staged), *filter(None, [name])})
                raise
        return staged

    def check_unchanged(self, now: Staging) -> None:
        """Raise `StorageError` if a column of the files is no such column of the table any more."""
        for field in self.file_schema:
            wanted = now.file_schema
            if field.name not in wanted.names or not field.equals(
                wanted.field(field.name), check_metadata=True
            ):
                raise StorageError(
                    f"output {self.uri}: its column {field.name!r} has changed while the outputs"
                    " were written; commit again"
                )

    @abstractmethod
    def remove(self, names: Iterable[str]) -> None:
        """Remove files as far as possible: leftovers are harmless. No version may refer to them."""

    @abstractmethod
    def _new_name(self, stem: str) -> str:
        """A name in the table that no other file has; such names sort by `stem`."""

    @abstractmethod
    def _put(self, path: Path, name: str) -> None:
        """Copy a local file to the table; raises `StorageError`: the storage fails."""

    def _files(self, data: Sequence[Path], spool: Path) -> Iterable[Path]:
        """Files with the columns of `file_schema`: those of `data` if they have them already."""
        if not self.constants and _same_types(self.schema, self.file_schema):
            return data
        batches = (
            align(batch, self.file_schema, self.constants)
            for batch in stored_batches(data, self.stored)
        )
        groups = gather((pa.Table.from_batches([b]) for b in batches), self.most_file_bytes)
        limits = self.most_file_bytes, self.options, self.most_group_rows
        return files_written(groups, spool, self.file_schema, *limits)


@dataclass(frozen=True, slots=True)
class StagedRows:
    """Rows of a partition in data files that no version of the table refers to yet."""

    staging: Staging
    files: tuple[StagedFile, ...]
    """What all `put` returned, in row order."""


def _same_types(given: pa.Schema, wanted: pa.Schema) -> bool:
    """Whether files of the columns `given` are such as the table wants, and nulls don't matter."""
    return given.names == wanted.names and all(
        field.nullable and plain_type(kind) == plain_type(field.type)
        for kind, field in zip(given.types, wanted, strict=True)
    )
