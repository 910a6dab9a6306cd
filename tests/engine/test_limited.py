"""Attempts in a process of their own."""

import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from batchllm_operator.engine import limited


def fine() -> None:
    for stream in (1, 2):
        os.write(stream, b"not shown")


def wrong() -> None:
    raise ValueError("wrong")


def endless() -> None:
    time.sleep(3600)


def busy() -> None:
    while True:
        pass


def greedy() -> None:
    bytearray(2 * limited.MEMORY_LIMIT)


def deadly() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.parametrize(
    ("attempt", "reason"),
    [
        (wrong, "wrong"),
        (endless, "it takes more than 0.5 s"),
        (greedy, "it takes more than 4 GiB of memory"),
        (deadly, "it ends its process, or takes more than 4 GiB of memory"),
        (lambda: sys.exit(3), "it ends its process, or takes more than 4 GiB of memory"),
    ],
)
def test_the_first_attempt_that_fails_is_named_with_its_reason(
    attempt: Callable[[], object], reason: str, capfd: pytest.CaptureFixture[str]
) -> None:
    attempts: list[Callable[[], object]] = [fine, attempt, wrong]
    assert limited.first_failure(attempts, 0.5, str) == (1, reason)
    assert capfd.readouterr() == ("", "")


def test_an_attempt_may_take_so_much_cpu_whatever_the_clock_says(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(limited, "_CLOCK_FACTOR", 1000)  # busy machines are slow
    assert limited.first_failure([busy], 0.5, str) == (0, "it takes more than 0.5 s")


def test_attempts_that_work_leave_no_process() -> None:
    children = Path(f"/proc/self/task/{threading.get_native_id()}/children")
    before = children.read_text()
    assert limited.first_failure([fine, fine], 60, str) is None
    assert children.read_text() == before
