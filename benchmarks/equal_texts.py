"""How many greedy texts of a job are those of `vllm.LLM.generate`, by type of the numbers.

The prompts are the demo's: documents, each under several queries. Stock vLLM generates for them in
the table's order, and in another order, which is the control: how much it differs from itself. The
job goes through plan, run and commit. Where two texts of stock vLLM part, the margin is how much it
preferred its token to the other one, in log-probability.

    python -m benchmarks.equal_texts --model DIR                     # a folder or a hub's name
    python -m benchmarks.equal_texts --model DIR --dtypes float32    # the other is bfloat16
"""

from __future__ import annotations

import argparse
import gc
import json
import random
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import pyarrow.parquet as pq
from demo_table import build_demo_table

from batchllm_operator import commit_run, plan_job, run_worker
from batchllm_operator.engine.vllm.logs import without_llvmlite
from batchllm_operator.spec import load_spec
from benchmarks.provenance import print_last_line, provenance

DS: Final = "2026-01-31"
_TEMPLATE: Final = "{document}\n\nQuery: {query}\n\nAnswer:"
_MOST_DOCUMENT_CHARS: Final = 800  # so that a CPU is done in minutes
_NUM_LOGPROBS: Final = 8
_KV_BYTES: Final = 1 << 30


def make_table(folder: Path, num_rows: int) -> list[dict[str, Any]]:
    """Write `num_rows` of the demo's rows as a table, and return them."""
    build_demo_table(folder / "demo", ds=DS)
    table = pq.read_table(next((folder / "demo").rglob("*.parquet")))
    rows = [
        {**row, "document": row["document"][:_MOST_DOCUMENT_CHARS]}
        for row in table.slice(0, num_rows).to_pylist()
    ]
    partition = folder / "table" / f"ds={DS}"
    partition.mkdir(parents=True)
    pq.write_table(type(table).from_pylist(rows), partition / "rows.parquet")
    return rows


def job_texts(folder: Path, model: str, dtype: str, max_tokens: int) -> dict[str, str]:
    """The texts of a job over the table, by key."""
    out = folder / f"out-{dtype}"
    fields = {
        "spec_version": 1,
        "name": "texts",
        "input": {"uri": str(folder / "table"), "key": "snippet_id"},
        "prompt": {"template": _TEMPLATE},
        "model": {"path": model},
        "sampling": {"max_tokens": max_tokens},
        "engine": {"dtype": dtype, "kv_cache_memory_bytes": _KV_BYTES},
        # Of this process, which has had an engine.
        "planner": {"memory_budget_bytes": "16GiB"},
        "output": {"uri": str(out)},
    }
    uri = plan_job(load_spec(fields), DS).folder.uri
    run_worker(uri, 0, 1)
    commit_run(uri)
    rows = pq.read_table(out / f"ds={DS}" / "data.parquet").to_pylist()
    return {row["snippet_id"]: row["generated_text"] for row in rows}


def stock_outputs(
    rows: Sequence[dict[str, Any]], model: str, dtype: Any, max_tokens: int
) -> list[dict[str, Any]]:
    """Stock vLLM's outputs, by key: in the rows' order, and in another."""
    from vllm import LLM, SamplingParams
    from vllm.platforms import current_platform

    as_ours: dict[str, Any] = {"enforce_eager": True} if current_platform.is_cpu() else {}
    with without_llvmlite():
        llm = LLM(model, dtype=dtype, kv_cache_memory_bytes=_KV_BYTES, **as_ours)
    params = SamplingParams(temperature=0.0, max_tokens=max_tokens, logprobs=_NUM_LOGPROBS)
    found = []
    for order in (list(rows), random.Random(0).sample(list(rows), len(rows))):
        llm.reset_prefix_cache()
        outputs = llm.generate([_TEMPLATE.format(**row) for row in order], params, use_tqdm=False)
        pairs = zip(order, outputs, strict=True)
        found.append({row["snippet_id"]: output.outputs[0] for row, output in pairs})
    del llm
    gc.collect()
    return found


def margin(first: Any, second: Any) -> float | None:
    """How much the first preferred its token to the second's where they part; None: far more."""
    for mine, theirs, likely in zip(
        first.token_ids, second.token_ids, first.logprobs, strict=False
    ):
        if mine != theirs:
            return likely[mine].logprob - likely[theirs].logprob if theirs in likely else None
    return 0.0


def compare(args: argparse.Namespace, dtype: str, folder: Path) -> dict[str, Any]:
    """Shares of texts that differ from those of stock vLLM in the table's order."""
    rows = make_table(folder, args.rows)
    texts = job_texts(folder, args.model, dtype, args.max_tokens)
    first, second = stock_outputs(rows, args.model, dtype, args.max_tokens)
    parted = [key for key in first if first[key].text != second[key].text]
    margins = [margin(first[key], second[key]) for key in parted]
    known = [each for each in margins if each is not None]
    return {
        "dtype": dtype,
        "num_rows": len(rows),
        "job_differs": sum(first[key].text != texts[key] for key in first) / len(rows),
        "stock_in_another_order_differs": len(parted) / len(rows),
        "largest_margin": round(max(known), 4) if known else None,
        "num_beyond": len(margins) - len(known),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    parser.add_argument("--model", required=True, help="a folder, or a name on the hub")
    parser.add_argument("--rows", type=int, default=100)
    parser.add_argument("--max-tokens", type=int, default=32)
    parser.add_argument("--dtypes", nargs="+", default=["bfloat16", "float32"])
    args = parser.parse_args()
    results = []
    for dtype in args.dtypes:
        with tempfile.TemporaryDirectory(prefix="equal-texts-") as folder:
            results.append(compare(args, dtype, Path(folder)))
        print(json.dumps(results[-1]))
    print_last_line({**provenance(), "model": args.model, "results": results})


if __name__ == "__main__":
    main()
