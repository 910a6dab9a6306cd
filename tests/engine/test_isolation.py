"""A row that kills the engine gets an error; all others get their outputs."""

from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from batchllm_operator.engine import EngineDiedError, EngineOutput, EngineRequest
from batchllm_operator.engine.isolation import IsolatingEngine
from batchllm_operator.errors import EngineError

FATAL = -1


class MortalEngine:
    """Takes up to `width` requests at a time; dies when one of them is fatal."""

    alive = 0
    unread = ()
    chain = None

    def __init__(self, width: int) -> None:
        self.width = width
        MortalEngine.alive += 1
        assert MortalEngine.alive == 1, "two engines at a time"

    def stream(self, requests: Iterator[EngineRequest]) -> Iterator[EngineOutput]:
        held: list[EngineRequest] = []
        while True:
            while len(held) < self.width and (request := next(requests, None)) is not None:
                held.append(request)
            if not held:
                return
            if any(FATAL in request.prompt_token_ids for request in held):
                raise EngineDiedError("boom", held)
            request = held.pop()  # outputs come in another order than requests
            yield EngineOutput(request.request_idx, "text", "stop", 1, 0, 1, None)

    def close(self) -> None:
        MortalEngine.alive -= 1


def serve(fatal: list[bool], width: int) -> dict[int, EngineOutput]:
    MortalEngine.alive = 0
    engine = IsolatingEngine(lambda: MortalEngine(width))
    prompts = [[FATAL] if is_fatal else [1] for is_fatal in fatal]
    requests = [EngineRequest(idx, prompt, 0, 0) for idx, prompt in enumerate(prompts)]
    outputs = list(engine.stream(iter(requests)))
    engine.close()
    assert MortalEngine.alive == 0
    assert len(outputs) == len(requests), "every request has exactly one output"
    return {output.request_idx: output for output in outputs}


@given(st.integers(1, 9), st.integers(0, 40), st.sets(st.integers(0, 9).map(lambda n: 4 * n)))
def test_only_fatal_requests_fail(width: int, num_requests: int, fatal: set[int]) -> None:
    outputs = serve([idx in fatal for idx in range(num_requests)], width)
    failed = {idx for idx, output in outputs.items() if output.error is not None}
    assert failed == {idx for idx in fatal if idx < num_requests}
    assert all(str(outputs[idx].error) == "engine_error: boom" for idx in failed)


def test_a_machine_that_kills_everything_stops_the_job() -> None:
    with pytest.raises(EngineError, match="6 requests in a row"):
        serve([True] * 20, 4)


def test_an_engine_that_dies_idle_is_not_restarted_forever() -> None:
    class Idle(MortalEngine):
        def stream(self, requests: Iterator[EngineRequest]) -> Iterator[EngineOutput]:
            raise EngineDiedError("no reason", [])

    MortalEngine.alive = 0
    engine = IsolatingEngine(lambda: Idle(1))
    with pytest.raises(EngineError, match="without a request"):
        list(engine.stream(iter([])))
