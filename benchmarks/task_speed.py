"""A job's time in `run`, engine started, over that of `vllm.LLM` with the same prompts, by task.

Both get the plan's prompts in its order, and settings from the same spec, in one process and in
turns; the figures are the median of the pairs' ratios, in seconds and in CPU seconds. `classify` is
beside `LLM.generate` of one token with the same `logprob_token_ids`, `embed` beside `LLM.embed`,
`several`, a job of four prompts, beside `LLM.generate` and beside a job for each prompt. A job's
answers must be those of its first run.

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
import pyarrow.compute as pc
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
PROMPTS: Final[dict[str, dict[str, Any]]] = {
    "summary": {"template": "{document}\n\nIn two sentences:", "sampling": _SAMPLING},
    "answer": {"template": "{document}\n\nQuery: {query}\n\nAnswer:", "sampling": _SAMPLING},
    "topic": {
        "template": "{document}\n\nTopic:",
        "response_format": {"type": "choice", "choices": ["software", "science", "other"]},
        "sampling": {"max_tokens": 8},
    },
    "relevant": {
        "template": "{document}\n\nQuery: {query}\n\nRelevant?",
        "task": "classify",
        "labels": {"yes": " yes", "no": " no"},
    },
}
_TASKS: Final[dict[str, dict[str, Any]]] = {
    "several": {"prompts": PROMPTS},
    "generate": {"sampling": _SAMPLING},
    "classify": {"task": "classify", "labels": {"yes": " yes", "no": " no", "unsure": " maybe"}},
    "embed": {"task": "embed"},
}


def make_job(folder: Path, args: argparse.Namespace) -> JobSpec:
    make_table(folder, args.rows)
    asked = {} if args.task == "several" else {"prompt": {"template": _TEMPLATES[args.prompts]}}
    return load_spec(
        {
            **asked,
            "spec_version": 1,
            "name": "speed",
            "input": {"uri": str(folder / "table"), "key": "snippet_id"},
            "model": {"path": args.model},
            "engine": {"dtype": "float32", "kv_cache_memory_bytes": 1 << 29},
            "planner": {"memory_budget_bytes": "16GiB"},  # this process has had an engine
            "output": {"uri": str(folder / "out")},
            **_TASKS[args.task],
        }
    )


class Job:
    """A plan, made again for each run, and the engine that stays; jobs may share their engine."""

    def __init__(self, spec: JobSpec, folder: Path, other: "Job | None" = None) -> None:
        self._spec, self._folder, self._num_runs = spec, folder, 0
        self._engine: Any = None if other is None else other._engine
        self._begun, self.num_computed = clocks(), 0

    def run(self) -> tuple[StoredPlan, NDArray[np.float64], list[Any]]:
        """Plan, run and commit: the plan, what `run` took with its engine, and the answers.

        Sets `num_computed`, prompt tokens.
        """
        self._num_runs += 1
        out = self._folder / f"{self._num_runs}"
        output = self._spec.output.model_copy(update={"uri": str(out)})
        plan = plan_job(self._spec.model_copy(update={"output": output}), DS)
        run_worker(plan, start=self._start)
        spent = clocks() - self._begun
        self.num_computed = commit_run(plan).done.num_computed_tokens
        rows = pq.read_table(out / f"ds={DS}" / "data.parquet").sort_by("snippet_id")
        name = {"embed": "embedding", "classify": "probabilities"}.get(self._spec.task)
        structs = [rows[name].combine_chunks() for name in self._spec.prompts]
        texts = [struct.field("generated_text").to_pylist() for struct in structs]
        return plan, spent, texts or rows[name or "generated_text"].to_pylist()

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
    from vllm import LLM

    from batchllm_operator.engine.vllm.answers import VLLMAnswers
    from batchllm_operator.engine.vllm.logs import without_llvmlite
    from batchllm_operator.engine.vllm.start import engine_args

    args = engine_args(spec, plan.manifest.max_model_len)
    args.pop("scheduler_cls", None)
    with without_llvmlite():
        llm = LLM(**args)
    job = EngineJob(plan.manifest.max_model_len, answers=plan.manifest.planned_answers)
    of_question = [answers.params for answers in VLLMAnswers.of_all(spec, job)]
    prompts, params = list[Any](), list[Any]()
    for idx in range(len(plan.manifest.shards)):
        with plan.open_shard(idx) as file:
            table = file.read(columns=["row_idxs", "prompt_token_ids"])
        prompts += [{"prompt_token_ids": ids} for ids in table["prompt_token_ids"].to_pylist()]
        asks = pc.list_element(table["row_idxs"], 0).to_pylist()
        params += [of_question[ask % len(of_question)] for ask in asks]

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
        against = against_jobs(spec, job, Path(folder), args.pairs) if spec.prompts else {}
    medians = np.median(ratios, axis=0).round(3).tolist()
    found = dict(zip(("time", "cpu"), medians, strict=True))
    print_last_line({**provenance(), **vars(args), "job_over_stock": found, **against})


def against_jobs(spec: JobSpec, job: Job, folder: Path, pairs: int) -> dict[str, Any]:
    """The job's time and computed prompt tokens over those of a job for each prompt."""
    singles = [Job(each, folder / f"single-{n}", job) for n, each in enumerate(spec.questions)]
    ratios = []
    for _ in range(pairs):
        ours = job.run()[1]
        theirs = sum(single.run()[1] for single in singles)
        ratios.append(ours / theirs)
        print(json.dumps({"jobs": theirs.tolist(), "job": ours.tolist()}), flush=True)
    num_alone = sum(single.num_computed for single in singles)
    medians = np.median(ratios, axis=0).round(3).tolist()
    found = dict(zip(("time", "cpu"), medians, strict=True))
    found["computed_tokens"] = [job.num_computed, num_alone]
    return {"job_over_jobs": found}


if __name__ == "__main__":
    main()
