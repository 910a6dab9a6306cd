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
        (3, "dictionary"),
        ({"graphs": True}, "graphs: "),
        ({"decode_graphs": "yes"}, "decode_graphs: .*boolean"),
        ({"prefill": "triton"}, "prefill: .*'flash_attention' or 'batchllm'"),
        ({"decode_threshold": 0}, "decode_threshold: .*greater than or equal to 1"),
        ({"decode_threshold": True}, "decode_threshold: .*integer"),
        ({"impl": "cuda"}, "impl: .*'triton' or 'reference'"),
    ],
)
def test_anything_else_is_refused(value: object, reason: str) -> None:
    with pytest.raises(SpecError, match=reason):
        AttentionSettings.from_additional_config({KEY: value})
