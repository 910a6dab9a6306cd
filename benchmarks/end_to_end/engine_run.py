"""One engine, started once, through several workloads: a line of JSON for each finished run.

A process of its own for each policy and setting (`one_engine`), because an engine keeps a GPU's
memory to itself, and because a crash of one must not cost what others have measured. Engine start,
compilation, graphs and warm-ups come before a run; planning is timed beside it.
"""

from __future__ import annotations

import gc
import json
import os
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Final

from batchllm_operator.cost import MODEL_SHAPES, find_gpu, matrix_seconds
from batchllm_operator.engine import EngineJob, EngineOutput
from batchllm_operator.engine.device_profile import StoredProfiles
from batchllm_operator.prefixes import TokenTable
from batchllm_operator.simulate.workload import Shape
from batchllm_operator.spec import JobSpec, SamplingSpec, parse_spec
from batchllm_operator.vllm_plugin.scheduler.hints import StepCost
from benchmarks.end_to_end.models import TINY, max_model_len, model_config, write_model
from benchmarks.end_to_end.policies import (
    MOST_CAPTURED,
    NO_CASCADE,
    POLICIES,
    SETTINGS,
    TINY_SETTINGS,
)
from benchmarks.end_to_end.requests import (
    PlannedRequests,
    make_requests,
    prompts_as_given,
    warm_up_requests,
)
from benchmarks.end_to_end.step_log import StepLog
from benchmarks.provenance import provenance
from benchmarks.workloads import WORKLOADS, scaled, shrunk

_TINY_KV_BYTES: Final = 4 << 20


ENGINE_WARM_UP: Final = (512, 32)
"""At most so many requests, with at most so many output tokens each."""
WORKLOAD_WARM_UP: Final = (64, 8)


@dataclass(frozen=True, slots=True)
class Task:
    """What one engine is to run."""

    policy: str
    settings: str
    runs: Sequence[tuple[str, int]]
    """Workloads and the numbers of their repetitions, in order."""
    rows_file: str
    """Gets a line of JSON appended for each finished run."""
    model: str = "Mistral-7B"
    share: float = 1.0
    """Of each workload's requests."""
    seed: int = 0
    budget_s: float | None = None
    """No run begins that would end after so many seconds if it took as long as the longest one."""
    engine: Mapping[str, Any] | None = None
    """More fields of the spec's `engine`."""

    @classmethod
    def from_json(cls, text: str) -> Task:
        """What `to_json` made."""
        fields = json.loads(text)
        return cls(**{**fields, "runs": [tuple(run) for run in fields["runs"]]})

    def to_json(self) -> str:
        """For the command line."""
        return json.dumps(asdict(self))


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


def make_spec(task: Task) -> JobSpec:
    """The spec of a job that an operator would run: only its model and engine matter here."""
    policy = POLICIES[task.policy]
    settings = dict((TINY_SETTINGS if task.model == TINY else SETTINGS)[task.settings])
    engine: dict[str, Any] = {
        "scheduler": policy.scheduler,
        "attention": policy.attention,
        **settings,
        **(task.engine or {}),
    }
    if task.model == TINY:
        engine = {"kv_cache_memory_bytes": _TINY_KV_BYTES, "profile": False, **engine}
    extra_args = {
        "load_format": "dummy",
        "skip_tokenizer_init": True,
        "max_cudagraph_capture_size": MOST_CAPTURED,
        **policy.extra_args,
    }
    engine["extra_args"] = {**extra_args, **engine.get("extra_args", {})}
    fields = {
        "spec_version": 1,
        "name": "end-to-end",
        "input": {"uri": "unused", "key": "key"},
        "prompt": {"template": "{text}"},
        "model": {"path": str(write_model(task.model))},
        "output": {"uri": "unused-out"},
        "engine": engine,
    }
    return parse_spec(fields, source="benchmarks.end_to_end")


def workload_shape(task: Task, workload: str) -> Shape:
    """A workload as large as the task and its model say."""
    shape = scaled(WORKLOADS[workload], task.share)
    return shrunk(shape) if task.model == TINY else shape


