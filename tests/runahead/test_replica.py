"""How a replica's process ends. Its engine is a double here; with vLLM: tests/e2e."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from batchllm_operator.engine import EngineDiedError
from batchllm_operator.engine.replicas import replica
from batchllm_operator.engine.replicas.messages import Channel
from batchllm_operator.errors import SpecError


class Double:
    """Stands in for the engine and what it is asked."""

    closed = 0
    start: Callable[[Channel], None]
    act: Callable[[Channel], None]

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        type(self).start(channel)

    def work(self) -> None:
        type(self).act(self._channel)

    def close(self) -> None:
        Double.closed += 1


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> Iterator[Channel]:
    """The run's end of the socket; `serve` takes the other one."""
    ours, theirs = socket.socketpair()
    monkeypatch.setattr(replica, "die_with_parent", lambda pid: None)
    monkeypatch.setattr(replica, "_Replica", Double)
    monkeypatch.setattr(Double, "closed", 0)
    monkeypatch.setattr(Double, "start", staticmethod(lambda channel: None), raising=False)
    monkeypatch.setattr(Double, "act", staticmethod(lambda channel: None), raising=False)
    monkeypatch.setattr(replica.socket, "socket", lambda fileno: theirs)
    yield Channel(ours)
    ours.close()
    theirs.close()


def serve() -> int:
    return replica.main(["0", str(os.getpid())])


def fails(error: BaseException) -> Any:
    def act(channel: Channel) -> None:
        raise error

    return staticmethod(act)


def speaks(channel: Channel) -> None:
    channel.send("started", {})


def test_a_replica_that_cant_start_says_why(run: Channel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Double, "start", fails(SpecError("no such argument")))
    assert serve() == 1
    assert run.receive() == ("failed", {"kind": "SpecError", "message": "no such argument"})


def test_a_replica_whose_engine_died_says_why(
    run: Channel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Double, "act", fails(EngineDiedError("out of memory", [])))
    assert serve() == 1
    assert run.receive() == ("died", "out of memory")


@pytest.mark.parametrize("when", ["start", "act"])
def test_a_run_that_has_gone_ends_it_quietly(
    run: Channel, monkeypatch: pytest.MonkeyPatch, when: str
) -> None:
    """Because another replica couldn't start, perhaps: that one has said why."""
    monkeypatch.setattr(Double, when, staticmethod(speaks))
    run.close()
    assert serve() == 0
    assert Double.closed == (when == "act")


@pytest.mark.parametrize("error", [SpecError("x"), EngineDiedError("x", [])])
def test_what_cant_be_said_any_more_is_not(
    run: Channel, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    is_dead = isinstance(error, EngineDiedError)
    monkeypatch.setattr(Double, "act" if is_dead else "start", fails(error))
    run.close()
    assert serve() == 0


def test_an_engines_own_os_error_isnt_the_end_of_the_run(
    run: Channel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would look as if the replica had been asked to end, and nobody would know why it did."""
    monkeypatch.setattr(Double, "act", fails(OSError("no space left on device")))
    with pytest.raises(OSError, match="no space left"):
        serve()
