"""Settings of our attention on their way through `additional_config`."""

from __future__ import annotations

import pytest

from batchllm_operator.errors import SpecError
from batchllm_operator.vllm_plugin.attention.settings import KEY, AttentionSettings


@pytest.mark.parametrize("config", [None, {}, {"batchllm": {"pace": False}}, "an object of vLLM's"])
def test_without_any_the_defaults_hold(config: object) -> None:
    assert AttentionSettings.from_additional_config(config) == AttentionSettings()


def test_given_ones_are_taken() -> None:
    given = {"decode_graphs": True, "prefill": "batchllm", "decode_threshold": 8, "impl": "triton"}
    expected = AttentionSettings(True, "batchllm", 8, "triton")
    config = {KEY: given}
    assert AttentionSettings.from_additional_config(config) == expected


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        (3, "must be an object, not int"),
        ({"graphs": True, "imp": 1}, "has no graphs, imp"),
        ({"decode_graphs": "yes"}, "decode_graphs: must be true or false"),
        ({"prefill": "triton"}, "prefill: must be flash_attention or batchllm, not 'triton'"),
        ({"decode_threshold": 0}, "decode_threshold: must be a whole number above 0"),
        ({"decode_threshold": True}, "decode_threshold: must be a whole number above 0"),
        ({"impl": "cuda"}, "impl: must be triton or reference, not 'cuda'"),
    ],
)
def test_anything_else_is_refused(value: object, reason: str) -> None:
    with pytest.raises(SpecError, match=reason):
        AttentionSettings.from_additional_config({KEY: value})
