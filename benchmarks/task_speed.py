"""A job's time in `run`, engine started, over that of `vllm.LLM` with the same prompts, by task.

Both get the plan's prompts in its order, and settings from the same spec, in one process and in
turns; the figures are the median of the pairs' ratios, in seconds and in CPU seconds. `classify` is
beside `LLM.generate` of one token with the same `logprob_token_ids`, `embed` beside `LLM.embed`. A
job's answers must be those of its first run.

    python -m benchmarks.task_speed --model DIR --task classify
    python -m benchmarks.task_speed --model DIR --task generate --prompts few_shot
"""

import argparse
import json
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import numpy as np
import pyarrow.parquet as pq
from numpy.typing import NDArray

from batchllm_operator import commit_run, plan_job, run_worker
from batchllm_operator.engine import EngineJob
from batchllm_operator.spec import JobSpec, load_spec
from batchllm_operator.stored_plan.stored_plan import StoredPlan
from benchmarks.equal_texts import DS, make_table
from benchmarks.provenance import print_last_line, provenance

_EXAMPLES: Final = "".join(f"Question: What is {n} + {n}?\nAnswer: {2 * n}\n\n" for n in range(60))
_TEMPLATES: Final = {
    "documents": "{document}\n\nQuery: {query}\n\nAnswer:",
    "few_shot": _EXAMPLES + "Question: What is {query} of {package}?\nAnswer:",
    "short": "{package}: {query}",
}
_SAMPLING: Final[dict[str, Any]] = {"max_tokens": 32, "ignore_eos": True}
_TASKS: Final[dict[str, dict[str, Any]]] = {
    "generate": {"sampling": _SAMPLING},
    "classify": {"task": "classify", "labels": {"yes": " yes", "no": " no", "unsure": " maybe"}},
    "embed": {"task": "embed"},
}


def make_job(folder: Path, args: argparse.Namespace) -> JobSpec:
    make_table(folder, args.rows)
    return load_spec(
        {
            "spec_version": 1,
            "name": "speed",
            "input": {"uri": str(folder / "table"), "key": "snippet_id"},
            "prompt": {"template": _TEMPLATES[args.prompts]},
            "model": {"path": args.model},
            "engine": {"dtype": "float32", "kv_cache_memory_bytes": 1 << 29},
            "planner": {"memory_budget_bytes": "16GiB"},  # this process has had an engine
            "output": {"uri": str(folder / "out")},
            **_TASKS[args.task],
        }
    )


class Job:
    """A plan, made again for each run, and the engine that stays."""

    def __init__(self, spec: JobSpec, folder: Path) -> None:
        self._spec, self._folder, self._num_runs = spec, folder, 0
        self._engine: Any = None
        self._begun = clocks()

    def run(self) -> tuple[StoredPlan, NDArray[np.float64], list[Any]]:
        """Plan, run and commit: the plan, what `run` took with its engine, and the answers."""
        self._num_runs += 1
        out = self._folder / f"{self._num_runs}"
        output = self._spec.output.model_copy(update={"uri": str(out)})
        plan = plan_job(self._spec.model_copy(update={"output": output}), DS)
        run_worker(plan, start=self._start)
        spent = clocks() - self._begun
        commit_run(plan)
        rows = pq.read_table(out / f"ds={DS}" / "data.parquet").sort_by("snippet_id")
        name = {"embed": "embedding", "classify": "probabilities"}.get(self._spec.task)
        return plan, spent, rows[name or "generated_text"].to_pylist()

    def _start(self, spec: JobSpec, job: EngineJob) -> Any:
        from batchllm_operator.engine.vllm.engine import VLLMEngine

        if self._engine is None:
            self._engine = VLLMEngine(spec, job)
            self._engine.close = lambda: None
        else:
            self._engine.begin(job, spec)
        self._begun = clocks()
        return self._engine


def clocks() -> NDArray[np.float64]:
    return np.array([time.perf_counter(), time.process_time()])


def stock_runner(spec: JobSpec, plan: StoredPlan) -> Callable[[], NDArray[np.float64]]:
    """A function that runs stock vLLM over the plan's prompts; returns seconds, CPU seconds."""
    from vllm import LLM, SamplingParams

    from batchllm_operator.engine.vllm.logs import without_llvmlite
    from batchllm_operator.engine.vllm.start import engine_args

    args = engine_args(spec, plan.manifest.max_model_len)
    args.pop("scheduler_cls", None)
    with without_llvmlite():
        llm = LLM(**args)
    prompts: list[Any] = []
    for idx in range(len(plan.manifest.shards)):
        with plan.open_shard(idx) as file:
            token_ids = file.read(columns=["prompt_token_ids"])["prompt_token_ids"].to_pylist()
        prompts += [{"prompt_token_ids": ids} for ids in token_ids]
    label_ids = list(plan.manifest.answers.label_token_ids)
    fields = {"max_tokens": 1, "logprob_token_ids": label_ids} if label_ids else _SAMPLING
    params = SamplingParams(temperature=0.0, **fields)

    def run() -> NDArray[np.float64]:
        llm.reset_prefix_cache()
        begun = clocks()
        if spec.task == "embed":
            llm.embed(prompts, use_tqdm=False)
        else:
            llm.generate(prompts, params, use_tqdm=False)
        return clocks() - begun

    return run


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    parser.add_argument("--model", required=True, help="a folder, such as ./.models/smollm2")
    parser.add_argument("--task", choices=list(_TASKS), required=True)
    parser.add_argument("--prompts", choices=list(_TEMPLATES), default="documents")
    parser.add_argument("--rows", type=int, default=300, help="of the demo's table")
    parser.add_argument("--pairs", type=int, default=5)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="task-speed-") as folder:
        spec = make_job(Path(folder), args)
        job = Job(spec, Path(folder))
        plan, _, first = job.run()
        stock = stock_runner(spec, plan)
        stock()
        ratios = []
        for _ in range(args.pairs):
            theirs, (_, ours, answers) = stock(), job.run()
            if answers != first:
                raise SystemExit("the job's answers aren't those of its first run")
            ratios.append(ours / theirs)
            print(json.dumps({"stock": theirs.tolist(), "job": ours.tolist()}), flush=True)
    medians = np.median(ratios, axis=0).round(3).tolist()
    found = dict(zip(("time", "cpu"), medians, strict=True))
    print_last_line({**provenance(), **vars(args), "job_over_stock": found})


if __name__ == "__main__":
    main()
