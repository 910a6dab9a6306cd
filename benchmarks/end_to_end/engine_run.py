"""One engine, started once, through several workloads: a line of JSON for each finished run.

    python -m benchmarks.end_to_end.engine_run '{"policy": "stock_sorted", ...}'

A process of its own for each policy and setting, because an engine keeps a GPU's memory to itself,
and because a crash of one must not cost what others have measured. The argument is a `Task` as
JSON. Engine start, compilation, graphs and a warm-up on the workload's own requests come before
a run; planning is timed beside it.
"""

from __future__ import annotations

import gc
import json
import os
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

from batchllm_operator.engine import EngineJob, EngineOutput, EngineRequest
from batchllm_operator.engine.device_profile import DeviceProfile
from batchllm_operator.planner import MODEL_SHAPES, TokenTable, find_gpu, matrix_seconds
from batchllm_operator.spec import JobSpec, SamplingSpec, parse_spec
from batchllm_operator.vllm_plugin.hints import StepCost
from benchmarks.end_to_end.models import TINY, model_config, write_model
from benchmarks.end_to_end.policies import POLICIES, SETTINGS, TINY_SETTINGS, Policy
from benchmarks.end_to_end.requests import (
    PlannedRequests,
    make_requests,
    prompts_as_given,
    warm_up_requests,
)
from benchmarks.end_to_end.step_log import StepLog
from benchmarks.provenance import provenance
from benchmarks.workloads import WORKLOADS, scaled, shrunk

WARM_UP_TOKENS: Final = 8  # of output
_TINY_KV_BYTES: Final = 4 << 20


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
    """No run begins that is expected to end after so many seconds."""
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


class _Profiles:
    """Remembers the device's profile from one workload to the next."""

    def __init__(self) -> None:
        self.profile: DeviceProfile | None = None

    def find(self, subject: Mapping[str, str]) -> DeviceProfile | None:
        return self.profile

    def keep(self, profile: DeviceProfile) -> None:
        self.profile = profile


def make_spec(task: Task, model: Path) -> JobSpec:
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
    extra_args = {"load_format": "dummy", "skip_tokenizer_init": True, **policy.extra_args}
    engine["extra_args"] = {**extra_args, **engine.get("extra_args", {})}
    fields = {
        "spec_version": 1,
        "name": "end-to-end",
        "input": {"uri": "unused", "key": "key"},
        "prompt": {"template": "{text}"},
        "model": {"path": str(model)},
        "output": {"uri": "unused-out"},
        "engine": engine,
    }
    return parse_spec(fields, source="benchmarks.end_to_end")


@dataclass(frozen=True, slots=True)
class Prompts:
    """A workload's prompts in the order of the table, and the length of every output."""

    tokens: TokenTable
    output_tokens: int

    @classmethod
    def of(cls, task: Task, workload: str) -> Prompts:
        """As large as the task and its model say."""
        shape = scaled(WORKLOADS[workload], task.share)
        if task.model == TINY:
            shape = shrunk(shape)
        vocabulary = model_config(task.model)["vocab_size"]
        return cls(prompts_as_given(shape, vocabulary, task.seed), shape.output_tokens)

    @property
    def max_model_len(self) -> int:
        """Most tokens of a prompt and its output together."""
        return int(self.tokens.lengths.max()) + self.output_tokens


def run(task: Task) -> None:
    """Start the engine and run what the task says."""
    began_at = time.monotonic()
    from batchllm_operator.engine.vllm_engine import VLLMEngine  # says how vLLM is imported

    if task.policy == "stock_cascade":
        _check_cascade()
    prompts = {name: Prompts.of(task, name) for name, _ in task.runs}
    longest = max(each.max_model_len for each in prompts.values())
    with tempfile.TemporaryDirectory(prefix="batchllm-bench-") as folder:
        spec = make_spec(task, write_model(task.model, Path(folder)))
        engine = VLLMEngine(spec, EngineJob(max_model_len=longest))
        try:
            session = _Session(task, engine, time.monotonic() - began_at)
            order, size = POLICIES[task.policy].order, session.block_size
            planned = {
                name: make_requests(each.tokens, order, each.output_tokens, size)
                for name, each in prompts.items()
            }
            tokens_per_s: float | None = None
            for name, repetition in task.runs:
                left = _left(task, began_at)
                num_tokens = planned[name].num_prompt_tokens + planned[name].num_output_tokens
                if left <= 0 or (tokens_per_s and num_tokens / tokens_per_s > left):
                    print(f"no time is left for {name}, repetition {repetition}", flush=True)
                    continue
                row = session.measure(name, repetition, planned[name])
                tokens_per_s = num_tokens / row["generate_s"]
                _append(Path(task.rows_file), row)
        finally:
            engine.close()


