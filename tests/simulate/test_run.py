"""Sums over steps, by hand."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import numpy as np
import pytest

from batchllm_operator.simulate.run import Run, Timeline


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
    return Run("job", "policy", 3, 20, 22, 0.5, line)


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
