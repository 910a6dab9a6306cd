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
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import yaml

from batchllm_operator.demo.model import build_demo_model
from batchllm_operator.demo.table import build_demo_table
from benchmarks.provenance import provenance

DS = "2026-01-31"
SYSTEM = "Write a short snippet of the document that answers the query.\n"
TEMPLATE = "Document: {document}\nQuery: {query}\nSnippet:"

_STOCK = """
import json, sys, time
from vllm import LLM, SamplingParams
job = json.load(open(sys.argv[1]))
llm = LLM(disable_log_stats=True, **job["engine"])
llm.generate(["warm-up"], SamplingParams(max_tokens=2), use_tqdm=False)
started_at = time.perf_counter()
params = SamplingParams(temperature=0.0, max_tokens=job["max_tokens"])
outputs = llm.generate(job["prompts"], params, use_tqdm=False)
generate_s = time.perf_counter() - started_at
json.dump({
    "generate_s": generate_s,
    "texts": [o.outputs[0].text for o in outputs],
    "num_prompt_tokens": sum(len(o.prompt_token_ids) for o in outputs),
    "num_cached_tokens": sum(o.num_cached_tokens or 0 for o in outputs),
}, open(sys.argv[2], "w"))
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--max-tokens", type=int, default=16)
    parser.add_argument("--kv-cache-mib", type=int, default=16)
    parser.add_argument("--max-num-seqs", type=int, default=32)
    args = parser.parse_args()
    engine = {
        "dtype": "float32",
        "max_num_seqs": args.max_num_seqs,
        "kv_cache_memory_bytes": args.kv_cache_mib << 20,
        "block_size": 32,
        "enforce_eager": True,
    }
    with tempfile.TemporaryDirectory(prefix="batchllm-bench-") as name:
        folder = Path(name)
        build_demo_table(folder / "documents", ds=DS)
        build_demo_model(folder / "model")
        rows = pq.read_table(folder / "documents").to_pylist()
        prompts = [SYSTEM + TEMPLATE.format(**row) for row in rows]
        stock = {**engine, "model": str(folder / "model")}
        order = sorted(range(len(prompts)), key=prompts.__getitem__)
        given = _run_stock(folder, stock, prompts, args.max_tokens)
        by_prompt = _run_stock(folder, stock, [prompts[idx] for idx in order], args.max_tokens)
        ours = _run_batchllm(folder, engine, args.max_tokens)

    texts = given.pop("texts")
    sorted_texts = by_prompt.pop("texts")
    our_texts = ours.pop("texts")
    wrong = sum(a != b for a, b in zip(texts, our_texts, strict=True))
    wrong += sum(texts[idx] != text for idx, text in zip(order, sorted_texts, strict=True))
    if wrong:
        sys.exit(f"gate: {wrong} texts differ between policies")
    policies = {"stock_given": given, "stock_sorted": by_prompt, "batchllm": ours}
    for policy in policies.values():
        computed = policy["num_prompt_tokens"] - policy.pop("num_cached_tokens")
        policy["num_computed_tokens"] = computed
        policy["saving_ratio"] = round(1 - computed / policy["num_prompt_tokens"], 4)
        policy["generate_s"] = round(policy["generate_s"], 3)
    result = {
        "gate": "pass",
        "device": "cpu",
        "num_rows": len(rows),
        "num_documents": len({row["document"] for row in rows}),
        "policies": policies,
        "speedup_vs_stock_given": round(given["generate_s"] / ours["generate_s"], 3),
        "speedup_vs_stock_sorted": round(by_prompt["generate_s"] / ours["generate_s"], 3),
        "engine": engine,
        "max_tokens": args.max_tokens,
        "repetitions": 1,
        **provenance(),
    }
    print(json.dumps(result))


def _run_stock(
    folder: Path, engine: dict[str, Any], prompts: list[str], max_tokens: int
) -> dict[str, Any]:
    """`LLM.generate` in a process of its own; engine start and one warm-up prompt not timed."""
    job, result = folder / "stock.json", folder / "stock-result.json"
    job.write_text(json.dumps({"engine": engine, "prompts": prompts, "max_tokens": max_tokens}))
    environment = {
        **os.environ,
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_LOGGING_LEVEL": "ERROR",
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
    }
    subprocess.run(
        [sys.executable, "-W", "ignore", "-c", _STOCK, str(job), str(result)],
        env=environment,
        check=True,
        stderr=subprocess.DEVNULL,
    )
    outcome: dict[str, Any] = json.loads(result.read_text())
    return outcome


def _run_batchllm(folder: Path, engine: dict[str, Any], max_tokens: int) -> dict[str, Any]:
    """The three commands; `generate_s` is the shard's own generating time, as for stock."""
    spec = {
        "spec_version": 1,
        "name": "bench",
        "input": {"uri": "documents", "key": "snippet_id"},
        "prompt": {"system": SYSTEM, "template": TEMPLATE},
        "model": {"path": "./model"},
        "sampling": {"max_tokens": max_tokens},
        "output": {"uri": "out"},
        "engine": engine,
        "planner": {"part_rows": 100},
    }
    (folder / "job.yaml").write_text(yaml.safe_dump(spec))
    started_at = time.perf_counter()
    plan = _batchllm(folder, "plan", "--job", str(folder / "job.yaml"), "--ds", DS)
    plan_s = time.perf_counter() - started_at
    _batchllm(folder, "run", "--plan", plan["plan_uri"])
    started_at = time.perf_counter()
    report = _batchllm(folder, "commit", "--plan", plan["plan_uri"])
    return {
        "generate_s": report["engine_s"],
        "plan_command_s": round(plan_s, 3),
        "commit_command_s": round(time.perf_counter() - started_at, 3),
        "texts": pq.read_table(folder / "out")["generated_text"].to_pylist(),
        "num_prompt_tokens": report["num_logical_tokens"],
        "num_cached_tokens": report["num_logical_tokens"] - report["num_computed_tokens"],
        "planned_saving_ratio": round(report["planned_saving_ratio"], 4),
        "optimal_saving_ratio": round(report["optimal_saving_ratio"], 4),
    }


def _batchllm(folder: Path, *args: str) -> dict[str, Any]:
    result = folder / "result.json"
    subprocess.run(
        [sys.executable, "-P", "-m", "batchllm_operator", *args, "--result", str(result)],
        check=True,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    outcome: dict[str, Any] = json.loads(result.read_text())
    return outcome


if __name__ == "__main__":
    main()
