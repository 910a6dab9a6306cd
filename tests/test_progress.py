"""Progress: what a log and what a terminal gets to see."""

from __future__ import annotations

import fcntl
import io
import os
import pty
import struct
import termios
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

import pytest

from batchllm_operator.progress import Progress


@dataclass
class Clock:
    """A clock that the test sets."""

    now_s: float = 100.0

    def __call__(self) -> float:
        return self.now_s


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def lines(stream: io.StringIO) -> list[str]:
    return stream.getvalue().splitlines()


def test_plain_lines_come_at_intervals() -> None:
    clock, stream = Clock(), io.StringIO()
    with Progress("shard 0", 100, stream=stream, clock=clock, line_interval_s=10) as progress:
        for _ in range(50):  # 25 s
            clock.now_s += 0.5
            progress.advance(1)
    assert lines(stream) == [
        "shard 0: 100 rows",
        "shard 0: 20/100 rows (20 %), 2.0 rows/s, ETA 40 s",
        "shard 0: 40/100 rows (40 %), 2.0 rows/s, ETA 30 s",
        "shard 0: 50/100 rows (50 %), 2.0 rows/s, ETA 25 s",
    ]


def test_what_ends_soon_need_not_be_announced() -> None:
    stream = io.StringIO()
    with Progress("sort keys", 3, unit="keys", announce=False, stream=stream) as progress:
        progress.advance(3)
    [line] = lines(stream)
    assert line.startswith("sort keys: 3/3 keys (100 %)")


def test_the_last_line_stands_once_when_it_was_due_anyway() -> None:
    clock, stream = Clock(), io.StringIO()
    with Progress("shard 0", 2, stream=stream, clock=clock, line_interval_s=10) as progress:
        for _ in range(2):
            clock.now_s += 20
            progress.advance(1)
        clock.now_s += 1
    assert lines(stream) == [
        "shard 0: 2 rows",
        "shard 0: 1/2 rows (50 %), 0.1 rows/s, ETA 20 s",
        "shard 0: 2/2 rows (100 %), 0.0 rows/s, took 41 s",
    ]


def test_the_last_line_tells_how_long_it_took() -> None:
    clock, stream = Clock(), io.StringIO()
    with Progress("shard 1", 6, unit="parts", stream=stream, clock=clock) as progress:
        clock.now_s += 3725
        progress.advance(6, "12 tokens/s")
    assert lines(stream)[-1].endswith(
        "6/6 parts (100 %), 0.0 parts/s, 12 tokens/s, took 1 h 02 min"
    )


def test_an_interrupted_run_says_how_far_it_came() -> None:
    clock, stream = Clock(), io.StringIO()
    try:
        with Progress("s", 4, stream=stream, clock=clock) as progress:
            clock.now_s += 2
            progress.advance(1)
            raise KeyboardInterrupt
    except KeyboardInterrupt:
        pass
    assert lines(stream)[-1] == "s: 1/4 rows (25 %), 0.5 rows/s, ETA 6 s"


def test_nothing_to_do_is_no_division_by_zero() -> None:
    stream = io.StringIO()
    with Progress("s", 0, stream=stream, clock=Clock()):
        pass
    assert lines(stream)[-1] == "s: 0/0 rows (100 %), took 0 s"


def test_the_total_may_turn_out_otherwise() -> None:
    clock, stream = Clock(), io.StringIO()
    with Progress("s", 10, stream=stream, clock=clock) as progress:
        clock.now_s += 2
        progress.expect(8)
        progress.advance(4)
        assert progress.line() == "s: 4/8 rows (50 %), 2.0 rows/s, ETA 2 s"
        progress.expect(0)
    assert lines(stream)[-1] == "s: 4/4 rows (100 %), 2.0 rows/s, took 2 s"


def test_a_terminal_gets_a_bar() -> None:
    stream = Terminal()
    with Progress("shard 0", 4, stream=stream) as progress:
        progress.advance(3, "7 tokens/s")
        progress.advance(1)
    shown = stream.getvalue()
    assert "\r" in shown
    assert "shard 0" in shown
    assert "0/4" in shown.split("\r")[1]
    assert "4/4" in shown.split("\r")[-1]
    assert "100%" in shown.split("\r")[-1]


def test_a_bar_ends_full_when_rows_were_left_out() -> None:
    stream = Terminal()
    with Progress("read", 10, stream=stream) as progress:
        progress.advance(4)
        progress.expect(0)
    assert "4/4" in stream.getvalue().split("\r")[-1]


def shown_on(columns: int, show: Callable[[], None]) -> str:
    """What `show` puts on stderr, which is a terminal that says it has so many columns."""
    ours, its = pty.openpty()
    fcntl.ioctl(its, termios.TIOCSWINSZ, struct.pack("HHHH", columns, columns, 0, 0))
    with os.fdopen(its, "w") as stream, pytest.MonkeyPatch.context() as patch:
        patch.delenv("COLUMNS", raising=False)
        patch.setattr("sys.stderr", stream)
        show()
    found = b""
    with os.fdopen(ours, "rb", buffering=0) as terminal, suppress(OSError):  # its other end closed
        while some := terminal.read(1 << 16):
            found += some
    return found.decode()


@pytest.mark.parametrize("columns", [0, 1, 120])
def test_a_terminal_of_width_0_gets_a_bar_as_any_other(columns: int) -> None:
    def show() -> None:
        with Progress("shard 0", 4) as progress:
            progress.advance(4)

    assert "shard 0: 100%" in shown_on(columns, show)