class _Session:
    """An engine that has been started, and what is the same for all of its runs."""

    def __init__(self, task: Task, engine: Any, start_s: float) -> None:
        self._task, self._engine = task, engine
        self._policy: Policy = POLICIES[task.policy]
        self._profiles = _Profiles()
        core = engine.llm_engine.engine_core.engine_core
        self._scheduler = core.scheduler
        self._log = StepLog(core.scheduler)
        config = engine.llm_engine.vllm_config
        self.block_size = int(config.cache_config.block_size)
        self._provenance = provenance()
        self._facts = {
            "engine_start_s": round(start_s, 1),
            "num_kv_blocks": self._scheduler.kv_cache_manager.block_pool.num_gpu_blocks,
            "block_size": self.block_size,
            "max_num_seqs": config.scheduler_config.max_num_seqs,
            "max_num_batched_tokens": config.scheduler_config.max_num_batched_tokens,
            "async_scheduling": bool(config.scheduler_config.async_scheduling),
            "attention": _attention_backends(engine.llm_engine),
            "cuda_graphs": str(getattr(config.compilation_config, "cudagraph_mode", None)),
        }

    def measure(self, workload: str, repetition: int, planned: PlannedRequests) -> dict[str, Any]:
        """Run a workload after a warm-up on its first requests; a row of figures.

        Raises:
            RuntimeError: an output is missing, or isn't as long as it was asked to be.
        """
        output_tokens = planned.num_output_tokens // len(planned.requests)
        warm_up = warm_up_requests(planned.requests)
        self._generate(warm_up, min(WARM_UP_TOKENS, output_tokens))
        self._begin(planned.requests, output_tokens)
        gc.collect()
        self._log.start()
        outputs = list(self._engine.stream(iter(planned.requests)))
        steps = self._log.stop()
        _check(outputs, len(planned.requests), output_tokens)
        num_computed = steps.num_computed_prompt_tokens(
            len(planned.requests), planned.num_output_tokens
        )
        total_s = planned.plan_s + steps.end_s
        profile = self._profiles.profile
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
            "plan_s": round(planned.plan_s, 4),
            "generate_s": round(steps.end_s, 4),
            "total_s": round(total_s, 4),
            "tecd_s": round(planned.plan_s + steps.tecd_s, 4),
            "requests_per_s": round(len(planned.requests) / total_s, 4),
            "num_prompt_tokens": planned.num_prompt_tokens,
            "num_computed_prompt_tokens": num_computed,
            "num_output_tokens": planned.num_output_tokens,
            "saving_ratio": round(1 - num_computed / planned.num_prompt_tokens, 5),
            "num_steps": len(steps.num_tokens),
            "valley_steps": steps.valley_steps,
            "preemptions": int(steps.num_preempted.sum()),
            "chunk_size": getattr(
                self._scheduler, "chunk_size", self._facts["max_num_batched_tokens"]
            ),
            "profile": None if profile is None else profile.model_dump(mode="json"),
            **self._facts,
            **self._provenance,
            "steps": steps.to_json(),
        }

    def _generate(self, requests: Sequence[EngineRequest], output_tokens: int) -> None:
        self._begin(requests, output_tokens)
        outputs = list(self._engine.stream(iter(requests)))
        _check(outputs, len(requests), output_tokens)

    def _begin(self, requests: Sequence[EngineRequest], output_tokens: int) -> None:
        job = EngineJob(
            max_model_len=1,  # that of the first job stands
            num_requests=len(requests),
            step_cost=_step_cost(self._task.model),
            profiles=self._profiles,
        )
        sampling = SamplingSpec(max_tokens=output_tokens, ignore_eos=True)
        self._engine.begin(job, sampling)


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
        raise RuntimeError("this vLLM has no cascade attention here")


def _attention_backends(engine: Any) -> list[str]:
    """Classes of the attention backends that layers have, with FlashAttention's version."""
    return sorted(set(engine.collective_rpc(_backends_of_worker)[0]))


def _backends_of_worker(worker: Any) -> list[str]:
    found = []
    for layer in worker.vllm_config.compilation_config.static_forward_context.values():
        if hasattr(layer, "get_attn_backend"):
            version = getattr(layer.impl, "vllm_flash_attn_version", None)
            name = layer.get_attn_backend().__name__
            found.append(f"{name} {version}" if version else name)
    return found


def _left(task: Task, began_at: float) -> float:
    if task.budget_s is None:
        return float("inf")
    return task.budget_s - (time.monotonic() - began_at)


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


if __name__ == "__main__":
    run(Task.from_json(sys.argv[1]))
