"""Real vLLM on CPU with our attention and with its own: the same outputs, prefixes read once."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
from support.attention_generate import generate_with
from support.demo_job import Demo, demo_prompts


@pytest.fixture(scope="module")
def generated(demo: Demo, tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """What each attention gave for the demo table."""
    folder = tmp_path_factory.mktemp("attention")
    (folder / "prompts.json").write_text(json.dumps(demo_prompts(demo)))
    return {name: generate_with(demo, name, demo.model, folder) for name in ("stock", "batchllm")}


def gap_where_they_part(ours: list[Any], stock: list[Any]) -> float:
    """Between the two likeliest tokens, where the two first choose different ones."""
    for our_place, place in zip(ours, stock, strict=False):
        if our_place[0]["token"] != place[0]["token"]:
            return float(place[0]["logprob"] - place[1]["logprob"])
    return math.inf


def test_greedy_outputs_are_equal(generated: dict[str, dict[str, Any]]) -> None:
    """But where two tokens are equally likely, up to the rounding of 32-bit sums.

    The demo's texts are those of installed packages, so any of them may bring such a place.
    """
    ours, stock = generated["batchllm"], generated["stock"]
    assert len(ours["texts"]) == len(stock["texts"]) == 150
    assert all(error is None for _, error in ours["texts"])
    assert len({text for text, _ in ours["texts"]}) > 20
    pairs = zip(ours["texts"], stock["texts"], strict=True)
    differ = [idx for idx, (one, other) in enumerate(pairs) if one != other]
    gaps = [gap_where_they_part(ours["places"][idx], stock["places"][idx]) for idx in differ]
    assert all(gap < 1e-5 for gap in gaps), dict(zip(differ, gaps, strict=True))
    assert len(differ) <= 2


def test_prefixes_are_read_once_for_all_who_share_them(
    generated: dict[str, dict[str, Any]],
) -> None:
    ours = generated["batchllm"]
    assert ours["num_groups"] > 100
    assert ours["num_read"] < 0.7 * ours["num_asked"]
    assert generated["stock"]["num_asked"] == 0


def test_prefill_by_flash_attention_gives_the_same(
    generated: dict[str, dict[str, Any]], demo: Demo, tmp_path: Path
) -> None:
    """vLLM's own runner, scheduler and FlashAttention classes, with the kernel in plain torch."""
    prompts = demo_prompts(demo)[:60]
    (tmp_path / "prompts.json").write_text(json.dumps(prompts))
    split = generate_with(demo, "batchllm/split", demo.model, tmp_path)
    assert split["texts"] == generated["stock"]["texts"][: len(prompts)]
    assert split["prefilled"]
    assert min(split["prefilled"]) > 1
    assert split["num_groups"] > 10
    assert any("by vLLM's FlashAttention 2" in line for line in split["log"])


def test_one_line_says_which_attention_runs(generated: dict[str, dict[str, Any]]) -> None:
    lines = {
        name: [line for line in found["log"] if line.startswith("attention: ")]
        for name, found in generated.items()
    }
    assert lines["stock"] == ["attention: vLLM's own (engine.attention: stock, the default)"]
    assert lines["batchllm"] == [
        "attention: batchllm (engine.attention), in plain torch on cpu, "
        "prefill in the same kernel (FlashAttention needs CUDA)"
    ]
