"""The benchmark of peers: two contenders with the demo's model."""

from __future__ import annotations

from pathlib import Path

from support.benchmark_modules import run

from batchllm_operator.demo.model import build_demo_model


def test_both_answer_all_rows_alike_and_ours_computes_fewer_tokens(tmp_path: Path) -> None:
    build_demo_model(tmp_path / "model")
    sizes = ("--documents", "8", "--max-tokens", "4", "--runs", "1")
    names = ("--contenders", "llm", "ours", "--out", ".", "--plot", "bars.svg")
    report = run(tmp_path, "peers", "--model", "model", *sizes, *names)
    stock, ours = report["results"]
    assert stock["equal_texts"] == 1.0
    assert stock["num_texts"] == ours["num_texts"] == report["num_rows"] == 80
    assert 0 < ours["num_computed"] < stock["num_computed"] <= report["num_prompt_tokens"]
    assert stock["null"] == {"num_texts": 0, "num_rows": 19, "code": 1}
    assert ours["null"] == {"num_texts": 19, "num_rows": 19, "code": 0}
    assert ours["killed"]["num_texts"] == stock["killed"]["num_texts"] == 16
    table = (tmp_path / "peers_documents_cpu.md").read_text(encoding="utf-8")
    assert "| BatchLLM Operator | " in table.splitlines()[3]
    assert "BatchLLM Operator" in (tmp_path / "bars.svg").read_text(encoding="utf-8")
