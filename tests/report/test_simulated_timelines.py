"""The picture of simulated runs."""

from __future__ import annotations

import numpy as np
import pytest

from batchllm_operator.cost import MODEL_SHAPES, find_gpu
from batchllm_operator.report.timelines import draw_runs
from batchllm_operator.simulate.machine import Machine
from batchllm_operator.simulate.run import Run, Timeline

MACHINE = Machine(MODEL_SHAPES["Mistral-7B"], find_gpu("H100"), 100)


def make_run(policy: str, num_steps: int) -> Run:
    ones = np.ones(num_steps, dtype=np.int64)
    seconds = np.full(num_steps, 0.5)
    line = Timeline(
        *(ones, 2 * ones, 3 * ones, 0 * ones, ones, ones, ones, 0 * ones),
        *(seconds, 0 * seconds, seconds),
    )
    return Run("job", policy, 3, 20, 12, 0.5, line)


@pytest.mark.parametrize("num_steps", [1, 2, 5000])
def test_a_png_is_drawn_of_runs_of_any_length(num_steps: int) -> None:
    data = draw_runs([make_run("static", 3), make_run("batchllm", num_steps)], MACHINE)
    assert data.startswith(b"\x89PNG")
    height = int.from_bytes(data[20:24], "big")
    data = draw_runs([make_run("static", 3)], MACHINE)
    assert int.from_bytes(data[20:24], "big") < height, "a panel less"
