"""How `VLLMEngine` feeds vLLM: here a double whose steps finish given numbers of requests."""

from collections.abc import Iterator, Mapping
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.answers_job import asking
from support.fake_job import fake_spec

from batchllm_operator.engine import EngineJob, EngineRequest
from batchllm_operator.spec import JobSpec

vllm_engine = pytest.importorskip("batchllm_operator.engine.vllm.engine")


class DoubleLLM:
    """Refuses empty prompts. Each step finishes the oldest requests, as many as given, by turns."""

    def __init__(self, max_num_seqs: int, finishes: list[int]) -> None:
        config = SimpleNamespace(max_num_seqs=max_num_seqs)
        self.vllm_config = SimpleNamespace(scheduler_config=config)
        self.engine_core = SimpleNamespace(engine_core=SimpleNamespace(scheduler=None))
        self._finishes = finishes
        self.held: list[str] = []
        self.held_at_steps: list[int] = []
        self.num_finished: list[int] = []

    def add_request(
        self, request_id: str, prompt: Mapping[str, Any], params: object, lora_request: None
    ) -> str:
        """Returns the request's id, as vLLM does."""
        if not prompt["prompt_token_ids"]:
            raise ValueError("the prompt is empty")
        self.held.append(request_id)
        return request_id

    def get_num_unfinished_requests(self) -> int:
        return len(self.held)

    def step(self) -> list[Any]:
        assert self.held, "a step without requests"
        num = self._finishes[len(self.held_at_steps) % len(self._finishes)]
        self.held_at_steps.append(len(self.held))
        ended, self.held = self.held[:num], self.held[num:]
        self.num_finished.append(len(ended))
        completion = SimpleNamespace(finish_reason="stop", text="text", token_ids=[1])
        return [
            SimpleNamespace(
                request_id=each, finished=True, outputs=[completion], num_cached_tokens=0
            )
            for each in ended
        ]


class DoubledEngine(vllm_engine.VLLMEngine):  # type: ignore[misc,name-defined]
    def __init__(self, max_num_seqs: int, finishes: list[int]) -> None:
        self.llm = DoubleLLM(max_num_seqs, finishes)
        super().__init__(fake_spec("/no/lake"), EngineJob(64))

    def _start(self, spec: JobSpec, args: Mapping[str, Any], job: EngineJob) -> None:
        self.llm_engine = self.llm
        self._splitters: list[None] = []
        self._adapters: dict[str, Any] = {}


class SamplingLLM(DoubleLLM):
    """Answers each request three times; each step finishes one answer."""

    def __init__(self, max_num_seqs: int) -> None:
        super().__init__(max_num_seqs, [1])
        self.output_processor = SimpleNamespace(request_states={})
        self.hints: list[dict[str, Any]] = []

    def add_request(
        self, request_id: str, prompt: Mapping[str, Any], params: Any, lora_request: None
    ) -> str:
        for sample in range(3):
            name = f"{sample}_{request_id}-x"
            super().add_request(name, prompt, params, lora_request)
            state = SimpleNamespace(num_cached_tokens=10 * sample)
            self.output_processor.request_states[name] = state
        return f"{request_id}-x"

    def step(self) -> list[Any]:
        [output] = super().step()
        sample, _, parent = output.request_id.partition("_")
        self.output_processor.request_states.pop(output.request_id)
        output.request_id, output.finished = parent.removesuffix("-x"), sample == "2"
        output.outputs, output.num_cached_tokens = output.outputs * 3, 20
        return [output]


class SamplingEngine(DoubledEngine):
    def __init__(self, max_num_seqs: int) -> None:
        self.llm = SamplingLLM(max_num_seqs)
        spec = asking("/no/lake", sampling={"temperature": 1.0, "n": 3})
        vllm_engine.VLLMEngine.__init__(self, spec, EngineJob(64))


def requests(begin: int, end: int, empty: frozenset[int] = frozenset()) -> Iterator[EngineRequest]:
    for idx in range(begin, end):
        yield EngineRequest(idx, [] if idx in empty else [5, 6, 7], idx, 0)


def test_the_first_step_comes_after_a_few_requests() -> None:
    engine = DoubledEngine(1024, [0, 0, 3, 100, 5000])
    outputs = list(engine.stream(requests(0, 1000)))
    assert engine.llm.held_at_steps[:5] == [64, 96, 128, 128 - 3 + 35, 160 - 100 + 132]
    assert [each.request_idx for each in outputs] == list(range(1000))


@given(
    num_requests=st.integers(0, 300),
    max_num_seqs=st.integers(1, 60),
    finishes=st.lists(st.integers(0, 90), min_size=1, max_size=6).filter(any),
    empty=st.frozensets(st.integers(0, 300)),
)
def test_each_request_has_one_output_and_no_more_are_held_than_allowed(
    num_requests: int, max_num_seqs: int, finishes: list[int], empty: frozenset[int]
) -> None:
    engine = DoubledEngine(max_num_seqs, finishes)
    outputs = list(engine.stream(requests(0, num_requests, empty)))
    assert sorted(each.request_idx for each in outputs) == list(range(num_requests))
    refused = {each.request_idx for each in outputs if each.error is not None}
    assert refused == {idx for idx in empty if idx < num_requests}
    held = engine.llm.held_at_steps
    assert all(each <= 2 * max_num_seqs for each in held)
    assert engine.llm.held == []


def test_of_several_answers_each_is_a_request_of_vllm() -> None:
    engine = SamplingEngine(max_num_seqs=20)
    outputs = list(engine.stream(requests(0, 50)))
    assert [each.request_idx for each in outputs] == list(range(50))
    assert [len(each.raw["generated_texts"]) for each in outputs] == [3] * 50
    assert all(each.num_cached_tokens == 0 for each in outputs)  # as the first answer
    held = engine.llm.held_at_steps
    assert max(held) in range(40, 40 + 3)
    assert all(each > 20 for each in held[: -2 * 20])  # it never runs dry


def test_a_stopped_reader_leaves_the_other_outputs_of_its_step_unread() -> None:
    engine = DoubledEngine(1024, [4])
    outputs = engine.stream(requests(0, 20))
    assert [next(outputs).request_idx for _ in range(6)] == list(range(6))
    assert [each.request_idx for each in engine.unread] == [5, 6, 7]
    assert [each.request_idx for each in outputs] == list(range(6, 20))
    assert engine.unread == []


def test_a_generator_that_ends_early_is_not_asked_again() -> None:
    asked = []

    def until_drained() -> Iterator[EngineRequest]:
        yield from requests(0, 70)
        asked.append("drained")

    engine = DoubledEngine(1024, [1])
    assert len(list(engine.stream(until_drained()))) == 70
    assert asked == ["drained"]


def test_the_next_shard_is_claimed_before_the_last_requests_of_this_one_have_ended() -> None:
    in_flight = []

    def of_two_shards() -> Iterator[EngineRequest]:
        yield from requests(0, 100)
        in_flight.append(len(engine.llm.held))  # as a worker, which claims the next one here
        yield from requests(100, 200)

    engine = DoubledEngine(1024, [10])
    outputs = list(engine.stream(of_two_shards()))
    assert [each.request_idx for each in outputs] == list(range(200))
    assert in_flight[0] > 0
    assert min(engine.llm.held_at_steps[:-1]) > 10, "the engine never ran dry"
