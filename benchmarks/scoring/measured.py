"""Labels on this machine's CPU: ours against `LLM.generate`, by turns, with equal engine settings.

The model is tiny: computed tokens carry over to other machines, seconds don't, ratios in part.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any, Final

import numpy as np
import pyarrow.parquet as pq
from tokenizers import Tokenizer

from batchllm_operator.commit.commit_run import commit_run
from batchllm_operator.demo.model import build_demo_model
from batchllm_operator.demo.table import build_demo_table
from batchllm_operator.plan.plan_job import plan_job
from batchllm_operator.spec import parse_spec

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


@dataclass(frozen=True, slots=True)
class Shape:
    """The rows of one template: in the table's order, as prompts."""

    name: str
    folder: Path
    prompts: list[list[int]]
    label_token_ids: tuple[int, ...]
    plan_uri: str


class GateError(Exception):
    """Policies differ in what they answer: there are no figures."""


def prepare(folder: Path, name: str) -> Shape:
    """A table, a model and a plan in `folder`."""
    build_demo_table(folder / "documents", ds=DS)
    build_demo_model(folder / "model")
    template = TEMPLATES[name]
    plan = plan_job(parse_spec(_spec(folder, name), source="benchmark"), DS)
    tokenizer = Tokenizer.from_file(str(folder / "model" / "tokenizer.json"))
    rows = pq.read_table(folder / "documents").to_pylist()
    encodings = tokenizer.encode_batch([template.format(**row) for row in rows])
    return Shape(
        name,
        folder,
        [encoding.ids for encoding in encodings],
        plan.manifest.answers.label_token_ids,
        plan.folder.uri,
    )


def _spec(folder: Path, name: str) -> dict[str, Any]:
    return {
        "spec_version": 1,
        "name": name,
        "input": {"uri": str(folder / "documents"), "key": "snippet_id"},
        "prompt": {"template": TEMPLATES[name]},
        "model": {"path": str(folder / "model")},
        "task": "classify",
        "label_values": LABEL_VALUES,
        "output": {"uri": str(folder / "out" / name)},
        "engine": ENGINE,
    }


def measured(shape: Shape, repetitions: int) -> list[dict[str, Any]]:
    """A row for each policy: medians of the repetitions.

    Raises:
        GateError: a row's probabilities differ.
    """
    as_given = list(range(len(shape.prompts)))
    in_order = sorted(as_given, key=shape.prompts.__getitem__)
    label = {"max_tokens": 1, "logprob_token_ids": list(shape.label_token_ids)}
    stock: dict[str, tuple[list[int], dict[str, Any]]] = {
        "stock_sorted": (in_order, label),
        "stock_given": (as_given, label),
        "stock_sorted_text": (in_order, {"max_tokens": 4, "ignore_eos": True}),
        "stock_sorted_json": (in_order, {"max_tokens": 24, "ignore_eos": True}),
    }
    runs: dict[str, list[dict[str, Any]]] = {name: [] for name in ("batchllm", *stock)}
    for repetition in range(repetitions):
        runs["batchllm"].append(_ours(shape, repetition))
        for policy, (order, params) in stock.items():
            engine = {**ENGINE, "model": str(shape.folder / "model")}
            prompts = [{"prompt_token_ids": shape.prompts[idx]} for idx in order]
            job = {"engine": engine, "params": params, "prompts": prompts}
            runs[policy].append(run_child(shape.folder, job))
    probabilities = runs["batchllm"][-1]["probabilities"]
    for policy in ("stock_sorted", "stock_given"):
        for theirs in runs[policy]:
            _compare(probabilities, stock[policy][0], theirs["logprobs"])
    return [_row(shape, policy, runs[policy], runs["batchllm"]) for policy in runs]


def _ours(shape: Shape, repetition: int) -> dict[str, Any]:
    """One run of a plan of its own."""
    spec = _spec(shape.folder, shape.name)
    spec["output"] = {"uri": f"{spec['output']['uri']}-{repetition}"}
    plan = plan_job(parse_spec(spec, source="benchmark"), DS)
    result = run_child(shape.folder, {"plan": plan.folder.uri})
    report = commit_run(plan.folder.uri)
    table = pq.read_table(spec["output"]["uri"])
    probabilities = table["probabilities"].to_pylist()
    return {
        **result,
        "probabilities": [[row[label] for label in LABEL_VALUES] for row in probabilities],
        "num_cached_tokens": report.plan.num_logical_tokens - report.done.num_computed_tokens,
    }


def run_child(folder: Path, job: dict[str, Any]) -> dict[str, Any]:
    """`engine_child` in a process of its own, which vLLM runs in as a whole.

    Raises:
        subprocess.CalledProcessError: it failed.
    """
    (folder / "job.json").write_text(json.dumps(job))
    environment = {
        **os.environ,
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


def _compare(ours: list[list[float]], order: Sequence[int], theirs: list[list[float]]) -> None:
    weights = np.exp(np.array(theirs))
    expected = weights / weights.sum(axis=1, keepdims=True)
    found = np.array(ours)[list(order)]
    if (worst := float(np.abs(found - expected).max())) > _TOLERANCE:
        raise GateError(f"probabilities differ by up to {worst:.2g}")


def _row(
    shape: Shape, policy: str, runs: list[dict[str, Any]], ours: list[dict[str, Any]]
) -> dict[str, Any]:
    num_tokens = sum(map(len, shape.prompts))

    def of_ours(name: str) -> float:
        ratios = [run[name] / our[name] for run, our in zip(runs, ours, strict=True)]
        return float(round(median(ratios), 3))

    return {
        "workload": shape.name,
        "policy": policy,
        "num_rows": len(shape.prompts),
        "num_prompt_tokens": num_tokens,
        "computed_tokens": num_tokens - runs[0]["num_cached_tokens"],
        **{
            name: round(median(run[name] for run in runs), 3)
            for name in ("wall_s", "cpu_s", "steps")
        },
        "wall_of_ours": of_ours("wall_s"),
        "cpu_of_ours": of_ours("cpu_s"),
        "all_wall_s": [run["wall_s"] for run in runs],
    }