@dataclass(frozen=True, slots=True)
class Prompts:
    """A workload's prompts in the order of the table, and the length of every output."""

    tokens: TokenTable
    output_tokens: int

    @classmethod
    def of(cls, task: Task, workload: str) -> Prompts:
        """As large as the task and its model say."""
        shape = workload_shape(task, workload)
        vocabulary = model_config(task.model)["vocab_size"]
        return cls(prompts_as_given(shape, vocabulary, task.seed), shape.output_tokens)


def run(task: Task) -> None:
    """Start the engine and run what the task says."""
    began_at = time.monotonic()
    if POLICIES[task.policy].front_end == "llm":
        session: _Session = _LLMSession(task)
    else:
        session = _EngineSession(task)
    longest_s = 0.0
    try:
        session.warm_up(Prompts.of(task, task.runs[0][0]), time.monotonic() - began_at)
        for name, repetition in task.runs:
            ends_at = time.monotonic() - began_at + longest_s
            if task.budget_s is not None and ends_at >= task.budget_s:
                print(f"no time is left for {name}, repetition {repetition}", flush=True)
                continue
            row = session.measure(name, repetition, Prompts.of(task, name))
            longest_s = max(longest_s, row["total_s"])
            _append(Path(task.rows_file), row)
    finally:
        session.close()


class _Session(ABC):
    """An engine that has been started, and what is the same for all of its runs."""

    def __init__(self, task: Task) -> None:
        self._task = task
        self._policy = POLICIES[task.policy]
        self._facts: dict[str, Any] = {}

    @abstractmethod
    def close(self) -> None:
        """End the engine."""

    @abstractmethod
    def _generate(self, planned: PlannedRequests, output_tokens: int) -> dict[str, Any]:
        """Generate for all requests with an empty cache; figures of the run."""

    def warm_up(self, prompts: Prompts, start_s: float) -> None:
        """As many requests as run side by side later, once, so that all of that size is compiled,
        captured and allocated.

        Args:
            prompts: of any workload.
            start_s: seconds that the engine took to start.
        """
        self._facts["engine_start_s"] = round(start_s, 1)
        self._warm_up(self._requests(prompts), ENGINE_WARM_UP, prompts.output_tokens)

    def _requests(self, prompts: Prompts) -> PlannedRequests:
        size = self._facts["block_size"]
        return make_requests(prompts.tokens, self._policy.order, prompts.output_tokens, size)

    def _warm_up(self, planned: PlannedRequests, most: tuple[int, int], output_tokens: int) -> None:
        requests = warm_up_requests(planned.requests, most[0])
        output_tokens = min(most[1], output_tokens)
        few = replace(planned, requests=requests, num_output_tokens=output_tokens * len(requests))
        self._generate(few, output_tokens)

    def measure(self, workload: str, repetition: int, prompts: Prompts) -> dict[str, Any]:
        """Plan and run a workload after a warm-up on its first requests; a row of figures.

        Raises:
            RuntimeError: an output is missing, or isn't as long as it was asked to be.
        """
        planned = self._requests(prompts)
        self._warm_up(planned, WORKLOAD_WARM_UP, prompts.output_tokens)
        gc.collect()
        figures = self._generate(planned, prompts.output_tokens)
        total_s = planned.plan_s + figures["generate_s"]
        num_prefill = figures["num_prefill_tokens"]
        tecd_s = figures.pop("tecd_s")
        return {
            "model": self._task.model,
            "workload": workload,
            "policy": self._policy.name,
            "settings": self._task.settings,
            "repetition": repetition,
            "seed": self._task.seed,
            "share": self._task.share,
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
        from vllm.platforms import current_platform

        from batchllm_operator.engine.vllm.engine import VLLMEngine  # says how vLLM is imported

        super().__init__(task)
        if task.policy == "stock_cascade":
            _check_cascade()
        self._profiles = Profiles()
        longest = max_model_len(task.model)
        self._engine = VLLMEngine(make_spec(task), EngineJob(longest, profiles=self._profiles))
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
        self._facts["doubts"] = baseline_doubts(self._facts, current_platform.is_cuda())

    def close(self) -> None:
        self._engine.close()

    def _generate(self, planned: PlannedRequests, output_tokens: int) -> dict[str, Any]:
        job = EngineJob(
            max_model_len=1,  # that of the first job stands
            num_requests=len(planned.requests),
            step_cost=_step_cost(self._task.model),
            profiles=self._profiles,
        )
        self._engine.begin(job, SamplingSpec(max_tokens=output_tokens, ignore_eos=True))
        self._log.start()
        outputs = list(self._engine.stream(iter(planned.requests)))
        steps = self._log.stop()
        _check(outputs, len(planned.requests), output_tokens)
        profile = self._profiles.profile
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
            "profile": None if profile is None else profile.model_dump(mode="json"),
            "steps": steps.to_json(),
        }


