"""Progress: what a log and what a terminal gets to see."""

import fcntl
import io
import os
import pty
import struct
import termios
from contextlib import suppress

import pytest

from batchllm_operator.progress import Progress


class Log(io.StringIO):
    """A stream that isn't a terminal, beside a clock that the test sets."""

    now_s = 100.0

    def progress(self, label: str, total: int, **options: object) -> Progress:
        return Progress(label, total, stream=self, clock=lambda: self.now_s, **options)

    @property
    def lines(self) -> list[str]:
        return self.getvalue().splitlines()


@pytest.fixture
def log() -> Log:
    return Log()


def test_plain_lines_come_at_intervals(log: Log) -> None:
    with log.progress("shard 0", 100, line_interval_s=10) as progress:
        for _ in range(50):  # 25 s
            log.now_s += 0.5
            progress.advance(1)
    assert log.lines == [
        "shard 0: 100 rows",
        "shard 0: 20/100 rows (20 %), 2.0 rows/s, ETA 40 s",
        "shard 0: 40/100 rows (40 %), 2.0 rows/s, ETA 30 s",
        "shard 0: 50/100 rows (50 %), 2.0 rows/s, ETA 25 s",
    ]


def test_the_last_line_stands_once_when_it_was_due_anyway(log: Log) -> None:
    with log.progress("shard 0", 2, line_interval_s=10) as progress:
        for _ in range(2):
            log.now_s += 20
            progress.advance(1)
        log.now_s += 1
    assert log.lines == [
        "shard 0: 2 rows",
        "shard 0: 1/2 rows (50 %), 0.1 rows/s, ETA 20 s",
        "shard 0: 2/2 rows (100 %), 0.0 rows/s, took 41 s",
    ]


@pytest.mark.parametrize(
    ("total", "options", "lines"),
    [
        (0, {}, ["s: 0 rows", "s: 0/0 rows (100 %), took 0 s"]),
        (1, {"unit": "step sizes"}, ["s: 1 step size", "s: 0/1 step sizes (0 %)"]),
        (3, {"unit": "keys", "announce": False}, ["s: 0/3 keys (0 %)"]),
    ],
)
def test_a_job_without_news_has_its_first_and_last_line(
    log: Log, total: int, options: dict[str, object], lines: list[str]
) -> None:
    with log.progress("s", total, **options):
        pass
    assert len(log.lines) == len(lines)
    assert all(map(str.startswith, log.lines, lines)), log.lines


def test_the_last_line_tells_how_long_it_took_or_how_far_an_interrupted_run_came(log: Log) -> None:
    with log.progress("shard 1", 6, unit="parts") as progress:
        log.now_s += 3725
        progress.advance(6, "12 tokens/s")
    end = "6/6 parts (100 %), 0.0 parts/s, 12 tokens/s, took 1 h 02 min"
    assert log.lines[-1].endswith(end)
    with suppress(KeyboardInterrupt), log.progress("s", 4) as progress:
        log.now_s += 2
        progress.advance(1)
        raise KeyboardInterrupt
    assert log.lines[-1] == "s: 1/4 rows (25 %), 0.5 rows/s, ETA 6 s"


def test_the_total_may_turn_out_otherwise(log: Log) -> None:
    with log.progress("s", 10) as progress:
        log.now_s += 2
        progress.expect(8)
        progress.advance(4)
        assert progress.line() == "s: 4/8 rows (50 %), 2.0 rows/s, ETA 2 s"
        progress.expect(0)
    assert log.lines[-1] == "s: 4/4 rows (100 %), 2.0 rows/s, took 2 s"


@pytest.mark.parametrize("columns", [0, 1, 120])
def test_a_terminal_of_any_width_gets_a_bar_that_ends_full(columns: int) -> None:
    """Also when rows were left out."""
    ours, its = pty.openpty()
    fcntl.ioctl(its, termios.TIOCSWINSZ, struct.pack("HHHH", columns, columns, 0, 0))
    with os.fdopen(its, "w") as stream, pytest.MonkeyPatch.context() as patch:
        patch.delenv("COLUMNS", raising=False)
        patch.setattr("sys.stderr", stream)
        with Progress("shard 0", 10) as progress:
            progress.advance(4, "7 tokens/s")
            progress.expect(0)
    shown = b""
    with os.fdopen(ours, "rb", buffering=0) as terminal, suppress(OSError):  # its other end closed
        while some := terminal.read(1 << 16):
            shown += some
    first, *_, last = filter(None, map(str.strip, shown.decode().split("\r")))
    assert "shard 0" in first and "shard 0: 100%" in last
    assert columns != 120 or ("0/10" in first and "4/4" in last)
