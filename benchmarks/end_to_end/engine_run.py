"""One engine, started once, through several workloads: a line of JSON for each finished run.

A process of its own for each policy and setting (`one_engine`), because an engine keeps a GPU's
memory to itself, and because a crash of one must not cost what others have measured. Engine start,
compilation, graphs and warm-ups come before a run; planning is timed beside it.
"""

import gc
import os
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from batchllm_operator.cost import MODEL_SHAPES, find_gpu, matrix_seconds
from batchllm_operator.engine import EngineJob, EngineOutput
from batchllm_operator.engine.device_profile import StoredProfiles
from batchllm_operator.vllm_plugin.scheduler.hints import StepCost
from benchmarks.end_to_end.models import max_model_len
from benchmarks.end_to_end.policies import POLICIES
from benchmarks.end_to_end.requests import PlannedRequests
from benchmarks.end_to_end.step_log import StepLog
from benchmarks.end_to_end.task import Task, append_row
from benchmarks.provenance import provenance

ENGINE_WARM_UP: Final = (512, 32)
"""At most so many requests, with at most so many output tokens each."""
WORKLOAD_WARM_UP: Final = (64, 8)


class Profiles(StoredProfiles):
    """Remembers the device's profile from one workload to the next."""

    def __init__(self) -> None:
        self.profile: Any = None

    def find(self, kind: Any, subject: Mapping[str, str]) -> Any:
        """The one that was kept, if it is of this subject."""
        has_it = self.profile is not None and self.profile.subject == dict(subject)
        return self.profile if has_it else None

    def keep(self, profile: Any) -> None:
        """In place of the last one."""
        self.profile = profile


def run(task: Task) -> None:
    """Start the engine and run what the task says."""
    began_at = time.monotonic()
    if POLICIES[task.policy].front_end == "llm":
        session: _Session = _LLMSession(task)
    else:
        session = _EngineSession(task)
    longest_s = 0.0
    try:
        session.warm_up(time.monotonic() - began_at)
        for name, repetition in task.runs:
            ends_at = time.monotonic() - began_at + longest_s
            if task.budget_s is not None and ends_at >= task.budget_s:
                print(f"no time is left for {name}, repetition {repetition}", flush=True)
                continue
            row = session.measure(name, repetition)
            longest_s = max(longest_s, row["total_s"])
            append_row(Path(task.rows_file), row)
    finally:
        session.close()


class _Session(ABC):
    """An engine that has been started, and what is the same for all of its runs."""

    def __init__(self, task: Task) -> None:
        self._task = task
        self._facts: dict[str, Any] = {}

    @abstractmethod
    def close(self) -> None:
        """End the engine."""

    @abstractmethod
    def _generate(self, planned: PlannedRequests) -> dict[str, Any]:
        """Generate for all requests with an empty cache; figures of the run."""

    def warm_up(self, start_s: float) -> None:
        """As many requests as run side by side later, once, so that all of that size is compiled,
        captured and allocated.

        Args:
            start_s: seconds that the engine took to start.
        """
        self._facts["engine_start_s"] = round(start_s, 1)
        planned = self._task.requests(self._task.runs[0][0], self._facts["block_size"])
        self._generate(planned.warm_up(*ENGINE_WARM_UP))

    def measure(self, workload: str, repetition: int) -> dict[str, Any]:
        """Plan and run a workload after a warm-up on its first requests; a row of figures.

        Raises:
            RuntimeError: an output is missing, or isn't as long as it was asked to be.
        """
        planned = self._task.requests(workload, self._facts["block_size"])
        self._generate(planned.warm_up(*WORKLOAD_WARM_UP))
        gc.collect()
        figures = self._generate(planned)
        total_s = planned.plan_s + figures["generate_s"]
        num_prefill = figures["num_prefill_tokens"]
        tecd_s = figures.pop("tecd_s")
        return {
            "model": self._task.model,
            "workload": workload,
            "policy": self._task.policy,
            "settings": self._task.settings,
            "repetition": repetition,
            "engine": self._task.engine or {},
            "num_requests": len(planned.requests),
            "num_prompt_tokens": planned.num_prompt_tokens,
            "num_output_tokens": planned.num_output_tokens,
            "plan_s": round(planned.plan_s, 4),
            "total_s": round(total_s, 4),
            "tecd_s": None if tecd_s is None else round(planned.plan_s + tecd_s, 4),
            "requests_per_s": round(len(planned.requests) / total_s, 4),
            "saving_ratio": round(1 - num_prefill / planned.num_prompt_tokens, 5),
            **self._facts,
            **figures,
        }


