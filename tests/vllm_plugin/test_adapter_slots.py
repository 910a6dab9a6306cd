"""Requests with LoRA adapters, of which a step takes only so many."""

from collections.abc import Sequence

import pytest
from support.engine_steps import BLOCK_SIZE, EngineSteps
from vllm.config.lora import LoRAConfig
from vllm.lora.request import LoRARequest

from batchllm_operator.vllm_plugin.scheduler.hints import RequestHints

ADAPTERS = {name: LoRARequest(name, number, "/a") for number, name in enumerate("abc", start=1)}
PROMPT = list(range(64))


def engine_with(max_loras: int, policy: str, num_blocks: int = 200) -> EngineSteps:
    engine = EngineSteps(num_blocks=num_blocks, chunk=256, policy=policy)
    engine.scheduler.lora_config = LoRAConfig(max_loras=max_loras)
    return engine


def add(
    engine: EngineSteps,
    adapters: Sequence[str | None],
    *,
    size: int,
    output: int,
    estimate: int | None = None,
) -> None:
    """A group for each adapter (None: the model itself), one after the other."""
    for group_id, adapter in enumerate(adapters):
        for member in range(size):
            engine.add(
                f"{group_id}.{member}",
                [*PROMPT, 900 + member],
                output,
                hints=RequestHints(group_id, len(PROMPT), size, estimate or output),
                adapter=ADAPTERS[adapter] if adapter else None,
            )


def groups_in_step(engine: EngineSteps) -> set[int]:
    """Groups with requests in the last step."""
    return {int(name.partition(".")[0]) for name in engine.outputs[-1].num_scheduled_tokens}


@pytest.mark.parametrize("policy", ["batchllm", "stock_sorted"])
@pytest.mark.parametrize("max_loras", [1, 2])
def test_all_are_served_with_few_slots(policy: str, max_loras: int) -> None:
    engine = engine_with(max_loras, policy)
    add(engine, ["a", "b", "c", "a"], size=5, output=12)
    while engine.scheduler.has_requests():
        engine.step()
        assert len({"abca"[group] for group in groups_in_step(engine)}) <= max_loras
    assert len(engine.finished) == 20


@pytest.mark.parametrize("max_loras", [1, 2])
def test_none_is_passed_by_a_later_one(max_loras: int) -> None:
    """With stock vLLM, requests of an adapter that runs pass those that wait for a slot."""
    engine = engine_with(max_loras, "batchllm")
    add(engine, ["a", "b", "c", "a", None], size=3, output=6)
    begun: list[str] = []
    while engine.scheduler.has_requests():
        engine.step()
        begun += [name for name in engine.outputs[-1].num_scheduled_tokens if name not in begun]
    assert begun == [f"{group}.{member}" for group in range(5) for member in range(3)]


@pytest.mark.parametrize(
    ("max_loras", "second"),
    [
        (2, "b"),  # the next adapter begins while the one before ends
        (1, None),  # rows without an adapter take no slot
    ],
)
def test_as_many_adapters_run_as_there_are_slots(max_loras: int, second: str | None) -> None:
    engine = engine_with(max_loras, "batchllm")
    add(engine, ["a", second, "c"], size=2, output=10)
    engine.step()
    engine.step()
    assert groups_in_step(engine) == {0, 1}
    assert len(engine.scheduler.waiting) == 2
    engine.run()


def test_adapters_share_no_blocks() -> None:
    engine = engine_with(3, "batchllm")
    add(engine, ["a", "b", None], size=2, output=4)
    firsts = {engine.request(f"{group}.0").block_hashes[0] for group in range(3)}
    assert len(firsts) == 3
    engine.run()
    num_computed = sum(output.total_num_scheduled_tokens for output in engine.outputs)
    own = 1 + 3  # a token of the prompt, and all of the output but the last
    assert num_computed == 3 * (len(PROMPT) // BLOCK_SIZE * BLOCK_SIZE + 2 * own)


def test_a_preempted_request_waits_for_a_slot_again() -> None:
    engine = engine_with(1, "batchllm", num_blocks=12)
    add(engine, ["a", "b"], size=4, output=60, estimate=4)
    while engine.scheduler.has_requests():
        engine.step()
        assert len(groups_in_step(engine)) <= 1
    assert engine.preempted
    assert len(engine.finished) == 8
