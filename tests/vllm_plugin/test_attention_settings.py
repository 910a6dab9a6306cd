"""Settings of our attention on their way through `additional_config`."""

from __future__ import annotations

import pytest

from batchllm_operator.errors import SpecError
from batchllm_operator.vllm_plugin.attention.settings import KEY, AttentionSettings


@pytest.mark.parametrize("config", [None, {}, {"batchllm": {"pace": False}}, "an object of vLLM's"])
def test_without_any_the_defaults_hold(config: object) -> None:
    assert AttentionSettings.from_additional_config(config) == AttentionSettings()


def test_given_ones_are_taken() -> None:
    config = {KEY: {"decode_graphs": True, "impl": "reference"}}
    expected = AttentionSettings(decode_graphs=True, impl="reference")
    assert AttentionSettings.from_additional_config(config) == expected


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        (3, "must be an object, not int"),
        ({"graphs": True, "imp": 1}, "has no graphs, imp"),
        ({"decode_graphs": "yes"}, "decode_graphs: must be true or false"),
        ({"impl": "cuda"}, "impl: must be triton or reference, not 'cuda'"),
    ],
)
def test_anything_else_is_refused(value: object, reason: str) -> None:
    with pytest.raises(SpecError, match=reason):
        AttentionSettings.from_additional_config({KEY: value})
