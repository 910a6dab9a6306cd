"""Data files for a Delta table that are put into its folder before the commit, by any process."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import pyarrow as pa

from batchllm_operator.errors import ConflictError
from batchllm_operator.lake.data_files import files_of
from batchllm_operator.lake.delta.data import OutputFiles
from batchllm_operator.lake.table import StagedRows
from batchllm_operator.storage.folder import Folder

if TYPE_CHECKING:
    from deltalake.transaction import AddAction


@dataclass(frozen=True, slots=True)
class DeltaStaging:
    """See `Staging`."""

    uri: str
    folder_uri: str
    subfolder: str
    schema: pa.Schema
    stored: pa.Schema
    partition_values: Mapping[str, str]
    most_file_bytes: int
    write_id: str

    def put(self, data: Path, number: int) -> list[str]:
        folder, files = Folder.open(self.folder_uri), files_of(data)
        prefix = f"{self.write_id}-{number:06d}-"
        outputs = OutputFiles(folder, self.subfolder, files, self.most_file_bytes, prefix)
        actions = outputs.put(f"output {self.uri}", self.stored, self.partition_values)
        return [json.dumps(asdict(action)) for action in actions]

    def rows(self, files: Sequence[str]) -> StagedRows:
        return StagedRows(self.schema, self.stored, tuple(files))


class StagedOutputs:
    """As `OutputFiles`, for files that are there already."""

    def __init__(self, rows: StagedRows) -> None:
        self.schema = rows.schema
        self.may_be_committed = False
        self._rows = rows

    def put(
        self, where: str, columns: pa.Schema, partition_values: Mapping[str, str]
    ) -> list[AddAction]:
        """The actions that add the files.

        Raises:
            ConflictError: the table wants other columns than when the files were written.
        """
        from deltalake.transaction import AddAction

        if columns != self._rows.stored:
            raise ConflictError(
                f"{where}: its columns have changed while the outputs were written; commit again"
            )
        return [AddAction(**json.loads(file)) for file in self._rows.files]

    def remove(self) -> None:
        """Others have put the files: they are left to the table's vacuum."""
