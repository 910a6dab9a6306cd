"""The parts of a shard with requests in the engine, whose finished outputs are spilled."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Final

from batchllm_operator.engine import EngineOutput
from batchllm_operator.shards.spills import SpilledPart
from batchllm_operator.stored_plan.counts import Counts

SPILL_ROWS: Final = 1_000
SPILL_S: Final = 20.0
"""Finished rows of open parts are spilled when there are so many that no file holds, or one has
waited for so long. `kill -9` loses no more than that, and nothing that is 30 s old: the time is
looked at every few seconds."""

Outputs = Mapping[int, Sequence[EngineOutput]]
"""By part_idx."""


@dataclass(slots=True)
class OpenPart(SpilledPart):
    """A part that isn't written yet, with the rows of all of its requests."""

    new: list[EngineOutput] = field(default_factory=list)
    """Outputs that no spill holds."""

    @classmethod
    def of(cls, row_idxs: Mapping[int, list[int]], spilled: SpilledPart) -> OpenPart:
        """A part with what earlier attempts have spilled, and the rows of its other requests."""
        rows = {**spilled.row_idxs, **row_idxs}
        return cls(dict(spilled.outputs), rows, spilled.engine_s)

    @property
    def is_finished(self) -> bool:
        return len(self.outputs) == len(self.row_idxs)

    @property
    def stored_counts(self) -> Counts:
        """Of the outputs that spills hold."""
        new = {each.request_idx for each in self.new}
        stored = ((idx, each) for idx, each in self.outputs.items() if idx not in new)
        return Counts.of((each, len(self.row_idxs[idx])) for idx, each in stored)


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
        self._is_spilling = False
        self._lock = threading.Lock()
        """For what changes, or goes through, parts and outputs."""

    def __len__(self) -> int:
        return len(self._parts)

    def __getitem__(self, part_idx: int) -> OpenPart:
        return self._parts[part_idx]

    def __iter__(self) -> Iterator[OpenPart]:
        return iter(self._parts.values())

    def open(self, part_idx: int, part: OpenPart) -> None:
        with self._lock:
            self._parts[part_idx] = part

    def add(self, part_idx: int, output: EngineOutput) -> int:
        """Add an output to its part; returns its number of rows."""
        part = self._parts[part_idx]
        num_rows = len(part.row_idxs[output.request_idx])
        with self._lock:
            part.new.append(output)
            part.outputs[output.request_idx] = output
            if output.is_served:
                self._suspects.clear()
            else:
                self._suspects[output.request_idx] = num_rows
            self._num_new_rows += num_rows
            if self._new_since is None:
                self._new_since = self._clock()
        return num_rows

    def close(self, part_idx: int) -> None:
        """Remove a part that is written."""
        with self._lock:
            part = self._parts.pop(part_idx)
            self._num_new_rows -= sum(len(part.row_idxs[each.request_idx]) for each in part.new)
            if not any(each.new for each in self):
                self._num_new_rows, self._new_since = 0, None

    def clear(self) -> None:
        with self._lock:
            self._parts.clear()
            self._num_new_rows, self._new_since = 0, None

    @property
    def num_suspect_rows(self) -> int:
        """Rows that the engine couldn't serve, since it has served one: it may be at fault."""
        return sum(self._suspects.values())

    @contextmanager
    def due_spill(self) -> Iterator[bool]:
        """Whether to spill now: it is time, and no other thread is at it while this is open."""
        with self._lock:
            since = self._new_since
            has_waited = since is not None and self._clock() - since >= SPILL_S
            is_due = (has_waited or self._num_new_rows >= SPILL_ROWS) and not self._is_spilling
            self._is_spilling |= is_due
        try:
            yield is_due
        finally:
            if is_due:
                self._is_spilling = False

    def new_outputs(self, *, with_suspects: bool) -> tuple[Outputs, Mapping[int, list[int]]]:
        """The outputs that no spill holds, and the rows of their requests.

        Args:
            with_suspects: whether to include the last ones if the engine couldn't serve them.
        """
        found: dict[int, list[EngineOutput]] = {}
        rows: dict[int, list[int]] = {}
        with self._lock:
            left_out = {} if with_suspects else self._suspects
            for part_idx, part in self._parts.items():
                for output in part.new:
                    if output.request_idx not in left_out:
                        found.setdefault(part_idx, []).append(output)
                        rows[output.request_idx] = part.row_idxs[output.request_idx]
        return found, rows

    def spilled(self, outputs: Outputs, engine_s: float) -> None:
        """Note that a spill holds these outputs, and `engine_s` seconds, which its parts share."""
        num_outputs = sum(map(len, outputs.values()))
        with self._lock:
            for part_idx, spilled in outputs.items():
                if (part := self._parts.get(part_idx)) is None:  # written meanwhile
                    continue
                stored = {each.request_idx for each in spilled}
                part.engine_s += engine_s * len(spilled) / num_outputs
                part.new = [each for each in part.new if each.request_idx not in stored]
            new = ((part, each) for part in self for each in part.new)
            self._num_new_rows = sum(len(part.row_idxs[each.request_idx]) for part, each in new)
            self._new_since = self._clock() if self._num_new_rows else None
