"""Real vLLM on CPU with the GPU's kernel in Triton's interpreter: the outputs of its own."""

import json
from pathlib import Path

import demo_model
import pytest
from support.attention_generate import generate_with
from support.demo_job import Demo, demo_prompts


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
        generate_with(demo, name, tmp_path / "model", tmp_path)
        for name in ("stock", "batchllm/triton")
    )
    assert ours["texts"] == stock["texts"]
    assert len({text for text, _ in ours["texts"]}) > 2  # of three documents or so
    assert any("Triton on cpu" in line for line in ours["log"])
