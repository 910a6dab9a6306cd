"""The unfinished parts of a shard, whose finished outputs are spilled."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from typing import Final

from batchllm_operator.engine import EngineOutput
from batchllm_operator.shards.spills import OpenPart

SPILL_ROWS: Final = 1_000
SPILL_S: Final = 20.0
"""Finished rows of open parts are spilled when there are so many that no file holds, or one has
waited for so long. `kill -9` loses no more than that, and nothing that is 30 s old: the time is
looked at every few seconds."""

Outputs = Mapping[int, list[EngineOutput]]
"""By part_idx."""


class OpenParts:
    """Parts with requests in the engine or with outputs in spills; of use to two threads.

    Args:
        spilled: what earlier attempts have finished of unfinished parts, by part_idx.
        clock: monotonic seconds.
    """

    def __init__(
        self, spilled: Mapping[int, OpenPart], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._clock = clock
        self._parts = dict(spilled)
        self._in_engine: set[int] = set()
        """Parts that the engine works on."""
        self._part_of: dict[int, int] = {}
        """request_idx -> part_idx, for requests in the engine."""
        self._new: dict[int, int] = {}
        """request_idx -> number of rows, for outputs that no spill holds."""
        self._new_since: float | None = None
        """When the first of them was added."""
        self._suspects: dict[int, int] = {}
        """Requests that the engine couldn't serve, since it has served one, with their rows."""
        self._lock = threading.Lock()

    def items(self) -> list[tuple[int, OpenPart]]:
        """Each part_idx with its part."""
        return list(self._parts.items())

    def __contains__(self, output: EngineOutput) -> bool:
        """Whether the output's request is from here."""
        return output.request_idx in self._part_of

    @property
    def num_in_engine(self) -> int:
        return len(self._in_engine)

    @property
    def num_suspect_rows(self) -> int:
        """Rows that the engine couldn't serve, since it has served one: it may be at fault."""
        return sum(self._suspects.values())

    def feed(self, part_idx: int, row_idxs: Mapping[int, list[int]]) -> None:
        """Note that the engine gets these requests of a part; `row_idxs` are their rows."""
        with self._lock:
            self._parts.setdefault(part_idx, OpenPart()).row_idxs.update(row_idxs)
            self._in_engine.add(part_idx)
            self._part_of.update(dict.fromkeys(row_idxs, part_idx))

    def add(self, output: EngineOutput) -> tuple[int, tuple[int, OpenPart] | None]:
        """Add an output from the engine.

        Returns:
            Its number of rows, and its part_idx with the part if that has all outputs now.
        """
        request_idx = output.request_idx
        with self._lock:
            part_idx = self._part_of.pop(request_idx)
            part = self._parts[part_idx]
            num_rows = len(part.row_idxs[request_idx])
            part.outputs[request_idx] = output
            self._new[request_idx] = num_rows
            if self._new_since is None:
                self._new_since = self._clock()
            if output.is_served:
                self._suspects.clear()
            else:
                self._suspects[request_idx] = num_rows
        is_whole = len(part.outputs) == len(part.row_idxs)
        return num_rows, (part_idx, part) if is_whole else None

    def close(self, part_idx: int) -> None:
        """Remove a part that is written."""
        with self._lock:
            for request_idx in self._parts.pop(part_idx).outputs:
                self._new.pop(request_idx, None)
            self._in_engine.discard(part_idx)
            if not self._new:
                self._new_since = None

    def stop(self) -> None:
        """Forget what no file holds, and what the engine works on."""
        with self._lock:
            for part in self._parts.values():
                part.outputs = {i: out for i, out in part.outputs.items() if i not in self._new}
            self._new.clear()
            self._in_engine.clear()
            self._new_since = None

    @property
    def is_spill_due(self) -> bool:
        with self._lock:
            since, num_new_rows = self._new_since, sum(self._new.values())
        has_waited = since is not None and self._clock() - since >= SPILL_S
        return has_waited or num_new_rows >= SPILL_ROWS

    def new_outputs(self, *, with_suspects: bool) -> tuple[Outputs, Mapping[int, list[int]]]:
        """The outputs that no spill holds, and the rows of their requests.

        Args:
            with_suspects: whether to include the last ones if the engine couldn't serve them.
        """
        outputs: dict[int, list[EngineOutput]] = {}
        rows: dict[int, list[int]] = {}
        with self._lock:
            chosen = self._new.keys() - (() if with_suspects else self._suspects.keys())
            for part_idx in self._in_engine if chosen else ():
                part = self._parts[part_idx]
                for request_idx, output in part.outputs.items():
                    if request_idx in chosen:
                        outputs.setdefault(part_idx, []).append(output)
                        rows[request_idx] = part.row_idxs[request_idx]
        return outputs, rows

    def spilled(self, outputs: Outputs, engine_s: float) -> None:
        """Note that a spill holds these outputs, and `engine_s` seconds, which its parts share."""
        num_outputs = sum(map(len, outputs.values()))
        with self._lock:
            for part_idx, stored in outputs.items():
                if (part := self._parts.get(part_idx)) is None:  # written meanwhile
                    continue
                part.engine_s += engine_s * len(stored) / num_outputs
                for output in stored:
                    self._new.pop(output.request_idx, None)
            self._new_since = self._clock() if self._new else None
