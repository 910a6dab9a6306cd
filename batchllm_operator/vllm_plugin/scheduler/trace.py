"""A Parquet file with a row per scheduler step."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import fields
from operator import attrgetter
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
    """Writes a row per step. A fault of the disk costs a warning and the trace, not the run.

    Rows are written some thousands at a time, so that memory doesn't grow with the run. The file
    is readable once it has been closed.

    Args:
        path: the file to write.
        chunk_size: most tokens of a step, noted in the file's metadata.
    """

    def __init__(self, path: Path, chunk_size: int | None = None) -> None:
        self._schema = TRACE_SCHEMA
        if chunk_size is not None:
            self._schema = TRACE_SCHEMA.with_metadata({CHUNK_SIZE_KEY: str(chunk_size).encode()})
        self._rows: list[StepRow] = []
        self._writer: pq.ParquetWriter | None = None
        with self._warning("steps aren't traced"):
            self._writer = pq.ParquetWriter(path, self._schema, compression="zstd")

    def add(self, row: StepRow) -> None:
        """Note a step."""
        self._rows.append(row)
        if len(self._rows) == _ROWS_IN_MEMORY:
            with self._warning("steps aren't traced any more"):
                self._flush()

    def close(self) -> None:
        """Write the remaining rows and end the file. May be repeated."""
        with self._warning("the trace of steps isn't whole"):
            self._flush()
            if self._writer is not None:
                self._writer.close()
        self._writer = None

    def _flush(self) -> None:
        rows, self._rows = self._rows, []
        if rows and self._writer is not None:
            columns = zip(*map(attrgetter(*TRACE_SCHEMA.names), rows), strict=True)
            self._writer.write_table(pa.table([*map(pa.array, columns)], schema=self._schema))

    @contextmanager
    def _warning(self, what: str) -> Iterator[None]:
        try:
            yield
        except OSError as error:  # a full disk: the job matters more than its trace
            self._writer = None
            _log.warning("%s: %s", what, error)
