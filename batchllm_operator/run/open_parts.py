"""The parts of a shard with requests in the engine, whose finished outputs are spilled."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Final

from batchllm_operator.engine import EngineOutput
from batchllm_operator.shards.spills import OpenPart

SPILL_ROWS: Final = 1_000
SPILL_S: Final = 20.0
"""Finished rows of open parts are spilled when there are so many that no file holds, or one has
waited for so long. `kill -9` loses no more than that, and nothing that is 30 s old: the time is
looked at every few seconds."""

Outputs = Mapping[int, Sequence[EngineOutput]]
"""By part_idx."""


class OpenParts:
    """Parts by part_idx, and when to spill what they hold; of use to two threads.

    Args:
        clock: monotonic seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._parts: dict[int, OpenPart] = {}
        self._num_new_rows = 0
        """Added since the last spill."""
        self._new_since: float | None = None
        """When the first of them was added."""
        self._suspects: dict[int, int] = {}
        """Their requests, with the rows of each; see `num_suspect_rows`."""
        self._lock = threading.Lock()
        """For what changes, or goes through, parts and outputs."""

    def __len__(self) -> int:
        return len(self._parts)

    def __iter__(self) -> Iterator[OpenPart]:
        return iter(self._parts.values())

    def open(self, part_idx: int, part: OpenPart) -> None:
        with self._lock:
            self._parts[part_idx] = part

    def add(self, part_idx: int, output: EngineOutput) -> tuple[int, OpenPart | None]:
        """Add an output; returns its number of rows, and its part if all outputs are there."""
        part, request_idx = self._parts[part_idx], output.request_idx
        num_rows = len(part.row_idxs[request_idx])
        with self._lock:
            part.outputs[request_idx] = part.new[request_idx] = output
            if output.is_served:
                self._suspects.clear()
            else:
                self._suspects[request_idx] = num_rows
            self._num_new_rows += num_rows
            if self._new_since is None:
                self._new_since = self._clock()
        return num_rows, part if len(part.outputs) == len(part.row_idxs) else None

    def close(self, part_idx: int) -> None:
        """Remove a part that is written; a part that isn't open is none of these."""
        with self._lock:
            self._parts.pop(part_idx, None)
            self._count_new(self._new_since)

    def clear(self) -> None:
        with self._lock:
            self._parts.clear()
            self._count_new(None)

    @property
    def num_suspect_rows(self) -> int:
        """Rows that the engine couldn't serve, since it has served one: it may be at fault."""
        return sum(self._suspects.values())

    @property
    def is_spill_due(self) -> bool:
        since = self._new_since
        has_waited = since is not None and self._clock() - since >= SPILL_S
        return has_waited or self._num_new_rows >= SPILL_ROWS

    def new_outputs(self, *, with_suspects: bool) -> tuple[Outputs, Mapping[int, list[int]]]:
        """The outputs that no spill holds, and the rows of their requests.

        Args:
            with_suspects: whether to include the last ones if the engine couldn't serve them.
        """
        outputs: dict[int, list[EngineOutput]] = {}
        rows: dict[int, list[int]] = {}
        with self._lock:
            left_out = {} if with_suspects else self._suspects
            for part_idx, part in self._parts.items():
                for request_idx, output in part.new.items():
                    if request_idx not in left_out:
                        outputs.setdefault(part_idx, []).append(output)
                        rows[request_idx] = part.row_idxs[request_idx]
        return outputs, rows

    def spilled(self, outputs: Outputs, engine_s: float) -> None:
        """Note that a spill holds these outputs, and `engine_s` seconds, which its parts share."""
        num_outputs = sum(map(len, outputs.values()))
        with self._lock:
            for part_idx, spilled in outputs.items():
                if (part := self._parts.get(part_idx)) is None:  # written meanwhile
                    continue
                part.engine_s += engine_s * len(spilled) / num_outputs
                for output in spilled:
                    part.new.pop(output.request_idx, None)
            self._count_new(self._clock())

    def _count_new(self, since: float | None) -> None:
        new = ((part, request_idx) for part in self for request_idx in part.new)
        self._num_new_rows = sum(len(part.row_idxs[request_idx]) for part, request_idx in new)
        self._new_since = since if self._num_new_rows else None
