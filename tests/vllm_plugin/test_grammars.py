"""Requests whose grammars are compiled while others run."""

from concurrent.futures import Future
from unittest.mock import Mock

import pytest
from support.engine_steps import EngineSteps
from vllm.v1.structured_output.backend_types import StructuredOutputGrammar

from batchllm_operator.vllm_plugin.scheduler.hints import RequestHints, SchedulerSettings

Grammar = Future[StructuredOutputGrammar]
ANY = Mock(
    StructuredOutputGrammar,
    **{"accept_tokens.return_value": True, "is_terminated.return_value": False},
)
"""Takes all tokens."""
NO_PACE = SchedulerSettings(pace=False)


def ready() -> Grammar:
    grammar = Grammar()
    grammar.set_result(ANY)
    return grammar


def add(engine: EngineSteps, group: int, size: int, grammars: list[Grammar | None]) -> list[str]:
    """A group of prompts of 90 tokens, which share 64; returns their ids."""
    names = [f"{group}.{member}" for member in range(size)]
    for member, (name, grammar) in enumerate(zip(names, grammars, strict=True)):
        own = [10_000 * (group + 1) + 100 * member + place for place in range(26)]
        prompt = [100 * (group + 1) + place % 64 for place in range(64)] + own
        hints = RequestHints(group, 64, size, 20)
        engine.add(name, prompt, 20, hints=hints, grammar=grammar)
    return names


@pytest.mark.parametrize("lag", [0, 1])
@pytest.mark.parametrize("late", [0, 1, 3])
def test_others_run_while_a_grammar_is_compiled(late: int, lag: int) -> None:
    engine = EngineSteps(chunk=256, lag=lag, settings=NO_PACE)
    grammar = Grammar()
    names = add(engine, 0, 4, [grammar if member == late else ready() for member in range(4)])
    for _ in range(8):
        assert names[late] not in engine.step().num_scheduled_tokens
    assert {each.request_id for each in engine.scheduler.running} == {*names} - {names[late]}
    grammar.set_result(ANY)
    assert engine.step().num_scheduled_tokens[names[late]] == 26  # it finds the prefix
    engine.run()
    assert engine.finished == dict.fromkeys(names, 20)
    assert engine.preempted == []


def test_requests_keep_their_order_while_all_wait() -> None:
    engine = EngineSteps(chunk=96, settings=NO_PACE)
    grammars = [Grammar() for _ in range(6)]
    names = add(engine, 0, 3, [*grammars[:3]]) + add(engine, 1, 3, [*grammars[3:]])
    for _ in range(5):
        assert not engine.step().num_scheduled_tokens
    for grammar in reversed(grammars):
        grammar.set_result(ANY)
    order: list[str] = []
    while len(order) < 6:
        order += [name for name in engine.step().num_scheduled_tokens if name not in order]
    assert order == names
    engine.run()


@pytest.mark.parametrize("lag", [0, 1])
def test_ready_grammars_change_no_step(lag: int) -> None:
    def steps(*, is_structured: bool) -> list[dict[str, int]]:
        engine = EngineSteps(num_blocks=60, chunk=128, lag=lag)  # room for a few
        for group in range(6):
            grammars = [ready() if is_structured else None for _ in range(5)]
            add(engine, group, 5, grammars)
        engine.run()
        assert engine.preempted == []
        assert len(engine.finished) == 30
        return [output.num_scheduled_tokens for output in engine.outputs]

    assert steps(is_structured=True) == steps(is_structured=False)


def test_memory_is_planned_for_requests_that_come_late() -> None:
    engine = EngineSteps(num_blocks=60, chunk=128)
    grammars = [Grammar() for _ in range(30)]
    for group in range(6):
        add(engine, group, 5, [*grammars[5 * group : 5 * group + 5]])
    waiting = sorted(grammars, key=lambda each: grammars.index(each) * 7 % 30)
    while waiting:
        waiting.pop().set_result(ANY)
        engine.step()
        engine.step()
    engine.run()
    assert len(engine.finished) == 30
    assert engine.preempted == []


def test_a_grammar_that_cannot_be_compiled_ends_its_request_only() -> None:
    engine = EngineSteps(chunk=256, settings=NO_PACE)
    grammar = Grammar()
    names = add(engine, 0, 3, [ready(), grammar, ready()])
    engine.step()
    grammar.set_exception(ValueError("a grammar of a thousand states"))
    engine.run()
    assert names[1] not in engine.scheduler.requests
    assert engine.finished == {names[0]: 20, names[2]: 20}
    engine.check_idle()


def test_a_request_is_aborted_while_it_waits() -> None:
    engine = EngineSteps(chunk=256, settings=NO_PACE)
    names = add(engine, 0, 2, [Grammar(), ready()])
    engine.step()
    engine.abort(names[0])
    engine.run()
    assert engine.finished == {names[1]: 20}
