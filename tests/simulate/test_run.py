"""Engines, made-up requests and what is said of simulated runs, by hand."""

import dataclasses
from dataclasses import fields
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from batchllm_operator.cost import (
    MODEL_SHAPES,
    EngineLimits,
    StepWork,
    find_gpu,
    kv_capacity_tokens,
)
from batchllm_operator.errors import PlanError
from batchllm_operator.simulate.machine import Machine
from batchllm_operator.simulate.run import Run, Timeline
from batchllm_operator.simulate.summary import format_attention, predict_attention
from batchllm_operator.simulate.workload import Shape, Workload


def make_run(**columns: list[float]) -> Run:
    """Four steps of 10, 2, 2 and 6 tokens."""
    given: dict[str, Any] = {
        "num_decode_tokens": [0, 2, 2, 0],
        "num_distinct_tokens": [6, 0, 0, 4],
        "num_prefix_tokens": [4, 0, 0, 2],
        "num_recomputed_tokens": [0, 0, 0, 1],
        "num_running": [3, 2, 2, 1],
        "num_waiting": [1, 1, 0, 0],
        "num_used_blocks": [4, 4, 4, 2],
        "num_preempted": [0, 2, 0, 0],
        "scheduling_s": [0.001, 0.002, 0.003, 0.002],
        "idle_s": [0.5, 0.0, 0.0, 1.0],
        "step_s": [2.0, 1.0, 1.0, 2.0],
        **columns,
    }
    line = Timeline(**{k: np.array(v) for k, v in given.items()})
    return Run("job", "policy", 20, 22, 0.5, line)


def test_the_numbers_of_a_run() -> None:
    run = make_run()
    assert run.steps == 4
    assert run.saving_ratio == pytest.approx(1 - 16 / 20)
    assert run.preemptions == 2
    assert run.recomputed_tokens == 1
    assert run.mean_tokens_per_step == 5
    assert run.valley_steps == 2, "steps 0 to 2 have less than half of 22; nobody waits in 2"
    assert run.predicted_s == 7.5
    assert run.sched_ms_per_step == pytest.approx(2)
    assert make_run(num_distinct_tokens=[20, 0, 0, 4]).saving_ratio < 0  # computed again
    row = run.row()
    assert (row["workload"], row["policy"], row["steps"]) == ("job", "policy", 4)
    assert row["optimal_saving_ratio"] == 0.5


def test_the_table_has_a_column_for_each_number() -> None:
    table = make_run().timeline.to_table()
    assert table.column_names == ["step", *(field.name for field in fields(Timeline))]
    assert table["step"].to_pylist() == [0, 1, 2, 3]
    assert table["num_prefix_tokens"].to_pylist() == [4, 0, 0, 2]


# Steps with the rates of attention kernels


MISTRAL, H200 = MODEL_SHAPES["Mistral-7B"], find_gpu("H200")
MACHINE = Machine(MISTRAL, H200, num_blocks=100)
PAIRS, READ = 10**9, 10**7
WEIGHTS_S = MISTRAL.step_weight_bytes / (4.8e12 * 0.85)
IDLE_S = 0.5


def run(policy: str, read_tokens: int) -> Run:
    """A step that prefills and one that decodes; their matrices are bound by the weights."""
    counts = [
        np.array([0, 0] if name.endswith("_s") else [3, 4], dtype=np.float64)
        for name in Timeline.__slots__
    ]
    line = Timeline(*counts)
    line.idle_s[0] = IDLE_S
    works = [StepWork(9, 1, PAIRS, 0, 0), StepWork(4, 4, 0, 10, read_tokens)]
    return Run("job", policy, 20, 12, 0.5, line, works)


def seconds(prefill_flop_per_s: float, bandwidth: float, read_tokens: int) -> float:
    """4 * layers * heads * size FLOP a pair, 2 * 2 * layers * heads * size bytes a token."""
    prefill_s = PAIRS * 4 * 32 * 32 * 128 / prefill_flop_per_s
    read_s = read_tokens * 2 * 2 * 32 * 8 * 128 / (4.8e12 * bandwidth)
    return IDLE_S + 2 * (WEIGHTS_S + 0.001) + prefill_s + read_s


def test_each_policy_has_the_kernels_that_it_could_run() -> None:
    found = predict_attention([run("stock_sorted", 4 * READ), run("batchllm", READ)], MACHINE)
    assert [(row["policy"], row["kernels"]) for row in found] == [
        ("stock_sorted", "stock"),
        ("batchllm", "ours"),
        ("batchllm", "mixed"),
    ]
    expected = [
        (seconds(350e12, 0.85, 4 * READ), seconds(500e12, 1.21, 4 * READ)),
        (seconds(200e12, 0.7, READ), seconds(300e12, 0.82, READ)),
        (seconds(350e12, 0.7, READ), seconds(500e12, 0.82, READ)),
    ]
    for row, slow_and_fast in zip(found, expected, strict=True):
        assert row["predicted_s"] == pytest.approx(slow_and_fast, abs=1e-3)
        speedups = np.array(expected[0]) / slow_and_fast
        assert row["speedups"]["stock_sorted"] == pytest.approx(speedups, abs=1e-4)
    assert found[1]["tokens"] == 9 + 12


def test_without_a_stock_run_there_is_nothing_to_compare_with() -> None:
    found = predict_attention([run("batchllm", READ)], MACHINE)
    assert [row["speedups"] for row in found] == [{}, {}]
    lines = format_attention(found, MACHINE).splitlines()
    assert lines[1].split()[-2:] == ["tokens", "predicted"]
    assert lines[2].startswith("batchllm  prefix attention  prefix attention      21  ")


def test_a_gpu_without_rates_of_kernels_has_no_prediction_of_them() -> None:
    other = Machine(MISTRAL, find_gpu("A100"), num_blocks=100)
    assert predict_attention([run("stock_sorted", READ)], other) == []


# Engines to simulate


H100 = find_gpu("H100")


def test_a_gpu_has_the_blocks_that_fit_beside_the_weights() -> None:
    machine = Machine.of(MISTRAL, H100)
    assert machine.num_blocks == kv_capacity_tokens(MISTRAL, H100, EngineLimits()) // 16
    assert machine.num_blocks == pytest.approx(27_000, rel=0.05)
    limits = EngineLimits(num_gpus=2, kv_cache_bytes=1 << 30, max_num_batched_tokens=512)
    machine = Machine.of(MISTRAL, H100, limits, block_size=32)
    assert machine.num_blocks == 2 * (1 << 30) // 131_072 // 32
    assert (machine.num_gpus, machine.max_num_batched_tokens) == (2, 512)


def test_a_number_of_blocks_can_be_given_whatever_there_is_room_for() -> None:
    small = dataclasses.replace(H100, memory_bytes=15e9)
    with pytest.raises(PlanError, match="no room for KV"):
        Machine.of(MISTRAL, small)
    assert Machine.of(MISTRAL, small, num_blocks=7).num_blocks == 7


# Made-up requests


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
