"""Where the time of some engine steps goes, by kernel: the torch profiler over the midst of a run.

python -m benchmarks.end_to_end.profile_steps batchllm case_1
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from batchllm_operator.engine import EngineJob
from benchmarks.end_to_end.engine_run import Profiles
from benchmarks.end_to_end.models import MODELS, max_model_len
from benchmarks.end_to_end.policies import POLICIES
from benchmarks.end_to_end.step_log import StepLog
from benchmarks.end_to_end.task import Task
from benchmarks.provenance import print_last_line, provenance
from benchmarks.workloads import WORKLOADS, least_prefill_tokens

if TYPE_CHECKING:
    from batchllm_operator.engine.vllm.engine import VLLMEngine

_MOST_ROWS: Final = 25
_SHARE: Final = 0.4
"""Of the workload's requests."""
_NUM_STEPS: Final = 20


def profile_run(task: Task, workload: str) -> dict[str, Any]:
    """Run a workload, and profile steps after a third of its prefill.

    Raises:
        RuntimeError: the run ended before a step was profiled.
    """
    from batchllm_operator.engine.vllm.engine import VLLMEngine

    profiles = Profiles()
    engine = VLLMEngine(task.spec(), EngineJob(max_model_len(task.model), profiles=profiles))
    try:
        block_size = int(engine.llm_engine.vllm_config.cache_config.block_size)
        planned = task.requests(workload, block_size)
        job = EngineJob(1, num_requests=len(planned.requests), profiles=profiles)
        engine.begin(job, task.spec(max_tokens=planned.output_tokens, ignore_eos=True))
        log = StepLog(engine.llm_engine.engine_core.engine_core.scheduler)
        log.start()
        for request in planned.requests:
            engine.add(request)
        third = least_prefill_tokens(task.shape(workload)) // 3
        while log.stop().num_tokens.sum() < third:
            engine.step()
        log.start()
        kernels = _profiled(engine)
        return {"num_tokens": log.stop().num_tokens.tolist(), "kernels": kernels}
    finally:
        engine.close()


def _profiled(engine: VLLMEngine) -> list[dict[str, Any]]:
    """Kernels (operators on a CPU) of the next steps by time, the longest first."""
    from torch import cuda
    from torch.autograd import DeviceType
    from torch.profiler import ProfilerActivity, profile

    on_gpu, num_profiled = cuda.is_available(), 0
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_gpu else [])]
    with profile(activities=activities) as profiler:
        while num_profiled < _NUM_STEPS and engine.llm_engine.has_unfinished_requests():
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


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__.partition("\n\n")[0],
        prog="python -m benchmarks.end_to_end.profile_steps",
    )
    parser.add_argument("policy", choices=list(POLICIES))
    parser.add_argument("workload", choices=list(WORKLOADS))
    parser.add_argument("--model", default="Mistral-7B", choices=MODELS)
    parser.add_argument("--json", type=Path, help="also write the last line here")
    args = parser.parse_args()
    task = Task(args.policy, "default", model=args.model, share=_SHARE)
    report = {
        "benchmark": "profile_steps",
        "model": args.model,
        "workload": args.workload,
        "policy": args.policy,
        **profile_run(task, args.workload),
        **provenance(),
    }
    for row in report["kernels"]:
        print(f"{row['share']:7.1%}{row['ms_per_step']:10.3f} ms{row['calls']:8}  {row['name']}")
    print_last_line(report, args.json)


if __name__ == "__main__":
    main()
