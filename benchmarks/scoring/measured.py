"""Labels on this machine's CPU: ours against `LLM.generate`, by turns, with equal engine settings.

The model is tiny: computed tokens carry over to other machines, seconds don't, ratios in part.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path
from statistics import median
from typing import Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray
from tokenizers import Tokenizer

from batchllm_operator.commit.commit_run import commit_run
from batchllm_operator.demo.model import build_demo_model
from batchllm_operator.demo.table import build_demo_table
from batchllm_operator.plan.plan_job import plan_job
from batchllm_operator.spec import parse_spec
from batchllm_operator.stored_plan.stored_plan import StoredPlan
from benchmarks.provenance import child_environment

DS: Final = "2026-01-31"
TEMPLATES: Final = {
    "document_first": "Document: {document}\nQuery: {query}\nGrade from 1 to 5:",
    "query_first": "Grade the document from 1 to 5.\nQuery: {query}\nDocument: {document}\nGrade:",
}
LABEL_VALUES: Final = {str(grade): float(grade) for grade in range(1, 6)}
ENGINE: Final = {
    "dtype": "float32",
    "max_num_seqs": 64,
    "max_num_batched_tokens": 2048,
    "kv_cache_memory_bytes": 64 << 20,
    "block_size": 32,
    "enforce_eager": True,
}
_TOLERANCE: Final = 1e-4


def _spec(folder: Path, name: str, repetition: int) -> dict[str, Any]:
    return {
        "spec_version": 1,
        "name": name,
        "input": {"uri": str(folder / "documents"), "key": "snippet_id"},
        "prompt": {"template": TEMPLATES[name]},
        "model": {"path": str(folder / "model")},
        "task": "classify",
        "label_values": LABEL_VALUES,
        "output": {"uri": str(folder / "out" / f"{name}-{repetition}")},
        "engine": ENGINE,
    }


def measured(folder: Path, name: str, repetitions: int) -> list[dict[str, Any]]:
    """A row for each policy: medians of the repetitions. Ends the process if probabilities differ.

    Args:
        folder: an empty one.
        name: of a template.
        repetitions: at least one.
    """
    build_demo_table(folder / "documents", ds=DS)
    build_demo_model(folder / "model")
    tokenizer = Tokenizer.from_file(str(folder / "model" / "tokenizer.json"))
    documents = pq.read_table(folder / "documents").to_pylist()
    encodings = tokenizer.encode_batch([TEMPLATES[name].format(**row) for row in documents])
    prompts = [encoding.ids for encoding in encodings]
    as_given = list(range(len(prompts)))
    in_order = sorted(as_given, key=prompts.__getitem__)
    runs: dict[str, list[dict[str, Any]]] = {}
    for repetition in range(repetitions):
        plan, table, ours = run_job(folder, _spec(folder, name, repetition))
        runs.setdefault("batchllm", []).append(ours)
        rows = table["probabilities"].to_pylist()
        probabilities = np.array([[row[label] for label in LABEL_VALUES] for row in rows])
        label_token_ids = list(plan.manifest.answers.label_token_ids)
        label = {"max_tokens": 1, "logprob_token_ids": label_token_ids}
        for policy, order, params in (
            ("stock_sorted", in_order, label),
            ("stock_given", as_given, label),
            ("stock_sorted_text", in_order, {"max_tokens": 4, "ignore_eos": True}),
            ("stock_sorted_json", in_order, {"max_tokens": 24, "ignore_eos": True}),
        ):
            engine = {**ENGINE, "model": str(folder / "model")}
            inputs = [{"prompt_token_ids": prompts[idx]} for idx in order]
            theirs = run_child(folder, {"engine": engine, "params": params, "prompts": inputs})
            if params is label:
                compare(probabilities[order], theirs["logprobs"])
            runs.setdefault(policy, []).append(theirs)
    about = {"workload": name, "num_rows": len(prompts)}
    return [about | _row(policy, runs[policy], runs["batchllm"]) for policy in runs]


def run_job(folder: Path, fields: dict[str, Any]) -> tuple[StoredPlan, pa.Table, dict[str, Any]]:
    """Plan, run in a process of its own, and commit: the plan, its table, and figures."""
    started_at = time.perf_counter()
    plan = plan_job(parse_spec(fields, source="benchmark"), DS)
    plan_s = time.perf_counter() - started_at
    figures = run_child(folder, {"plan": plan.folder.uri})
    started_at = time.perf_counter()
    report = commit_run(plan.folder.uri)
    num_tokens = plan.manifest.counts.num_logical_tokens
    figures |= {
        "plan_s": round(plan_s, 3),
        "commit_s": round(time.perf_counter() - started_at, 3),
        "num_prompt_tokens": num_tokens,
        "num_cached_tokens": num_tokens - report.done.num_computed_tokens,
    }
    return plan, pq.read_table(fields["output"]["uri"]), figures


def run_child(folder: Path, job: dict[str, Any]) -> dict[str, Any]:
    """`engine_child` in a process of its own, which vLLM runs in as a whole.

    Raises:
        subprocess.CalledProcessError: it failed.
    """
    (folder / "job.json").write_text(json.dumps(job))
    environment = {
        **child_environment(),
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_LOGGING_LEVEL": "ERROR",
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
    }
    module = "benchmarks.scoring.engine_child"
    paths = [str(folder / "job.json"), str(folder / "result.json")]
    with (folder / "child.log").open("wb") as log:
        subprocess.run(
            [sys.executable, "-W", "ignore", "-m", module, *paths],
            env=environment,
            check=True,
            stdout=log,
            stderr=log,
        )
    result: dict[str, Any] = json.loads((folder / "result.json").read_text())
    return result


def compare(ours: NDArray[np.float64], logprobs: list[list[float]]) -> None:
    """End the process if probabilities aren't those of the labels' log-probabilities."""
    weights = np.exp(np.array(logprobs))
    expected = weights / weights.sum(axis=1, keepdims=True)
    if (worst := float(np.abs(ours - expected).max())) > _TOLERANCE:
        sys.exit(f"gate: probabilities differ by up to {worst:.2g}; no figures")


def _row(policy: str, runs: list[dict[str, Any]], ours: list[dict[str, Any]]) -> dict[str, Any]:
    def of_ours(name: str) -> float:
        ratios = [run[name] / our[name] for run, our in zip(runs, ours, strict=True)]
        return float(round(median(ratios), 3))

    return {
        "policy": policy,
        "num_prompt_tokens": runs[0]["num_prompt_tokens"],
        "computed_tokens": runs[0]["num_prompt_tokens"] - runs[0]["num_cached_tokens"],
        **{
            name: round(median(run[name] for run in runs), 3)
            for name in ("wall_s", "cpu_s", "steps")
        },
        "wall_of_ours": of_ours("wall_s"),
        "cpu_of_ours": of_ours("cpu_s"),
        "all_wall_s": [run["wall_s"] for run in runs],
    }
