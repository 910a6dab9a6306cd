"""The fake engine: deterministic texts, and faults on request."""

from collections.abc import Iterator

import pytest
from support.fake_job import fake_spec

from batchllm_operator.answers.fakes import fake_text
from batchllm_operator.engine import EngineDiedError, EngineRequest
from batchllm_operator.engine.fake import FakeEngine


def engine(**args: object) -> FakeEngine:
    return FakeEngine(fake_spec("/lake", engine={"extra_args": args}), max_model_len=10)


def requests(*prompts: list[int]) -> list[EngineRequest]:
    return [EngineRequest(idx, prompt, 0, 1) for idx, prompt in enumerate(prompts)]


def test_each_prompt_has_its_own_text_every_time() -> None:
    outputs = list(engine().stream(iter(requests([1, 2], [1, 3], [1, 2]))))
    assert [output.text for output in outputs] == [fake_text(p) for p in ([1, 2], [1, 3], [1, 2])]
    assert outputs[0].text == outputs[2].text != outputs[1].text


def test_blocks_in_common_with_the_prompt_before_are_cached() -> None:
    one, two = [1] * 32, [*[1] * 31, 2]
    outputs = engine().stream(iter(requests(one, two, two, [*two, 3], [1] * 15)))
    assert [output.num_cached_tokens for output in outputs] == [0, 16, 16, 32, 0]


def test_an_output_ends_where_the_model_does() -> None:
    outputs = list(engine().stream(iter(requests([1], [1] * 7))))
    assert [output.num_output_tokens for output in outputs] == [8, 3]


def test_requests_are_taken_as_they_are_needed() -> None:
    taken = []

    def source() -> Iterator[EngineRequest]:
        for request in requests(*([n] for n in range(10))):
            taken.append(request.request_idx)
            yield request

    stream = engine(max_in_flight=3).stream(source())
    next(stream)
    assert taken == [0, 1, 2]


def test_faults() -> None:
    assert next(engine(error_token_id=7).stream(iter(requests([7])))).error is not None
    with pytest.raises(EngineDiedError) as died:
        list(engine(fatal_token_id=7).stream(iter(requests([1], [7], [2]))))
    assert [request.request_idx for request in died.value.in_flight] == [1, 2]
