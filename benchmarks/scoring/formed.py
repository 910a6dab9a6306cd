"""Answers by a JSON schema on this machine's CPU: which of them parse, and what it costs a step."""

from __future__ import annotations

from pathlib import Path
from statistics import median
from typing import Any, Final

import pyarrow.compute as pc
import pyarrow.parquet as pq

from batchllm_operator.commit.commit_run import commit_run
from batchllm_operator.plan.plan_job import plan_job
from batchllm_operator.spec import parse_spec
from benchmarks.scoring.measured import DS, ENGINE, TEMPLATES, Shape, run_child

SCHEMA: Final = {
    "type": "object",
    "properties": {
        "title": {"type": "string", "maxLength": 12},
        "stars": {"type": "integer", "minimum": 1, "maximum": 5},
        "price": {"type": "number", "minimum": 0, "maximum": 100},
        "kind": {"enum": ["bug", "feature", "question"]},
        "open": {"type": "boolean"},
        "tags": {"type": "array", "items": {"type": "string", "maxLength": 4}, "maxItems": 3},
    },
    "required": ["title", "stars", "price", "kind", "open", "tags"],
    "additionalProperties": False,
}
# A model with random weights would write spaces wherever it may.
_CONFIG: Final = {"backend": "xgrammar", "disable_any_whitespace": True}
_MAX_TOKENS: Final = 96


def formed(shape: Shape, repetitions: int) -> dict[str, Any]:
    """What answers by the schema are like, and scheduling of a step over that of stock vLLM."""
    order = sorted(range(len(shape.prompts)), key=shape.prompts.__getitem__)
    stock_job = {
        "engine": {**ENGINE, "model": str(shape.folder / "model")}
        | {"structured_outputs_config": _CONFIG},
        "params": {"max_tokens": _MAX_TOKENS, "schema": SCHEMA},
        "prompts": [shape.prompts[idx] for idx in order],
    }
    ours, stock = [], []
    for repetition in range(repetitions):
        uri, result = _run(shape, repetition)
        ours.append(result)
        stock.append(run_child(shape.folder, stock_job))
    table = pq.read_table(uri)
    ended = pc.equal(table["finish_reason"], "stop")
    parsed = pc.and_(ended, pc.equal(table["status"], "ok"))
    times = {
        name: median(each["sched_ms_per_step"] for each in runs)
        for name, runs in {"ours": ours, "stock": stock}.items()
    }
    return {
        "num_rows": table.num_rows,
        "num_ended": pc.sum(ended).as_py(),
        "num_ended_that_parse": pc.sum(parsed).as_py(),
        "num_equal_to_stock": sum(
            text == stock[-1]["texts"][place]
            for place, text in enumerate(table["generated_text"].take(order).to_pylist())
        ),
        "sched_ms_per_step": times["ours"],
        "stock_sched_ms_per_step": times["stock"],
        "sched_of_stock": round(
            median(
                our["sched_ms_per_step"] / their["sched_ms_per_step"]
                for our, their in zip(ours, stock, strict=True)
            ),
            3,
        ),
    }


def _run(shape: Shape, repetition: int) -> tuple[str, dict[str, float]]:
    """A job of its own: the output's folder, and the engine's times."""
    uri = str(shape.folder / "out" / f"formed-{repetition}")
    spec = {
        "spec_version": 1,
        "name": "formed",
        "input": {"uri": str(shape.folder / "documents"), "key": "snippet_id"},
        "prompt": {"template": TEMPLATES[shape.name]},
        "model": {"path": str(shape.folder / "model")},
        "response_format": {"type": "json_schema", "json_schema": SCHEMA},
        "sampling": {"max_tokens": _MAX_TOKENS},
        "output": {"uri": uri},
        "engine": {**ENGINE, "extra_args": {"structured_outputs_config": _CONFIG}},
        "max_failed_fraction": 1.0,
    }
    plan = plan_job(parse_spec(spec, source="benchmark"), DS)
    result = run_child(Path(shape.folder), {"plan": plan.folder.uri})
    commit_run(plan.folder.uri)
    return uri, result
