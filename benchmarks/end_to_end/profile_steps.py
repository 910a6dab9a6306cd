"""Where the time of some engine steps goes, by kernel: the torch profiler over the midst of a run.

python -m benchmarks.end_to_end.profile_steps batchllm case_1
python -m benchmarks.end_to_end.profile_steps stock_sorted case_1 --first 150 --steps 20
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

from batchllm_operator.engine import EngineJob
from batchllm_operator.spec import SamplingSpec
from benchmarks.end_to_end.engine_run import Profiles, Prompts, Task, make_spec, workload_shape
from benchmarks.end_to_end.models import MODELS, max_model_len
from benchmarks.end_to_end.policies import POLICIES, SETTINGS
from benchmarks.end_to_end.requests import make_requests
from benchmarks.provenance import print_last_line, provenance
from benchmarks.workloads import WORKLOADS, least_prefill_tokens

_MOST_ROWS = 25


class StepProfiler:
    """Profiles some steps of a scheduler's run, from the first one after so many tokens.

    Args:
        scheduler: of vLLM's engine core in this process; its `schedule` is replaced.
        after_tokens: that steps have to have had before.
        num_steps: how many to profile; fewer, if the run ends before.
    """

    def __init__(self, scheduler: Any, after_tokens: int, num_steps: int) -> None:
        from torch import cuda
        from torch.profiler import ProfilerActivity, profile

        self._on_gpu = cuda.is_available()
        activities = [ProfilerActivity.CPU]
        if self._on_gpu:
            activities.append(ProfilerActivity.CUDA)
        self._profile = profile(activities=activities)
        self._schedule = scheduler.schedule
        self._left = after_tokens
        self._most_steps = num_steps
        self._state: Literal["before", "on", "after"] = "before"
        self.num_tokens: list[int] = []
        """Of each step that was profiled."""
        scheduler.schedule = self._noted

    def _noted(self, *args: Any, **kwargs: Any) -> Any:
        if self._state == "before" and self._left <= 0:
            self._synchronize()
            self._profile.start()
            self._state = "on"
        elif self._state == "on" and len(self.num_tokens) == self._most_steps:
            self.stop()
        output = self._schedule(*args, **kwargs)
        num_tokens = output.total_num_scheduled_tokens
        self._left -= num_tokens
        if self._state == "on" and num_tokens:
            self.num_tokens.append(num_tokens)
        return output

    def stop(self) -> None:
        """End it, if it is on."""
        if self._state == "on":
            self._synchronize()
            self._profile.stop()
            self._state = "after"

    def _synchronize(self) -> None:
        if self._on_gpu:
            from torch import cuda

            cuda.synchronize()

    def rows(self) -> list[dict[str, Any]]:
        """Kernels (operators on a CPU) by time, the longest first.

        Raises:
            RuntimeError: no step was profiled.
        """
        self.stop()
        if not self.num_tokens:
            raise RuntimeError("the run ended before a step was profiled")
        from torch.autograd import DeviceType

        kind = DeviceType.CUDA if self._on_gpu else DeviceType.CPU
        name = "self_device_time_total" if self._on_gpu else "self_cpu_time_total"
        events = [
            each
            for each in self._profile.key_averages()
            if each.device_type == kind and not each.is_user_annotation
        ]
        found = sorted(((getattr(each, name), each) for each in events), key=lambda pair: -pair[0])
        total = sum(time for time, _ in found) or 1.0
        return [
            {
                "name": each.key[:120],
                "calls": each.count,
                "ms_per_step": round(time / 1e3 / len(self.num_tokens), 4),
                "share": round(time / total, 4),
            }
            for time, each in found[:_MOST_ROWS]
        ]


def profile_run(task: Task, workload: str, num_steps: int) -> dict[str, Any]:
    """Run a workload, and profile steps after a third of its prefill."""
    from batchllm_operator.engine.vllm.engine import VLLMEngine

    prompts = Prompts.of(task, workload)
    profiles = Profiles()
    engine = VLLMEngine(make_spec(task), EngineJob(max_model_len(task.model), profiles=profiles))
    try:
        block_size = int(engine.llm_engine.vllm_config.cache_config.block_size)
        order = POLICIES[task.policy].order
        planned = make_requests(prompts.tokens, order, prompts.output_tokens, block_size)
        job = EngineJob(1, num_requests=len(planned.requests), profiles=profiles)
        engine.begin(job, SamplingSpec(max_tokens=prompts.output_tokens, ignore_eos=True))
        scheduler = engine.llm_engine.engine_core.engine_core.scheduler
        third = least_prefill_tokens(workload_shape(task, workload)) // 3
        profiler = StepProfiler(scheduler, third, num_steps)
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
    parser.add_argument("--steps", type=int, default=20, help="at most (20)")
    parser.add_argument("--engine", type=json.loads, default={}, metavar="JSON")
    parser.add_argument("--json", type=Path, help="also write the last line here")
    return parser.parse_args(argv)


def main() -> None:
    args = parse_args()
    task = Task(args.policy, args.settings, (), "", args.model, args.share, engine=args.engine)
    report = {
        "benchmark": "profile_steps",
        "model": args.model,
        "workload": args.workload,
        "policy": args.policy,
        "settings": args.settings,
        **profile_run(task, args.workload, args.steps),
        **provenance(),
    }
    for row in report["kernels"]:
        print(f"{row['share']:7.1%}{row['ms_per_step']:10.3f} ms{row['calls']:8}  {row['name']}")
    print_last_line(report, args.json)


if __name__ == "__main__":
    main()
