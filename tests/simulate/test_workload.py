"""Made-up requests, and what the scheduler is told of them."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from batchllm_operator.simulate.workload import Shape, Workload

SHAPE = Shape("test", 10, 4, 100, 20, output_tokens=7, instruction_tokens=3)


def prompts(workload: Workload) -> list[list[int]]:
    return [workload.tokens.prompt(idx).tolist() for idx in range(len(workload))]


def test_documents_lie_under_questions_and_all_under_an_instruction() -> None:
    workload = SHAPE.make(seed=1)
    assert workload.group_ids.tolist() == [0] * 4 + [1] * 4 + [2] * 2
    assert workload.group_sizes.tolist() == [4] * 8 + [2] * 2
    assert workload.output_tokens.tolist() == workload.estimated_tokens.tolist() == [7] * 10
    found = prompts(workload)
    assert len({tuple(prompt[:3]) for prompt in found}) == 1
    for group_id in range(3):
        members = np.flatnonzero(workload.group_ids == group_id)
        [length] = {int(length) for length in workload.num_prefix_tokens[members]}
        assert 3 + 85 <= length <= 3 + 115
        assert len({tuple(found[idx][:length]) for idx in members}) == 1
        assert all(17 <= len(found[idx]) - length <= 23 for idx in members)


def test_a_seed_is_a_workload() -> None:
    one, same, other = (prompts(SHAPE.make(seed)) for seed in (1, 1, 2))
    assert one == same != other


def test_the_optimal_saving_counts_each_shared_block_once() -> None:
    """Two groups of two: 16 tokens of all four, 16 more of each two, and 8 that fill no block."""
    shape = Shape("test", 4, 2, 16, 8, 1, instruction_tokens=16, spread=0.0)
    saved = 4 * 40 - (16 + 2 * 16 + 4 * 8)
    assert shape.make().optimal_saving_ratio(16) == pytest.approx(saved / 160)
    assert shape.make().optimal_saving_ratio(64) == 0


@given(st.floats(0, 1), st.integers(0, 9))
def test_wrong_estimates_are_off_by_no_more_than_asked(share: float, seed: int) -> None:
    workload = Shape("test", 50, 1, 0, 1, output_tokens=100).make().with_estimate_error(share, seed)
    estimates = workload.estimated_tokens
    assert estimates.min() >= max(1, np.floor(100 - 100 * share))
    assert estimates.max() <= np.ceil(100 + 100 * share)
    assert workload.output_tokens.tolist() == [100] * 50