class _LLMSession(_Session):
    """Through vLLM's class `LLM`, its engine in another process: nothing is known of its steps."""

    def __init__(self, task: Task) -> None:
        from batchllm_operator.engine.vllm.engine import engine_args  # says how vLLM is imported

        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "1"  # which that has set to 0
        from vllm import LLM

        super().__init__(task)
        self._llm: Any = LLM(**engine_args(make_spec(task), max_model_len(task.model)))
        config = self._llm.llm_engine.vllm_config
        self._facts = provenance() | _config_facts(config)
        self._facts |= {"num_kv_blocks": config.cache_config.num_gpu_blocks, "attention": None}
        self._facts["doubts"] = []

    def close(self) -> None:
        del self._llm

    def _generate(self, planned: PlannedRequests, output_tokens: int) -> dict[str, Any]:
        from vllm import SamplingParams
        from vllm.inputs import TokensPrompt

        params = SamplingParams(
            max_tokens=output_tokens, temperature=0.0, ignore_eos=True, detokenize=False
        )
        ids = [request.prompt_token_ids for request in planned.requests]
        prompts = [TokensPrompt(prompt_token_ids=token_ids) for token_ids in ids]
        if not self._llm.reset_prefix_cache():
            raise RuntimeError("the prefix cache can't be emptied")
        started_at = time.perf_counter()
        outputs = self._llm.generate(prompts, params, use_tqdm=False)
        generate_s = time.perf_counter() - started_at
        lengths = {len(each.outputs[0].token_ids) for each in outputs}
        if len(outputs) != len(prompts) or lengths != {output_tokens}:
            raise RuntimeError(f"{len(outputs)} outputs of {sorted(lengths)} tokens")
        num_cached = sum(each.num_cached_tokens or 0 for each in outputs)
        return {
            "generate_s": round(generate_s, 4),
            "num_prefill_tokens": planned.num_prompt_tokens - num_cached,
            "chunk_size": self._facts["max_num_batched_tokens"],
            **dict.fromkeys(("admission_s", "tecd_s", "num_steps", "valley_steps")),
            **dict.fromkeys(("preemptions", "profile", "steps")),
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


def _check_cascade() -> None:
    """Some releases take the argument still, and ignore it.

    Raises:
        RuntimeError: this vLLM has no cascade attention, or none for this platform.
    """
    from vllm.platforms import current_platform
    from vllm.v1.attention.backend import AttentionMetadataBuilder

    has_it = hasattr(AttentionMetadataBuilder, "use_cascade_attention")
    if not has_it or not current_platform.is_cuda_alike():
        raise RuntimeError(NO_CASCADE)


def _backends_of_worker(worker: Any) -> list[str]:
    found = []
    for layer in worker.vllm_config.compilation_config.static_forward_context.values():
        if hasattr(layer, "get_attn_backend"):
            version = getattr(layer.impl, "vllm_flash_attn_version", None)
            name = layer.get_attn_backend().__name__
            found.append(f"{name} {version}" if version else name)
    return found


def _append(path: Path, row: Mapping[str, Any]) -> None:
    with path.open("ab+") as file:
        is_empty = file.seek(0, os.SEEK_END) == 0
        if not is_empty:
            file.seek(-1, os.SEEK_END)
            if file.read(1) != b"\n":  # a run was killed while it wrote
                file.write(b"\n")
        file.write(json.dumps(row).encode() + b"\n")
    shown = ("workload", "policy", "settings", "requests_per_s", "saving_ratio", "num_steps")
    print(" ".join(str(row[name]) for name in shown), flush=True)


def read_rows(path: Path) -> Iterator[dict[str, Any]]:
    """The rows of a file that runs append to; a last line cut short by a kill is left out."""
    if path.exists():
        for line in path.read_text(encoding="utf-8").splitlines():
            try:
                yield json.loads(line)
            except json.JSONDecodeError:
                continue
