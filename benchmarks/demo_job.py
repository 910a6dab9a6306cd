"""The demo job against stock vLLM: `python -m benchmarks.demo_job`.

Three policies over the demo table, each in a process of its own with the same engine settings and a
KV cache that holds a fraction of the documents, as a real job's does:

    stock_given    LLM.generate over the rows in table order
    stock_sorted   LLM.generate over the rows sorted by prompt
    batchllm       plan, run, commit

Gates on equal texts for every row, then prints one JSON object as its last line. The model
is tiny and runs on the CPU: computed tokens carry over to other machines, seconds don't.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path
from typing import Any, Final

import pyarrow.parquet as pq

from batchllm_operator.demo.model import build_demo_model
from batchllm_operator.demo.table import build_demo_table
from benchmarks.provenance import print_last_line, provenance_of_another_process
from benchmarks.scoring.measured import DS, run_child, run_job

SYSTEM: Final = "Write a short snippet of the document that answers the query.\n"
TEMPLATE: Final = "Document: {document}\nQuery: {query}\nSnippet:"
MAX_TOKENS: Final = 16
ENGINE: Final = {
    "dtype": "float32",
    "max_num_seqs": 32,
    "kv_cache_memory_bytes": 16 << 20,
    "block_size": 32,
    "enforce_eager": True,
}


def main() -> None:
    argparse.ArgumentParser(description=__doc__.splitlines()[0]).parse_args()
    with tempfile.TemporaryDirectory(prefix="batchllm-bench-") as name:
        folder = Path(name)
        build_demo_table(folder / "documents", ds=DS)
        build_demo_model(folder / "model")
        rows = pq.read_table(folder / "documents").to_pylist()
        prompts = [SYSTEM + TEMPLATE.format(**row) for row in rows]
        order = sorted(range(len(prompts)), key=prompts.__getitem__)
        given = run_stock(folder, prompts)
        by_prompt = run_stock(folder, [prompts[idx] for idx in order])
        ours = run_batchllm(folder)
    texts = given["texts"]
    wrong = sum(a != b for a, b in zip(texts, ours["texts"], strict=True))
    wrong += sum(texts[idx] != text for idx, text in zip(order, by_prompt["texts"], strict=True))
    if wrong:
        sys.exit(f"gate: {wrong} texts differ between policies")
    policies = {"stock_given": given, "stock_sorted": by_prompt, "batchllm": ours}
    for policy in policies.values():
        del policy["texts"]
        computed = policy["num_prompt_tokens"] - policy.pop("num_cached_tokens")
        policy["num_computed_tokens"] = computed
        policy["saving_ratio"] = round(1 - computed / policy["num_prompt_tokens"], 4)
    report = {
        "benchmark": "demo_job",
        "gate": "pass",
        "num_rows": len(rows),
        "num_documents": len({row["document"] for row in rows}),
        "policies": policies,
        "speedup_vs_stock_given": round(given["wall_s"] / ours["wall_s"], 3),
        "speedup_vs_stock_sorted": round(by_prompt["wall_s"] / ours["wall_s"], 3),
        "engine": ENGINE,
        "max_tokens": MAX_TOKENS,
    }
    print_last_line(report | provenance_of_another_process())


def run_stock(folder: Path, prompts: list[str]) -> dict[str, Any]:
    """`LLM.generate` in a process of its own."""
    engine = {**ENGINE, "model": str(folder / "model")}
    figures = run_child(
        folder, {"engine": engine, "params": {"max_tokens": MAX_TOKENS}, "prompts": prompts}
    )
    del figures["logprobs"]
    return figures


def run_batchllm(folder: Path) -> dict[str, Any]:
    """Plan, run and commit; `wall_s` is the shards' own generating time, as for stock."""
    fields = {
        "spec_version": 1,
        "name": "bench",
        "input": {"uri": str(folder / "documents"), "key": "snippet_id"},
        "prompt": {"system": SYSTEM, "template": TEMPLATE},
        "model": {"path": str(folder / "model")},
        "sampling": {"max_tokens": MAX_TOKENS},
        "output": {"uri": str(folder / "out")},
        "engine": ENGINE,
        "planner": {"part_rows": 100},
    }
    plan, table, figures = run_job(folder, fields)
    return {
        **figures,
        "texts": table["generated_text"].to_pylist(),
        "planned_saving_ratio": round(plan.manifest.counts.planned_saving_ratio, 4),
        "optimal_saving_ratio": round(plan.manifest.counts.optimal_saving_ratio, 4),
    }


if __name__ == "__main__":
    main()
