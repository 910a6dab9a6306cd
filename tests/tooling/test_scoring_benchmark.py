"""The benchmark of labels: its simulated targets, and its gate."""

from __future__ import annotations

import numpy as np
import pytest
from support.benchmark_modules import load

measured, simulated = load("scoring.measured"), load("scoring.simulated")


def test_labels_by_one_step_need_no_more_steps_than_their_tokens() -> None:
    rows = simulated.simulated(400)
    labels = [row for row in rows if (row["answer"], row["policy"]) == ("label", "batchllm")]
    assert len(labels) == 2
    for row in labels:
        assert row["preemptions"] == 0
        assert row["computed_of_optimal"] == 1
        # A step more than full ones, of which so few rows have few.
        assert row["steps"] <= row["computed_tokens"] / 8192 + 1.5


def test_a_target_that_is_missed_is_named() -> None:
    row = {"answer": "label", "policy": "batchllm", "steps_of_bound": 1.04}
    found = simulated.targets([{**row, "computed_of_optimal": 1, "preemptions": 2}])
    assert list(found.values()) == [False, True, False]


def test_other_probabilities_stop_it() -> None:
    theirs = [[-1.0, -2.0], [-3.0, -1.0]]
    ours = np.array([[0.731059, 0.268941], [0.119203, 0.880797]])
    measured.compare(ours, theirs)
    with pytest.raises(SystemExit, match="differ by up to"):
        measured.compare(ours[::-1], theirs)
