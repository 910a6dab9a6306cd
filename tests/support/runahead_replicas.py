"""Processes that tests use as replicas of a chain, one after another in different roles."""

import json
import os
import uuid
from collections.abc import Sequence
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from support.demo_job import OFFLINE
from support.fork_server import ForkedProcess, ForkServer

_CALL_S = 240.0
"""After which a replica is taken to hang; tests of time-outs set their own, of seconds."""


class ReplicaError(Exception):
    """What a replica raised."""

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(f"{kind}: {message}")
        self.kind, self.message = kind, message


class Replica:
    """One process. A call that it doesn't answer in time, or dies at, is an `EOFError`."""

    def __init__(self, process: ForkedProcess, calls: Connection, errors: Path) -> None:
        self.process, self._calls, self._errors = process, calls, errors

    def ask(self, method: str, *args: Any, **options: Any) -> None:
        self._calls.send((method, args, options))

    def answer(self) -> Any:
        """Of the call before.

        Raises:
            ReplicaError: the replica raised.
            EOFError: it died, or hangs.
        """
        if not self._calls.poll(_CALL_S):
            self.process.kill()
            raise EOFError("no answer")
        try:
            kind, *rest = self._calls.recv()
        except (EOFError, ConnectionResetError) as error:
            raise EOFError(f"it died: {self._errors.read_text()[-2000:]}") from error
        if kind == "error":
            raise ReplicaError(*rest)
        return rest[0]

    def outcome(self) -> Any:
        """Of the call before: the answer, or the error."""
        try:
            return self.answer()
        except (ReplicaError, EOFError) as error:
            return error

    def call(self, method: str, *args: Any, **options: Any) -> Any:
        self.ask(method, *args, **options)
        return self.answer()

    def end(self) -> None:
        """Let it end by itself."""
        self._calls.send(None)


class Replicas:
    """As many processes as were asked for at a time; those that died are replaced."""

    def __init__(self, folder: Path, model: Path, engines: ForkServer) -> None:
        self._folder, self._model, self._engines = folder, model, engines
        self._alive: list[Replica] = []
        self._running: object = None

    @property
    def end_token(self) -> int:
        """That the model ends a text with."""
        return int(json.loads((self._model / "config.json").read_text())["eos_token_id"])

    def chain(self, world_size: int, *changes: dict[str, Any], **common: Any) -> list[Replica]:
        """Engines that form a chain, with empty caches: those of the last call, if it was for the
        same and they weren't spoiled. `changes` of a replica's arguments, by rank.
        """
        wanted = (world_size, changes, common)
        if self._running != wanted:
            self._begin(world_size, changes, common)
            self._running = wanted
        chosen = self._alive[:world_size]
        for replica in chosen:
            replica.call("heal")
            assert replica.call("forget")
        return chosen

    def spoil(self) -> None:
        """Have the next chain start afresh: this one fails, or has."""
        self._running = None

    def _begin(
        self, world_size: int, changes: Sequence[dict[str, Any]], common: dict[str, Any]
    ) -> None:
        self._alive = [each for each in self._alive if each.process.poll() is None]
        self._start(world_size - len(self._alive))
        store = f"{self._folder}/store-{uuid.uuid4().hex[:8]}"
        for rank, replica in enumerate(self._alive[:world_size]):
            own = changes[rank] if rank < len(changes) else {}
            place = (rank, world_size, store)
            replica.ask("start", place, model=str(self._model), **{**common, **own})
        answers = [replica.outcome() for replica in self._alive[:world_size]]
        for answer in answers:
            if isinstance(answer, Exception):
                raise answer

    def close(self) -> list[int]:
        """Exit codes of those that live."""
        alive = [each for each in self._alive if each.process.poll() is None]
        for replica in alive:
            replica.end()
        return [replica.process.wait(60) for replica in alive]

    def kill(self) -> None:
        for replica in self._alive:
            replica.process.kill()
            replica.process.wait()

    def _start(self, number: int) -> None:
        for _ in range(number):
            calls, theirs = Pipe()
            log = self._folder / f"stderr-{uuid.uuid4().hex[:8]}"
            with theirs, log.open("wb") as errors:
                process = self._engines.start(
                    "support.runahead_replica",
                    [],
                    env={**os.environ, **OFFLINE},
                    stdout=theirs.fileno(),
                    stderr=errors.fileno(),
                )
            self._alive.append(Replica(process, calls, log))


def together(replicas: Sequence[Replica], method: str, *args: Any, **options: Any) -> list[Any]:
    """Have all do the same at the same time; what each answered, or raised."""
    for replica in replicas:
        replica.ask(method, *args, **options)
    return [replica.outcome() for replica in replicas]
