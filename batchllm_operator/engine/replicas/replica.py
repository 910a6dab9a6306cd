"""One replica, run as a module: a process with an engine that serves a run.

    python -m batchllm_operator.engine.replicas.replica DESCRIPTOR PARENT

The socket with that descriptor carries the messages of `engine.replicas.messages`. The process
ends with its parent, with the socket, or when its engine has died.
"""

from __future__ import annotations

import logging
import os
import queue
import socket
import sys
import threading
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any, Final

from batchllm_operator.engine.device_profile import DeviceProfile
from batchllm_operator.engine.lifeline import die_with_parent
from batchllm_operator.engine.protocol import EngineDiedError, EngineRequest
from batchllm_operator.engine.replicas.messages import (
    Channel,
    Started,
    flat,
    group_from_json,
    job_from_json,
)
from batchllm_operator.errors import BatchLLMError, EngineError, MissingLibraryError, RunaheadError
from batchllm_operator.secrets.masking import MaskedStream, Masker
from batchllm_operator.spec import JobSpec
from batchllm_operator.vllm_plugin.runahead.plan import ChainSettings

if TYPE_CHECKING:
    from batchllm_operator.engine.vllm.engine import VLLMEngine

_MEASURED: Final = ((1, 0), (2, 0), (4, 0), (2, 2), (4, 4))
"""Prefill steps to measure: tokens, and cached tokens before them, in quarters of the largest."""
_WARM_UPS: Final = 1


class _ClosedError(Exception):
    """The run has closed the socket."""


class _RunChannel(Channel):
    """The channel to the run, which may have closed it."""

    def send(self, kind: str, content: Any) -> None:
        """As `Channel.send`.

        Raises:
            _ClosedError: the run has closed the socket.
        """
        try:
            super().send(kind, content)
        except OSError as error:
            raise _ClosedError from error


class _Inbox:
    """The run's messages, read by a thread at once, so that the run never waits to send."""

    def __init__(self, channel: Channel) -> None:
        self._messages: queue.SimpleQueue[tuple[str, Any] | None] = queue.SimpleQueue()
        self._channel = channel
        threading.Thread(target=self._read, daemon=True, name="inbox").start()

    def take(self) -> tuple[str, Any]:
        """Wait for the next message.

        Raises:
            _ClosedError: the run has closed the socket.
        """
        message = self._messages.get()
        if message is None:
            raise _ClosedError
        return message

    def take_all(self, *, wait: bool) -> Iterator[tuple[str, Any]]:
        """All messages that have arrived; with `wait`, at least one."""
        if wait:
            yield self.take()
        while not self._messages.empty():
            yield self.take()

    def _read(self) -> None:
        try:
            while True:
                self._messages.put(self._channel.receive())
        except (EOFError, OSError):
            self._messages.put(None)


class _RunProfiles:
    """The run's store of profiles: the run has the lake and its credentials."""

    def __init__(self, channel: Channel, inbox: _Inbox) -> None:
        self._channel, self._inbox = channel, inbox

    def find(self, subject: Mapping[str, str]) -> DeviceProfile | None:
        self._channel.send("find_profile", dict(subject))
        _, found = self._inbox.take()
        return DeviceProfile.model_validate(found) if found is not None else None

    def keep(self, profile: DeviceProfile) -> None:
        self._channel.send("keep_profile", profile.model_dump(mode="json"))


