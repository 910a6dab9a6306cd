"""Hints and settings on their way through vLLM."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import pytest
from vllm import PoolingParams

from batchllm_operator.errors import SpecError
from batchllm_operator.vllm_plugin.scheduler.hints import RequestHints, SchedulerSettings, StepCost


def through_json(value: dict[str, Any]) -> dict[str, Any]:
    return dict(json.loads(json.dumps(value)))


def test_hints_come_out_as_they_went_in() -> None:
    hints = RequestHints(group_id=7, num_prefix_tokens=1100, group_size=12, num_output_tokens=90)
    assert RequestHints.from_extra_args(through_json(hints.to_extra_args())) == hints


def test_hints_of_a_request_that_pools() -> None:
    hints = RequestHints(group_id=7, num_prefix_tokens=64, group_size=3, num_output_tokens=1)
    params = PoolingParams(task="embed", extra_kwargs=hints.to_extra_args())
    request: Any = SimpleNamespace(sampling_params=None, pooling_params=params)
    assert RequestHints.of(request) == hints
    request.pooling_params = PoolingParams(task="embed")
    assert RequestHints.of(request) is None


@pytest.mark.parametrize("carrier", [None, {}, {"somebody": "else's"}])
def test_without_ours_there_are_no_hints_and_the_default_settings(
    carrier: dict[str, Any] | None,
) -> None:
    assert RequestHints.from_extra_args(carrier) is None
    assert SchedulerSettings.from_additional_config(carrier) == SchedulerSettings()


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        (7, "dictionary"),
        ({"group_id": 1, "grup_size": 2}, "grup_size: "),
        ({"group_size": 2}, "group_id"),
    ],
)
def test_hints_that_are_not_ours_are_refused(value: object, reason: str) -> None:
    with pytest.raises(SpecError, match=reason):
        RequestHints.from_extra_args({"batchllm": value})


def test_settings_come_out_as_they_went_in() -> None:
    settings = SchedulerSettings(
        memory_threshold=0.9,
        chunk_size=4096,
        pace=False,
        step_cost=StepCost(token_s=1e-6, weights_s=5e-3, overhead_s=1e-3),
        num_requests=3000,
        trace_path="/tmp/trace.parquet",
    )
    config = through_json(settings.to_additional_config())
    assert SchedulerSettings.from_additional_config(config) == settings


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        ({"memory_threshold": 0}, "memory_threshold"),
        ({"memory_threshold": 1.5}, "memory_threshold"),
        ({"chunk_size": 0}, "chunk_size"),
        ({"thershold": 1}, "thershold: "),
        ({"step_cost": 3}, "step_cost: .*dictionary"),
        ({"step_cost": {"token_s": "fast"}}, "step_cost.token_s: "),
        ({"memory_threshold": "all"}, "memory_threshold: .*number"),
        ({"pace": "slow"}, "pace: "),
    ],
)
def test_settings_that_make_no_sense_are_refused(value: object, reason: str) -> None:
    with pytest.raises(SpecError, match=reason):
        SchedulerSettings.from_additional_config({"batchllm": value})
