"""Progress with ETA: a bar on a terminal, periodic plain lines anywhere else."""

from __future__ import annotations

import os
import shutil
import sys
import time
from collections.abc import Callable
from typing import Final, TextIO

from tqdm import tqdm

from batchllm_operator.amounts import counted

LINE_INTERVAL_S: Final = 10.0
"""Between plain lines."""


class Progress:
    """Counts work done towards a total, in a unit (plural), and shows an ETA on stderr.

    Plain lines come at an interval, and at the start if it is to be announced; the clock gives
    monotonic seconds.
    """

    def __init__(
        self,
        label: str,
        total: int,
        *,
        unit: str = "rows",
        announce: bool = True,
        stream: TextIO | None = None,
        line_interval_s: float | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._label, self._total, self._unit, self._announce = label, total, unit, announce
        self._done = 0
        self._note: str | Callable[[], str] = ""
        self._stream = stream if stream is not None else sys.stderr
        self._clock = clock
        self._line_interval_s = LINE_INTERVAL_S if line_interval_s is None else line_interval_s
        self._started_at = self._last_line_at = clock()
        self._bar: tqdm[None] | None = None
        if self._stream.isatty():
            size = _assumed_size(self._stream)
            self._bar = tqdm(total=total, desc=label, unit=f" {unit}", file=self._stream, **size)

    def __enter__(self) -> Progress:
        if self._bar is None and self._announce:
            total = counted(self._total, self._unit.removesuffix("s"), self._unit)
            self._print(f"{self._label}: {total}")
        return self

    def __exit__(self, *error: object) -> None:
        if self._bar is not None:
            self._bar.close()
        else:
            self._print(self.line())

    def advance(self, count: int, note: str | Callable[[], str] = "") -> None:
        """Count `count` more as done; `note` (such as tokens/s) is shown after the numbers.

        One that takes time to make is a function, called when it is shown.
        """
        self._done += count
        self._note = note or self._note
        if self._bar is not None:
            self._bar.set_postfix_str(self._shown_note(), refresh=False)
            self._bar.update(count)
        elif self._done == self._total:
            self._note = self._shown_note()  # `__exit__` prints the last line
        elif self._clock() - self._last_line_at >= self._line_interval_s:
            self._last_line_at = self._clock()
            self._print(self.line())

    def expect(self, count: int) -> None:
        """Set the total to what is done and `count` more."""
        self._total = self._done + count
        if self._bar is not None:
            self._bar.total = self._total
            self._bar.refresh()

    def line(self) -> str:
        """The current state in words."""
        elapsed_s = self._clock() - self._started_at
        speed = self._done / elapsed_s if elapsed_s > 0 else 0.0
        percent = 100 * self._done / self._total if self._total else 100.0
        parts = [f"{self._done}/{self._total} {self._unit} ({percent:.0f} %)"]
        if speed > 0:
            parts.append(f"{speed:,.1f} {self._unit}/s")
        if note := self._shown_note():
            parts.append(note)
        if self._done < self._total:
            eta = duration((self._total - self._done) / speed) if speed > 0 else "unknown"
            parts.append(f"ETA {eta}")
        else:
            parts.append(f"took {duration(elapsed_s)}")
        return f"{self._label}: {', '.join(parts)}"

    def _shown_note(self) -> str:
        return self._note if isinstance(self._note, str) else self._note()

    def _print(self, text: str) -> None:
        print(text, file=self._stream, flush=True)


def _assumed_size(stream: TextIO) -> dict[str, int]:
    """For a terminal that says it has no columns or lines, on which tqdm would show nothing."""
    try:
        size = os.get_terminal_size(stream.fileno())
    except (OSError, ValueError):  # not a terminal after all, or closed
        return {}
    assumed = shutil.get_terminal_size()
    columns = {} if size.columns > 1 else {"ncols": assumed.columns}
    return columns if size.lines > 1 else columns | {"nrows": assumed.lines}


def duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours:,} h {minutes:02d} min"
    return f"{minutes} min {rest:02d} s" if minutes else f"{rest} s"
