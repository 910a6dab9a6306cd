"""Output lengths that are learned while the job runs."""

import numpy as np
import pytest

from batchllm_operator.vllm_plugin.scheduler.output_estimates import OutputEstimates


@pytest.mark.parametrize("true_scale", [0.5, 1.0, 1.7])
def test_the_scale_approaches_that_of_outputs(true_scale: float) -> None:
    estimates, generator = OutputEstimates(), np.random.default_rng(0)
    for _ in range(2000):
        given = int(generator.integers(50, 200))
        estimates.learn(given, round(given * true_scale * generator.uniform(0.8, 1.2)))
    assert estimates.scale == pytest.approx(true_scale, rel=0.02)
    spread = true_scale * 0.4 / 12**0.5
    assert estimates.deviation == pytest.approx(spread, abs=0.02)


def test_outputs_of_their_estimated_length_leave_no_margin_in_the_end() -> None:
    estimates = OutputEstimates()
    for _ in range(3000):
        estimates.learn(100, 100)
    assert estimates.rather_long(100, most=1000) <= 103


def test_an_output_that_has_outgrown_its_estimate_counts_at_once_and_only_once() -> None:
    at_once, in_the_end = OutputEstimates(), OutputEstimates()
    at_once.learn(100, 120)
    assert at_once.scale > 1.0
    at_once.learn(100, 180, learned_before=120)
    in_the_end.learn(100, 180)
    assert at_once.scale == pytest.approx(in_the_end.scale)
    assert at_once.deviation == pytest.approx(in_the_end.deviation)


def test_an_output_that_goes_on_is_expected_to_be_a_quarter_longer() -> None:
    estimates = OutputEstimates()
    assert estimates.extended(100, most=1000) == 125
    assert estimates.extended(2, most=1000) == 6
    assert estimates.extended(100, most=110) == 110
    assert estimates.extended(110, most=110) == 111  # it has to be somewhere ahead
