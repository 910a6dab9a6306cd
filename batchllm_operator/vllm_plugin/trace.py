"""What the scheduler did in each step, as a Parquet file."""

from __future__ import annotations

from array import array
from dataclasses import dataclass, fields
from pathlib import Path
from types import TracebackType
from typing import Final

import pyarrow as pa
import pyarrow.parquet as pq

_ROWS_IN_MEMORY: Final = 1 << 14


@dataclass(frozen=True, slots=True)
class StepRow:
    """One step. Counts are taken when it has been put together, before it runs."""

    step: int
    start_s: float
    """Since the first step, when scheduling began."""
    scheduling_s: float
    num_decode_tokens: int
    num_distinct_tokens: int
    """Prompt tokens behind their group's prefix, and whatever a preempted request had."""
    num_prefix_tokens: int
    """Prompt tokens of a group's prefix."""
    num_cached_tokens: int
    """Tokens that requests admitted in this step found computed."""
    num_scheduled: int
    """Requests with tokens in the step."""
    num_running: int
    num_waiting: int
    num_preempted: int
    num_used_blocks: int
    num_held_blocks: int
    """Of those, held for members to come of groups in which nobody runs."""
    num_blocks: int
    """Of the KV cache."""


TRACE_SCHEMA: Final = pa.schema(
    [
        pa.field(field.name, pa.float64() if field.name.endswith("_s") else pa.int64(), False)
        for field in fields(StepRow)
    ]
)


class StepTrace:
    """Writes a row per step; a context manager.

    Rows go to the file some thousands at a time, so that memory doesn't grow with the run. The
    file can be read once it has been closed.

    Raises:
        OSError: the file can't be written.
    """

    def __init__(self, path: Path) -> None:
        self._writer = pq.ParquetWriter(path, TRACE_SCHEMA, compression="zstd")
        self._columns = [array("d" if name.endswith("_s") else "q") for name in TRACE_SCHEMA.names]

    def __enter__(self) -> StepTrace:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        where: TracebackType | None,
    ) -> None:
        self.close()

    def add(self, row: StepRow) -> None:
        """Note a step."""
        for column, name in zip(self._columns, TRACE_SCHEMA.names, strict=True):
            column.append(getattr(row, name))
        if len(self._columns[0]) == _ROWS_IN_MEMORY:
            self._flush()

    def close(self) -> None:
        """Write what is left, and end the file. More rows can't be added; may be repeated."""
        self._flush()
        self._writer.close()

    def _flush(self) -> None:
        if self._columns[0]:
            self._writer.write_table(
                pa.table([pa.array(each) for each in self._columns], schema=TRACE_SCHEMA)
            )
            for column in self._columns:
                del column[:]
