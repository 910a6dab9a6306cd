"""Where the time of some engine steps goes, by kernel: the torch profiler over the midst of a run.

python -m benchmarks.end_to_end.profile_steps batchllm case_1
python -m benchmarks.end_to_end.profile_steps stock_sorted case_1 --steps 40
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from batchllm_operator.engine import EngineJob
from batchllm_operator.spec import SamplingSpec
from benchmarks.end_to_end.engine_run import Profiles, Prompts, Task, make_spec, workload_shape
from benchmarks.end_to_end.models import MODELS, max_model_len
from benchmarks.end_to_end.policies import POLICIES, SETTINGS
from benchmarks.end_to_end.requests import make_requests
from benchmarks.end_to_end.step_log import StepLog
from benchmarks.provenance import print_last_line, provenance
from benchmarks.workloads import WORKLOADS, least_prefill_tokens

if TYPE_CHECKING:
    from batchllm_operator.engine.vllm.engine import VLLMEngine

_MOST_ROWS = 25


def profile_run(task: Task, workload: str, num_steps: int) -> dict[str, Any]:
    """Run a workload, and profile steps after a third of its prefill.

    Raises:
        RuntimeError: the run ended before a step was profiled.
    """
    from batchllm_operator.engine.vllm.engine import VLLMEngine

    prompts, profiles = Prompts.of(task, workload), Profiles()
    engine = VLLMEngine(make_spec(task), EngineJob(max_model_len(task.model), profiles=profiles))
    try:
        block_size = int(engine.llm_engine.vllm_config.cache_config.block_size)
        order = POLICIES[task.policy].order
        planned = make_requests(prompts.tokens, order, prompts.output_tokens, block_size)
        job = EngineJob(1, num_requests=len(planned.requests), profiles=profiles)
        engine.begin(job, SamplingSpec(max_tokens=prompts.output_tokens, ignore_eos=True))
        log = StepLog(engine.llm_engine.engine_core.engine_core.scheduler)
        log.start()
        for request in planned.requests:
            engine.add(request)
        third = least_prefill_tokens(workload_shape(task, workload)) // 3
        while log.stop().num_tokens.sum() < third:
            engine.step()
        log.start()
        kernels = _profiled(engine, num_steps)
        return {"num_tokens": log.stop().num_tokens.tolist(), "kernels": kernels}
    finally:
        engine.close()


def _profiled(engine: VLLMEngine, num_steps: int) -> list[dict[str, Any]]:
    """Kernels (operators on a CPU) of the next steps by time, the longest first."""
    from torch import cuda
    from torch.autograd import DeviceType
    from torch.profiler import ProfilerActivity, profile

    on_gpu, num_profiled = cuda.is_available(), 0
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_gpu else [])]
    with profile(activities=activities) as profiler:
        while num_profiled < num_steps and engine.llm_engine.has_unfinished_requests():
            engine.step()
            num_profiled += 1
        if on_gpu:
            cuda.synchronize()
    if not num_profiled:
        raise RuntimeError("the run ended before a step was profiled")
    kind = DeviceType.CUDA if on_gpu else DeviceType.CPU
    name = "self_device_time_total" if on_gpu else "self_cpu_time_total"
    events = [
        (getattr(event, name), event)
        for event in profiler.key_averages()
        if event.device_type == kind and not event.is_user_annotation
    ]
    total = sum(time for time, _ in events) or 1.0
    return [
        {
            "name": event.key[:120],
            "calls": event.count,
            "ms_per_step": round(time / 1e3 / num_profiled, 4),
            "share": round(time / total, 4),
        }
        for time, event in sorted(events, key=lambda pair: -pair[0])[:_MOST_ROWS]
    ]


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
