"""Generates rows again whose answers aren't in the form that the spec wants."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Iterator
from dataclasses import replace

from batchllm_operator.amounts import counted
from batchllm_operator.answers import Answers
from batchllm_operator.engine import Engine, EngineOutput, EngineRequest
from batchllm_operator.spec import JobSpec
from batchllm_operator.spec.tasks import INVALID_OUTPUT

_log = logging.getLogger(__name__)


class Retries:
    """A stream of outputs in which invalid ones are the last of all tries only.

    Each row is one request at any time, so what follows gets one output for it, as without
    retries.
    """

    def __init__(self, spec: JobSpec) -> None:
        self._most = spec.retry_invalid
        self._answers = Answers.of(spec)
        self._running: dict[int, EngineRequest] = {}
        self._again: deque[EngineRequest] = deque()
        self._num_retries = self._num_tokens = 0

    def stream(self, engine: Engine, requests: Iterator[EngineRequest]) -> Iterator[EngineOutput]:
        """As `Engine.stream`; rows with invalid answers come again before new ones."""
        if not self._most:
            yield from engine.stream(requests)
            return
        fed = self._fed(requests)
        while True:
            for output in engine.stream(fed):
                if not self._retries(self._running.pop(output.request_idx), output):
                    yield output
            if not self._again:  # the engine may have ended before the last answers
                break
            fed = self._fed(iter(()))
        if self._num_retries:
            _log.info(
                "retry_invalid: rows were generated again %s, after %s of answers that couldn't be"
                " used",
                counted(self._num_retries, "time"),
                counted(self._num_tokens, "token"),
            )
            self._num_retries = self._num_tokens = 0

    def _fed(self, requests: Iterator[EngineRequest]) -> Iterator[EngineRequest]:
        while request := self._again.popleft() if self._again else next(requests, None):
            self._running[request.request_idx] = request
            yield request

    def _retries(self, request: EngineRequest, output: EngineOutput) -> bool:
        """Whether the row is generated again."""
        if request.num_tries == self._most or not output.is_served or output.text is None:
            return False
        fault = self._answers.fault(output.text, output.raw)
        if fault is None or fault.kind != INVALID_OUTPUT:
            return False
        self._num_retries += 1
        self._num_tokens += output.num_output_tokens
        # The scheduler no longer waits for it as a member of its group, which may have ended. It
        # finds the group's prefix in the cache, if it is still there.
        alone = replace(
            request,
            num_tries=request.num_tries + 1,
            group_id=-1 - request.request_idx,
            group_size=1,
        )
        self._again.append(alone)
        return True
