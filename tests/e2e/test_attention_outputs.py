"""Real vLLM on CPU with our attention and with its own: the same outputs, prefixes read once."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from support.demo_job import OFFLINE, Demo, demo_prompts

from batchllm_operator.demo import model as demo_model

TESTS = Path(__file__).parent.parent


def generate(attention: str, model: Path, folder: Path) -> dict[str, Any]:
    """What an attention gives for `prompts.json` in a folder, under our scheduler."""
    outputs = folder / f"{attention.replace('/', '-')}.json"
    arguments = [attention, model, folder / "prompts.json", outputs]
    path = [str(TESTS), *filter(None, [os.environ.get("PYTHONPATH")])]
    subprocess.run(
        [sys.executable, "-m", "support.attention_generate", *map(str, arguments)],
        env={**os.environ, **OFFLINE, "PYTHONPATH": os.pathsep.join(path)},
        cwd=folder,
        check=True,
        timeout=600,
    )
    return dict(json.loads(outputs.read_text()))


@pytest.fixture(scope="module")
def generated(demo: Demo, tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """What each attention gave for the demo table."""
    folder = tmp_path_factory.mktemp("attention")
    (folder / "prompts.json").write_text(json.dumps(demo_prompts(demo)))
    return {name: generate(name, demo.model, folder) for name in ("stock", "batchllm")}


def test_greedy_outputs_are_equal(generated: dict[str, dict[str, Any]]) -> None:
    ours = generated["batchllm"]["texts"]
    assert len(ours) >= 200
    assert all(error is None for _, error in ours)
    assert len({text for text, _ in ours}) > 20
    assert ours == generated["stock"]["texts"]


def test_prefixes_are_read_once_for_all_who_share_them(
    generated: dict[str, dict[str, Any]],
) -> None:
    ours = generated["batchllm"]
    assert ours["num_groups"] > 100
    assert ours["num_read"] < 0.7 * ours["num_asked"]
    assert generated["stock"]["num_asked"] == 0


def test_one_line_says_which_attention_runs(generated: dict[str, dict[str, Any]]) -> None:
    lines = {
        name: [line for line in found["log"] if line.startswith("attention: ")]
        for name, found in generated.items()
    }
    assert lines["stock"] == ["attention: vLLM's own (engine.attention: stock, the default)"]
    assert lines["batchllm"] == ["attention: batchllm (engine.attention), in plain torch on cpu"]


def test_the_gpus_kernel_gives_the_same_in_tritons_interpreter(
    demo: Demo, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("triton", reason="no Triton beside this vLLM")
    sizes = {"_HIDDEN_SIZE": 128, "_NUM_HEADS": 2, "_NUM_KV_HEADS": 1}  # heads of 64 elements
    for name, size in sizes.items():
        monkeypatch.setattr(demo_model, name, size)
    demo_model.build_demo_model(tmp_path / "model")
    prompts = demo_prompts(demo)[:12]
    (tmp_path / "prompts.json").write_text(json.dumps(prompts))
    stock, ours = (
        generate(name, tmp_path / "model", tmp_path) for name in ("stock", "batchllm/triton")
    )
    assert ours["texts"] == stock["texts"]
    assert len({text for text, _ in ours["texts"]}) > 2  # of three documents or so
    assert any("Triton on cpu" in line for line in ours["log"])
