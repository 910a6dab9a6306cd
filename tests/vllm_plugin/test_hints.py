"""Hints and settings on their way through vLLM."""

import json
from types import SimpleNamespace
from typing import Any

import pytest
from vllm import PoolingParams, SamplingParams

from batchllm_operator.errors import SpecError
from batchllm_operator.vllm_plugin.attention.settings import AttentionSettings
from batchllm_operator.vllm_plugin.scheduler.hints import RequestHints, SchedulerSettings, StepCost

Settings = type[SchedulerSettings] | type[AttentionSettings]


def hints_of(extra_args: Any, *, is_pooled: bool = False) -> RequestHints | None:
    """The hints of a request with these extra arguments, after a way as JSON."""
    extra_args = json.loads(json.dumps(extra_args))
    pooled, sampled = PoolingParams(extra_kwargs=extra_args), SamplingParams(extra_args=extra_args)
    request: Any = SimpleNamespace(
        pooling_params=pooled if is_pooled else None,
        sampling_params=None if is_pooled else sampled,
    )
    return RequestHints.of(request)


@pytest.mark.parametrize("is_pooled", [False, True])
def test_hints_come_out_as_they_went_in(is_pooled: bool) -> None:
    hints = RequestHints(group_id=7, num_prefix_tokens=1100, group_size=12, num_output_tokens=90)
    assert hints_of(hints.to_extra_args(), is_pooled=is_pooled) == hints


@pytest.mark.parametrize("carrier", [None, {}, {"somebody": "else's"}])
def test_without_ours_there_are_no_hints_and_the_default_settings(
    carrier: dict[str, Any] | None,
) -> None:
    assert hints_of(carrier) is None
    for settings in (SchedulerSettings, AttentionSettings):
        assert settings.from_additional_config(carrier) == settings()


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        (7, "dictionary"),
        ({"group_id": 1, "grup_size": 2}, "grup_size: "),
        ({"group_size": 2}, "group_id"),
        ({"group_id": 1, "num_output_tokens": "64"}, "num_output_tokens"),
        ({"group_id": 1, "num_prefix_tokens": -1}, "num_prefix_tokens"),
        ({"group_id": 1, "num_prefix_tokens": 32.0, "group_size": 2}, "num_prefix_tokens"),
        ({"group_id": 1, "group_size": 0}, "group_size"),
    ],
)
def test_hints_that_are_not_ours_are_refused(value: object, reason: str) -> None:
    with pytest.raises(SpecError, match=reason):
        hints_of({"batchllm": value})


def test_settings_come_out_as_they_went_in() -> None:
    settings = SchedulerSettings(
        memory_threshold=0.9,
        chunk_size=4096,
        pace=False,
        step_cost=StepCost(token_s=1e-6, weights_s=5e-3, overhead_s=1e-3),
        num_requests=3000,
        trace_path="/tmp/trace.parquet",
    )
    config = json.loads(json.dumps(settings.to_additional_config()))
    given = {"decode_graphs": True, "prefill": "batchllm", "decode_threshold": 8, "impl": "triton"}
    config["batchllm_attention"] = given
    assert SchedulerSettings.from_additional_config(config) == settings
    attention = AttentionSettings.from_additional_config(config)
    assert attention == AttentionSettings(True, "batchllm", 8, "triton")


@pytest.mark.parametrize(
    ("settings", "value", "reason"),
    [
        (SchedulerSettings, {"memory_threshold": 0}, "memory_threshold"),
        (SchedulerSettings, {"memory_threshold": 1.5}, "memory_threshold"),
        (SchedulerSettings, {"chunk_size": 0}, "chunk_size"),
        (SchedulerSettings, {"thershold": 1}, "thershold: "),
        (SchedulerSettings, {"step_cost": 3}, "step_cost: .*dictionary"),
        (SchedulerSettings, {"step_cost": {"token_s": "fast"}}, "step_cost.token_s: "),
        (SchedulerSettings, {"pace": "slow"}, "pace: "),
        (AttentionSettings, 3, "dictionary"),
        (AttentionSettings, {"graphs": True}, "graphs: "),
        (AttentionSettings, {"decode_graphs": "yes"}, "decode_graphs: .*boolean"),
        (AttentionSettings, {"prefill": "triton"}, "prefill: .*'flash_attention' or 'batchllm'"),
        (AttentionSettings, {"decode_threshold": 0}, "decode_threshold: .*greater than or equal"),
        (AttentionSettings, {"decode_threshold": True}, "decode_threshold: .*integer"),
        (AttentionSettings, {"impl": "cuda"}, "impl: .*'triton' or 'reference'"),
    ],
)
def test_settings_that_make_no_sense_are_refused(
    settings: Settings, value: object, reason: str
) -> None:
    key = "batchllm" if settings is SchedulerSettings else "batchllm_attention"
    with pytest.raises(SpecError, match=reason):
        settings.from_additional_config({key: value})