class _Replica:
    """The engine and its requests."""

    def __init__(self, channel: Channel) -> None:
        self._channel, self._inbox = channel, _Inbox(channel)
        _, start = self._inbox.take()
        logging.basicConfig(
            level=logging.WARNING,
            format=f"%(levelname)s: replica {start['rank']}: %(message)s",
            stream=sys.stderr,
        )
        self._settings = ChainSettings(**start["chain"]) if start["chain"] else None
        if start["cores"]:
            os.sched_setaffinity(0, start["cores"])
        try:
            from batchllm_operator.engine.vllm.engine import VLLMEngine  # seconds, on those cores
        except ModuleNotFoundError as error:
            raise MissingLibraryError.of(error, "vLLM") from error
        except ImportError as error:
            raise EngineError(f"vLLM can't be imported ({error})") from error

        job = replace(job_from_json(start["job"]), profiles=_RunProfiles(channel, self._inbox))
        spec = JobSpec.model_validate(start["spec"])
        self._engine: VLLMEngine = VLLMEngine(spec, job, self._settings)
        self._channel.send("started", asdict(self._started()))

    def work(self) -> None:
        """Serve until the run closes the socket."""
        calls: dict[str, Callable[[Any], None]] = {
            "requests": self._add,
            "prefill": self._prefill,
            "measure": self._measure,
        }
        while True:
            for kind, content in self._inbox.take_all(wait=self._engine.num_in_flight == 0):
                calls[kind](content)
            if self._engine.num_in_flight and (outputs := self._engine.step()):
                self._channel.send("outputs", [flat(output) for output in outputs])

    def close(self) -> None:
        self._engine.close()

    def _started(self) -> Started:
        device, most = self._engine.device_name, self._engine.max_in_flight
        if self._settings is None:
            return Started(most, None, None, device)
        from batchllm_operator.vllm_plugin.runahead.phase import chain_limits, open_chain

        limits = chain_limits(self._engine.llm_engine)
        try:
            rate = open_chain(self._engine.llm_engine).link_bytes_per_s
        except RunaheadError as error:
            return Started(most, limits, None, device, str(error))
        return Started(most, limits, rate, device)

    def _add(self, requests: Sequence[Mapping[str, Any]]) -> None:
        refusals = [self._engine.add(EngineRequest(**request)) for request in requests]
        if refused := [flat(output) for output in refusals if output is not None]:
            self._channel.send("outputs", refused)

    def _prefill(self, groups: Sequence[Mapping[str, Any]]) -> None:
        from batchllm_operator.vllm_plugin.runahead.phase import run_prefill_phase

        with self._engine.unpaced() as engine:
            try:
                outcomes = run_prefill_phase(engine, [group_from_json(each) for each in groups])
            except BatchLLMError as error:
                self._channel.send("prefilled", {"computed": {}, "failures": [str(error)]})
                return
        self._channel.send(
            "prefilled",
            {
                "computed": {each.group_id: each.num_computed_tokens for each in outcomes},
                "failures": sorted({each.failure for each in outcomes if each.failure}),
            },
        )

    def _measure(self, repetitions: int) -> None:
        """Time prefill steps of made-up prompts; (tokens, cached before them, median seconds)."""
        from batchllm_operator.vllm_plugin.runahead.phase import chain_limits
        from batchllm_operator.vllm_plugin.runahead.timing import time_prefill

        with self._engine.unpaced() as engine:
            limits = chain_limits(engine)
            quarter = min(limits.max_step_tokens, (limits.max_model_len - 1) // 2) // 4
            quarter = min(quarter, limits.num_blocks * limits.block_size // 16)
            quarter -= quarter % limits.block_size
            sizes = [(a * quarter, b * quarter) for a, b in _MEASURED] if quarter else []
            steps = time_prefill(engine, sizes, repetitions, _WARM_UPS)
        self._channel.send("measured", steps)


def main(argv: Sequence[str]) -> int:
    """Serve until the socket is closed; returns 0 then, 1 after a failure, which was reported."""
    descriptor, parent_pid = map(int, argv)
    die_with_parent(parent_pid)
    if not sys.warnoptions:  # as in the run itself
        warnings.simplefilter("ignore")
    try:
        return _serve(_RunChannel(socket.socket(fileno=descriptor)))
    except _ClosedError:
        return 0


def _serve(channel: _RunChannel) -> int:
    try:
        replica = _Replica(channel)
    except BatchLLMError as error:
        channel.send("failed", {"kind": type(error).__name__, "message": str(error)})
        return 1
    try:
        replica.work()
    except _ClosedError:
        replica.close()
        return 0
    except EngineDiedError as error:
        channel.send("died", str(error))
        return 1
    raise AssertionError("never ends by itself")


if __name__ == "__main__":
    masker = Masker.of(os.environ)
    with (
        redirect_stdout(MaskedStream(sys.stdout, masker)),
        redirect_stderr(MaskedStream(sys.stderr, masker)),
    ):
        try:
            status = main(sys.argv[1:])
        except Exception:  # noqa: BLE001  Python itself would print it unmasked
            traceback.print_exc()
            status = 1
    sys.exit(status)
