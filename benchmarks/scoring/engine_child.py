"""Run as a script: one policy over one job, its time and what it answered.

    python -m benchmarks.scoring.engine_child JOB RESULT

JOB is JSON: `plan` (a plan's folder, for ours) or `prompts` (of each row, for vLLM's
`LLM.generate`), with `engine` (vLLM's arguments) and `params` (of its sampling). The start of the
engine and a first prompt aren't timed.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from benchmarks.end_to_end.step_log import StepLog


class Usage:
    """Wall and CPU seconds of this process, and the engine's steps meanwhile."""

    def __init__(self) -> None:
        self.wall_s = self.cpu_s = 0.0
        self.steps = 0

    @contextmanager
    def of(self, scheduler: Any) -> Iterator[None]:
        """Add what is done in the block."""
        log = StepLog(scheduler)
        log.start()
        wall_at, cpu_at = time.perf_counter(), time.process_time()
        yield
        self.wall_s += time.perf_counter() - wall_at
        self.cpu_s += time.process_time() - cpu_at
        self.steps += len(log.stop().num_tokens)

    def to_json(self) -> dict[str, float]:
        return {
            "wall_s": round(self.wall_s, 3),
            "cpu_s": round(self.cpu_s, 3),
            "steps": self.steps,
        }


def stock(job: dict[str, Any]) -> dict[str, Any]:
    """`LLM.generate` over the prompts, in their order."""
    from vllm import LLM, SamplingParams

    sys.modules.pop("llvmlite.binding.ffi", None)  # vLLM stumbles over it: see VLLMEngine
    llm = LLM(disable_log_stats=True, **job["engine"])
    params = SamplingParams(temperature=0.0, **job["params"])
    llm.generate(["warm-up"], params, use_tqdm=False)
    usage = Usage()
    core: Any = llm.llm_engine.engine_core
    with usage.of(core.engine_core.scheduler):
        outputs: Any = llm.generate(job["prompts"], params, use_tqdm=False)
    wanted = job["params"].get("logprob_token_ids") or ()
    return {
        **usage.to_json(),
        "logprobs": [
            [output.outputs[0].logprobs[0][token_id].logprob for token_id in wanted]
            for output in outputs
        ],
        "texts": [output.outputs[0].text for output in outputs],
        "num_prompt_tokens": sum(len(output.prompt_token_ids) for output in outputs),
        "num_cached_tokens": sum(output.num_cached_tokens or 0 for output in outputs),
    }


def ours(job: dict[str, Any]) -> dict[str, Any]:
    """All shards of a plan, with parts written; the answers are in the lake."""
    from batchllm_operator.engine import EngineJob, EngineOutput, EngineRequest
    from batchllm_operator.engine.vllm.engine import VLLMEngine
    from batchllm_operator.run.run_shards import run_worker
    from batchllm_operator.spec import JobSpec

    usage = Usage()

    class TimedEngine(VLLMEngine):
        def stream(self, requests: Iterator[EngineRequest]) -> Iterator[EngineOutput]:
            engine = self.llm_engine
            with self._unpaced():  # vLLM compiles what gathers log-probabilities
                engine.add_request("warm-up", {"prompt_token_ids": [1, 2]}, self._answers.params)
                while engine.has_unfinished_requests():
                    engine.step()
            with usage.of(engine.engine_core.engine_core.scheduler):
                yield from super().stream(requests)

    def start(spec: JobSpec, engine_job: EngineJob) -> TimedEngine:
        return TimedEngine(spec, engine_job)

    run_worker(job["plan"], 0, 1, start=start)
    return usage.to_json()


def main(job_path: str, result_path: str) -> None:
    job = json.loads(Path(job_path).read_text())
    result = ours(job) if "plan" in job else stock(job)
    Path(result_path).write_text(json.dumps(result))


if __name__ == "__main__":
    main(*sys.argv[1:])
