"""Every policy on a small workload for which memory is short."""

from __future__ import annotations

import pytest

from batchllm_operator.planner import MODEL_SHAPES, find_gpu
from batchllm_operator.simulate.machine import POLICIES, Machine
from batchllm_operator.simulate.run import Run
from batchllm_operator.simulate.vllm_scheduling import simulate
from batchllm_operator.simulate.workload import Shape

NUM_BLOCKS = 300
WORKLOAD = Shape("small", 80, 5, 300, 100, 60, instruction_tokens=30).make()


@pytest.fixture(scope="module")
def runs() -> dict[str, Run]:
    machine = Machine(MODEL_SHAPES["Mistral-7B"], find_gpu("H100"), NUM_BLOCKS)
    return {name: simulate(WORKLOAD, policy, machine) for name, policy in POLICIES.items()}


@pytest.mark.parametrize("name", POLICIES)
def test_every_output_is_made_within_memory(name: str, runs: dict[str, Run]) -> None:
    line = runs[name].timeline
    # The first token of an output comes with the last one of the prompt.
    assert line.num_decode_tokens.sum() <= (WORKLOAD.output_tokens - 1).sum()
    if runs[name].preemptions == 0:
        assert line.num_decode_tokens.sum() == (WORKLOAD.output_tokens - 1).sum()
        assert runs[name].recomputed_tokens == 0
    assert 0 < line.num_used_blocks.max() < NUM_BLOCKS


@pytest.mark.parametrize("name", [name for name, each in POLICIES.items() if each.prefix_caching])
def test_shared_prefixes_save_tokens(name: str, runs: dict[str, Run]) -> None:
    assert 0 < runs[name].saving_ratio <= runs[name].optimal_saving_ratio


@pytest.mark.parametrize("name", ["batchllm", "batchllm_stock_attention"])
def test_ours_preempts_nobody_and_misses_no_sharing(name: str, runs: dict[str, Run]) -> None:
    assert runs["stock_sorted"].preemptions > 0
    assert runs[name].preemptions == 0
    assert runs[name].saving_ratio == pytest.approx(runs[name].optimal_saving_ratio)
