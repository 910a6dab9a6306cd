"""Where the time of some engine steps goes, by kernel: the torch profiler over the midst of a run.

python -m benchmarks.end_to_end.profile_steps batchllm case_1
python -m benchmarks.end_to_end.profile_steps stock_sorted case_1 --first 150 --steps 20
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from batchllm_operator.engine import EngineJob
from batchllm_operator.spec import SamplingSpec
from benchmarks.end_to_end.engine_run import Prompts, Task, make_spec
from benchmarks.end_to_end.models import MODELS, TINY, write_model
from benchmarks.end_to_end.policies import POLICIES, SETTINGS
from benchmarks.end_to_end.requests import make_requests
from benchmarks.provenance import provenance
from benchmarks.workloads import WORKLOADS

_MOST_ROWS = 25


class StepProfiler:
    """Profiles steps `first` to `first + num_steps - 1` of a scheduler's run.

    Args:
        scheduler: of vLLM's engine core in this process; its `schedule` is replaced.
        first: number of the first step, from 0.
        num_steps: how many.
    """

    def __init__(self, scheduler: Any, first: int, num_steps: int) -> None:
        from torch import cuda
        from torch.profiler import ProfilerActivity, profile

        activities = [ProfilerActivity.CPU]
        if cuda.is_available():
            activities.append(ProfilerActivity.CUDA)
        self._profile = profile(activities=activities)
        self._on_gpu = cuda.is_available()
        self._schedule = scheduler.schedule
        self._first, self._end = first, first + num_steps
        self._step = 0
        self.num_tokens: list[int] = []
        """Of each step that was profiled."""
        scheduler.schedule = self._noted

    def _noted(self, *args: Any, **kwargs: Any) -> Any:
        if self._step == self._first:
            self._synchronize()
            self._profile.start()
        elif self._step == self._end:
            self._synchronize()
            self._profile.stop()
        output = self._schedule(*args, **kwargs)
        if self._first <= self._step < self._end:
            self.num_tokens.append(output.total_num_scheduled_tokens)
        self._step += 1
        return output

    def _synchronize(self) -> None:
        if self._on_gpu:
            from torch import cuda

            cuda.synchronize()

    def rows(self) -> list[dict[str, Any]]:
        """Kernels (operators on a CPU) by time, the longest first.

        Raises:
            RuntimeError: the run ended before its last step to profile.
        """
        if self._step <= self._end:
            raise RuntimeError(f"the run had {self._step} steps; choose --first and --steps lower")
        name = "self_device_time_total" if self._on_gpu else "self_cpu_time_total"
        found = [(getattr(each, name), each) for each in self._profile.key_averages()]
        total = sum(time for time, _ in found) or 1.0
        found.sort(key=lambda pair: -pair[0])
        return [
            {
                "name": each.key[:120],
                "calls": each.count,
                "ms_per_step": round(time / 1e3 / len(self.num_tokens), 4),
                "share": round(time / total, 4),
            }
            for time, each in found[:_MOST_ROWS]
        ]


def profile_run(task: Task, workload: str, first: int, num_steps: int) -> dict[str, Any]:
    """Run a workload, and profile some of its steps."""
    from batchllm_operator.engine.vllm_engine import VLLMEngine

    prompts = Prompts.of(task, workload)
    with tempfile.TemporaryDirectory(prefix="batchllm-bench-") as folder:
        spec = make_spec(task, write_model(task.model, Path(folder)))
        engine = VLLMEngine(spec, EngineJob(max_model_len=prompts.max_model_len))
    try:
        block_size = int(engine.llm_engine.vllm_config.cache_config.block_size)
        order = POLICIES[task.policy].order
        planned = make_requests(prompts.tokens, order, prompts.output_tokens, block_size)
        job = EngineJob(prompts.max_model_len, num_requests=len(planned.requests))
        engine.begin(job, SamplingSpec(max_tokens=prompts.output_tokens, ignore_eos=True))
        profiler = StepProfiler(
            engine.llm_engine.engine_core.engine_core.scheduler, first, num_steps
        )
        for _ in engine.stream(iter(planned.requests)):
            pass
        rows = profiler.rows()
        return {"num_tokens": profiler.num_tokens, "kernels": rows}
    finally:
        engine.close()


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__.partition("\n\n")[0],
        prog="python -m benchmarks.end_to_end.profile_steps",
    )
    parser.add_argument("policy", choices=list(POLICIES))
    parser.add_argument("workload", choices=list(WORKLOADS))
    parser.add_argument("--settings", default="default", choices=list(SETTINGS))
    parser.add_argument("--model", default="Mistral-7B", choices=MODELS)
    parser.add_argument("--share", type=float, default=0.4, help="of the workload's requests")
    parser.add_argument("--first", type=int, help="number of the first step (100; tiny: 2)")
    parser.add_argument("--steps", type=int, help="how many (20; tiny: 3)")
    parser.add_argument("--engine", type=json.loads, default={}, metavar="JSON")
    parser.add_argument("--json", type=Path, help="also write the last line here")
    args = parser.parse_args(argv)
    first, steps = (2, 3) if args.model == TINY else (100, 20)
    args.first = first if args.first is None else args.first
    args.steps = args.steps or steps
    return args


def main() -> None:
    args = parse_args()
    task = Task(args.policy, args.settings, (), "", args.model, args.share, engine=args.engine)
    report = {
        "benchmark": "profile_steps",
        "model": args.model,
        "workload": args.workload,
        "policy": args.policy,
        "settings": args.settings,
        "first": args.first,
        **profile_run(task, args.workload, args.first, args.steps),
        **provenance(),
    }
    for row in report["kernels"]:
        print(f"{row['share']:7.1%}{row['ms_per_step']:10.3f} ms{row['calls']:8}  {row['name']}")
    if args.json:
        args.json.write_text(json.dumps(report), encoding="utf-8")
    print(json.dumps(report))


if __name__ == "__main__":
    main()