class _EngineSession(_Session):
    """Through the engine that jobs use."""

    def __init__(self, task: Task) -> None:
        from batchllm_operator.engine.vllm.engine import VLLMEngine  # says how vLLM is imported

        super().__init__(task)
        self._profiles = Profiles()
        longest = max_model_len(task.model)
        self._engine = VLLMEngine(task.spec(), EngineJob(longest, profiles=self._profiles))
        core = self._engine.llm_engine.engine_core.engine_core
        self._scheduler = core.scheduler
        self._log = StepLog(core.scheduler)
        engine = self._engine.llm_engine
        self._facts = provenance() | {
            "num_kv_blocks": self._scheduler.kv_cache_manager.block_pool.num_gpu_blocks,
            # Classes of the layers' backends, with FlashAttention's version.
            "attention": sorted(set(engine.collective_rpc(_backends_of_worker)[0])),
            **_config_facts(engine.vllm_config),
        }
        from vllm.platforms import current_platform  # not before the engine

        self._facts["doubts"] = baseline_doubts(self._facts, current_platform.is_cuda())

    def close(self) -> None:
        self._engine.close()

    def _generate(self, planned: PlannedRequests) -> dict[str, Any]:
        job = EngineJob(
            max_model_len=1,  # that of the first job stands
            num_requests=len(planned.requests),
            step_cost=_step_cost(self._task.model),
            profiles=self._profiles,
        )
        sampling = {"max_tokens": planned.output_tokens, "ignore_eos": True}
        self._engine.begin(job, self._task.spec(**sampling))
        self._log.start()
        outputs = list(self._engine.stream(iter(planned.requests)))
        steps = self._log.stop()
        _check(outputs, len(planned.requests), planned.output_tokens)
        chunk_size = getattr(self._scheduler, "chunk_size", self._facts["max_num_batched_tokens"])
        num_prefill = steps.num_prefill_tokens(len(planned.requests), planned.num_output_tokens)
        return {
            "generate_s": round(steps.end_s, 4),
            "admission_s": round(float(steps.begin_s[0]), 4),
            "tecd_s": steps.tecd_s,
            "num_prefill_tokens": num_prefill,
            "num_steps": len(steps.num_tokens),
            "valley_steps": steps.valley_steps(chunk_size),
            "preemptions": int(steps.num_preempted.sum()),
            "chunk_size": chunk_size,
            "steps": steps.to_json(),
        }


