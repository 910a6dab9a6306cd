"""Keeps a row that kills the engine from failing the job."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Final

from batchllm_operator.amounts import counted
from batchllm_operator.engine.protocol import Engine, EngineDiedError, EngineOutput, EngineRequest
from batchllm_operator.errors import EngineError

if TYPE_CHECKING:
    from batchllm_operator.runahead.phase import ChainedEngine

_log = logging.getLogger(__name__)
_MAX_CULPRITS: Final = 5  # in a row


class IsolatingEngine:
    """An engine that survives the death of the engines that `start` makes.

    A new engine retries the requests that the dead one held, in halves, until the one that kills
    it is alone. That one gets an error, the others get their outputs, and the stream continues.
    It gives up with `EngineError` when more than five requests in a row have each killed an engine
    while running alone: the cause is the machine, not the rows.
    """

    def __init__(self, start: Callable[[], Engine]) -> None:
        self._start = start
        self._engine: Engine | None = start()
        self._num_culprits = 0

    def stream(self, requests: Iterator[EngineRequest]) -> Iterator[EngineOutput]:
        while True:
            try:
                yield from self._stream(requests)
                return
            except EngineDiedError as error:
                self._discard(error)
                suspects = error.in_flight
                if not suspects:
                    raise EngineError(f"the engine died without a request: {error}") from error
            yield from self._isolate(suspects)

    @property
    def unread(self) -> Sequence[EngineOutput]:
        return self._engine.unread if self._engine is not None else ()

    @property
    def chain(self) -> ChainedEngine | None:
        return self._engine.chain if self._engine is not None else None

    def close(self) -> None:
        if self._engine is not None:
            self._engine.close()
            self._engine = None

    def _isolate(self, suspects: Sequence[EngineRequest]) -> Iterator[EngineOutput]:
        """Serve all suspects, in batches that are halved when one kills the engine."""
        batches = _halves(suspects) if len(suspects) > 1 else [suspects]
        while batches:
            batch = batches.pop()
            requests = iter(batch)
            try:
                yield from self._stream(requests)
            except EngineDiedError as error:
                self._discard(error)
                if len(batch) > 1:
                    batches += _halves([*error.in_flight, *requests])  # unanswered or not taken
                    continue
                self._num_culprits += 1
                if self._num_culprits > _MAX_CULPRITS:
                    raise EngineError(
                        f"the engine died on {self._num_culprits} requests in a row, each alone;"
                        f" last: {error}"
                    ) from error
                yield EngineOutput.failed(batch[0], str(error))

    def _stream(self, requests: Iterator[EngineRequest]) -> Iterator[EngineOutput]:
        if self._engine is None:
            _log.warning("starting the engine again")
            self._engine = self._start()
        for output in self._engine.stream(requests):
            self._num_culprits = 0  # the machine works
            yield output

    def _discard(self, error: EngineDiedError) -> None:
        in_flight = counted(len(error.in_flight), "request")
        _log.warning("the engine died with %s in flight: %s", in_flight, error)
        self.close()


def _halves(batch: Sequence[EngineRequest]) -> list[Sequence[EngineRequest]]:
    """The two halves of `batch`, second first, so that `pop` keeps the order."""
    middle = (len(batch) + 1) // 2
    return [half for half in (batch[middle:], batch[:middle]) if half]
