"""A Parquet file with a row per scheduler step."""

from __future__ import annotations

import logging
from array import array
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import fields
from pathlib import Path
from typing import Final

import pyarrow as pa
import pyarrow.parquet as pq

from batchllm_operator.vllm_plugin.scheduler.step_row import StepRow

_log = logging.getLogger(__name__)
_ROWS_IN_MEMORY: Final = 1 << 14


TRACE_SCHEMA: Final = pa.schema(
    [
        pa.field(field.name, pa.float64() if field.name.endswith("_s") else pa.int64(), False)
        for field in fields(StepRow)
    ]
)


CHUNK_SIZE_KEY: Final = b"batchllm.chunk_size"
"""Key in the file's metadata: most tokens of a step, in decimal digits."""


class StepTrace:
    """Writes a row per step.

    Rows are written some thousands at a time, so that memory doesn't grow with the run. The file
    is readable once it has been closed.

    Args:
        path: the file to write.
        chunk_size: most tokens of a step, noted in the file's metadata.

    Raises:
        OSError: the file can't be written.
    """

    def __init__(self, path: Path, chunk_size: int | None = None) -> None:
        self._schema = TRACE_SCHEMA
        if chunk_size is not None:
            self._schema = TRACE_SCHEMA.with_metadata({CHUNK_SIZE_KEY: str(chunk_size).encode()})
        self._writer = pq.ParquetWriter(path, self._schema, compression="zstd")
        self._columns = [array("d" if name.endswith("_s") else "q") for name in TRACE_SCHEMA.names]

    def add(self, row: StepRow) -> None:
        """Note a step."""
        for column, name in zip(self._columns, TRACE_SCHEMA.names, strict=True):
            column.append(getattr(row, name))
        if len(self._columns[0]) == _ROWS_IN_MEMORY:
            self._flush()

    def close(self) -> None:
        """Write the remaining rows and end the file. May be repeated."""
        self._flush()
        self._writer.close()

    def _flush(self) -> None:
        if self._columns[0]:
            self._writer.write_table(
                pa.table([pa.array(each) for each in self._columns], schema=self._schema)
            )
            for column in self._columns:
                del column[:]


class OptionalTrace:
    """A `StepTrace` whose failure costs a warning, not the run."""

    def __init__(self, path: Path, chunk_size: int) -> None:
        self._trace: StepTrace | None = None
        with self._warning("steps aren't traced"):
            self._trace = StepTrace(path, chunk_size)

    def add(self, row: StepRow) -> None:
        """Note a step."""
        if self._trace is not None:
            with self._warning("steps aren't traced any more"):
                self._trace.add(row)

    def close(self) -> None:
        """Write the remaining rows and end the file."""
        if self._trace is not None:
            with self._warning("the trace of steps isn't whole"):
                self._trace.close()
        self._trace = None

    @contextmanager
    def _warning(self, what: str) -> Iterator[None]:
        try:
            yield
        except OSError as error:  # a full disk: the job matters more than its trace
            self._trace = None
            _log.warning("%s: %s", what, error)