class _LLMSession(_Session):
    """Through vLLM's class `LLM`, its engine in another process: nothing is known of its steps."""

    def __init__(self, task: Task) -> None:
        from batchllm_operator.engine.vllm.engine import engine_args  # says how vLLM is imported

        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "1"  # which that has set to 0
        from vllm import LLM

        super().__init__(task)
        self._llm: Any = LLM(**engine_args(task.spec(), max_model_len(task.model)))
        config = self._llm.llm_engine.vllm_config
        self._facts = provenance() | _config_facts(config)
        self._facts |= {"num_kv_blocks": config.cache_config.num_gpu_blocks, "attention": None}
        self._facts["doubts"] = []

    def close(self) -> None:
        del self._llm

    def _generate(self, planned: PlannedRequests) -> dict[str, Any]:
        from vllm import SamplingParams
        from vllm.inputs import TokensPrompt

        params = SamplingParams(
            max_tokens=planned.output_tokens, temperature=0.0, ignore_eos=True, detokenize=False
        )
        ids = [request.prompt_token_ids for request in planned.requests]
        prompts = [TokensPrompt(prompt_token_ids=token_ids) for token_ids in ids]
        if not self._llm.reset_prefix_cache():
            raise RuntimeError("the prefix cache can't be emptied")
        started_at = time.perf_counter()
        outputs = self._llm.generate(prompts, params, use_tqdm=False)
        generate_s = time.perf_counter() - started_at
        lengths = {len(each.outputs[0].token_ids) for each in outputs}
        if len(outputs) != len(prompts) or lengths != {planned.output_tokens}:
            raise RuntimeError(f"{len(outputs)} outputs of {sorted(lengths)} tokens")
        num_cached = sum(each.num_cached_tokens or 0 for each in outputs)
        return {
            "generate_s": round(generate_s, 4),
            "num_prefill_tokens": planned.num_prompt_tokens - num_cached,
            "chunk_size": self._facts["max_num_batched_tokens"],
            **dict.fromkeys(("admission_s", "tecd_s", "num_steps", "valley_steps")),
            **dict.fromkeys(("preemptions", "steps")),
        }


def _config_facts(config: Any) -> dict[str, Any]:
    scheduler = config.scheduler_config
    return {
        "block_size": int(config.cache_config.block_size),
        "max_model_len": int(config.model_config.max_model_len),
        "max_num_seqs": scheduler.max_num_seqs,
        "max_num_batched_tokens": scheduler.max_num_batched_tokens,
        "async_scheduling": bool(scheduler.async_scheduling),
        "cuda_graphs": str(getattr(config.compilation_config, "cudagraph_mode", None)),
        "max_captured_tokens": config.compilation_config.max_cudagraph_capture_size,
        "v2_model_runner": bool(getattr(config, "use_v2_model_runner", False)),
    }


def baseline_doubts(facts: Mapping[str, Any], is_cuda: bool) -> list[str]:
    """What vLLM could do better on a GPU than it does: reasons not to call it the best baseline."""
    if not is_cuda:
        return []
    doubts = []
    if "NONE" in facts["cuda_graphs"]:
        doubts.append("no CUDA graphs")
    if not facts["async_scheduling"]:
        doubts.append("no asynchronous scheduling")
    is_ours = any("PrefixAttention" in name for name in facts["attention"])
    if not is_ours and facts["attention"] != ["FlashAttentionBackend 3"]:
        doubts.append(f"attention is {facts['attention']}, not FlashAttention 3")
    return doubts


def _step_cost(model: str) -> StepCost | None:
    """What a plan for an H100 says, which the device's own profile replaces on a GPU."""
    if model not in MODEL_SHAPES:
        return None
    gpu = find_gpu("H100")
    token_s, weights_s = matrix_seconds(MODEL_SHAPES[model], gpu)
    return StepCost(token_s, weights_s, gpu.step_overhead_s)


def _check(outputs: Sequence[EngineOutput], num_requests: int, output_tokens: int) -> None:
    failed = [output.error for output in outputs if output.error]
    if failed:
        raise RuntimeError(f"{len(failed)} requests failed, the first with {failed[0]}")
    num_answered = len({output.request_idx for output in outputs})
    if not len(outputs) == num_answered == num_requests:
        raise RuntimeError(f"{len(outputs)} outputs of {num_answered} requests, not {num_requests}")
    lengths = {output.num_output_tokens for output in outputs}
    if lengths != {output_tokens}:
        raise RuntimeError(f"outputs of {sorted(lengths)} tokens, not of {output_tokens}")


def _backends_of_worker(worker: Any) -> list[str]:
    names = []
    for layer in worker.vllm_config.compilation_config.static_forward_context.values():
        if hasattr(layer, "get_attn_backend"):
            version = getattr(layer.impl, "vllm_flash_attn_version", None)
            name = layer.get_attn_backend().__name__
            names.append(f"{name} {version}" if version else name)
    return names
