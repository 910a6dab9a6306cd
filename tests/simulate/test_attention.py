"""Simulated steps with the rates of attention kernels, by hand."""

from __future__ import annotations

import numpy as np
import pytest

from batchllm_operator.cost import MODEL_SHAPES, StepWork, find_gpu
from batchllm_operator.simulate.machine import Machine
from batchllm_operator.simulate.run import Run, Timeline
from batchllm_operator.simulate.summary import format_attention, predict_attention

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
    return Run("job", policy, 3, 20, 12, 0.5, line, works)


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
