"""A row per scheduler step, in a Parquet file."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields
from operator import attrgetter
from pathlib import Path
from typing import Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

_log = logging.getLogger(__name__)
_ROWS_IN_MEMORY: Final = 1 << 14
CHUNK_SIZE_KEY: Final = b"batchllm.chunk_size"
"""Key in the file's metadata: most tokens of a step, in decimal digits."""


@dataclass(frozen=True, slots=True)
class StepRow:
    """One step, counted after it has been scheduled and before it runs."""

    step: int
    start_s: float
    """When scheduling began, since the first step."""
    scheduling_s: float
    num_decode_tokens: int
    num_distinct_tokens: int
    """Prompt tokens after their group's prefix, and recomputed tokens of preempted requests."""
    num_prefix_tokens: int
    """Prompt tokens of a group's prefix."""
    num_cached_tokens: int
    """Tokens of requests admitted in this step that were in the cache."""
    num_scheduled: int
    """Requests with tokens in the step."""
    num_running: int
    num_waiting: int
    num_preempted: int
    num_used_blocks: int
    num_held_blocks: int
    """Used blocks held for future members of groups without a running one."""
    num_blocks: int
    """Blocks of the KV cache."""


TRACE_SCHEMA: Final = pa.schema(
    [
        pa.field(field.name, pa.float64() if field.name.endswith("_s") else pa.int64(), False)
        for field in fields(StepRow)
    ]
)


def in_valley(
    num_tokens: NDArray[Any], num_waiting: NDArray[Any], chunk_size: int
) -> NDArray[np.bool_]:
    """Whether each step is a valley: under half of the chunk size while requests wait (Fig. 2).

    Args:
        num_tokens: of each step, [num_steps].
        num_waiting: requests that still waited then, [num_steps].
        chunk_size: most tokens of a step.
    """
    is_valley: NDArray[np.bool_] = (2 * num_tokens < chunk_size) & (num_waiting > 0)
    return is_valley


class StepTrace:
    """Writes a row per step. A fault of the disk costs a warning and the trace, not the run.

    Rows are written some thousands at a time. The file is readable once it has been closed; its
    metadata have the `chunk_size`, the most tokens of a step.
    """

    def __init__(self, path: Path, chunk_size: int) -> None:
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
