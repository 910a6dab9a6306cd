"""Run as a script: generates with vLLM under one scheduler in every way that a user may ask for.

    python -m support.offline_generate SCHEDULER MODEL LORA PROMPTS OUTPUTS

In a process whose engine runs in itself (fixture `engines`).

PROMPTS is JSON: a list of {"tokens", "group_id", "num_prefix_tokens", "group_size"}. OUTPUTS is
written as JSON: for each feature what was generated, and how often a request was preempted.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from vllm import LLM, SamplingParams
from vllm.lora.request import LoRARequest

from batchllm_operator.vllm_plugin.scheduler.hints import RequestHints

OURS = "batchllm_operator.vllm_plugin.scheduler.scheduler.BatchLLMScheduler"
NUM_BLOCKS = 24  # of 32 tokens


def start(scheduler: str, model: str, **changes: Any) -> LLM:
    args: dict[str, Any] = {
        "dtype": "float32",
        "kv_cache_memory_bytes": 1 << 28,
        "block_size": 32,
        "enforce_eager": True,
        "max_num_seqs": 64,
        "max_model_len": 640,
        "scheduler_cls": OURS if scheduler == "ours" else None,
        **changes,
    }
    return LLM(model, **args)


def count_preemptions(llm: LLM) -> list[str]:
    """A list that grows with each preempted request."""
    scheduler = llm.llm_engine.engine_core.engine_core.scheduler  # type: ignore[attr-defined]
    preempt, preempted = scheduler._preempt_request, []

    def counted(request: Any, *args: Any, **kwargs: Any) -> None:
        preempted.append(request.request_id)
        preempt(request, *args, **kwargs)

    scheduler._preempt_request = counted
    return preempted


class Generator:
    """One LLM and the prompts."""

    def __init__(self, llm: LLM, prompts: list[dict[str, Any]]) -> None:
        self._llm, self._prompts = llm, prompts

    def __call__(self, num_prompts: int | None = None, lora: Any = None, **sampling: Any) -> Any:
        """Outputs of the first prompts; `sampling` is for `SamplingParams`."""
        chosen = self._prompts[:num_prompts]
        params = []
        given = {"temperature": 0.0, "max_tokens": 24, **sampling}
        for prompt in chosen:
            hints = RequestHints(
                prompt["group_id"],
                prompt["num_prefix_tokens"],
                prompt["group_size"],
                num_output_tokens=given["max_tokens"],
            )
            params.append(SamplingParams(**given, extra_args=hints.to_extra_args()))
        outputs = self._llm.generate(
            [{"prompt_token_ids": prompt["tokens"]} for prompt in chosen],
            params,
            lora_request=lora,
            use_tqdm=False,
        )
        return [
            [
                {
                    "text": each.text,
                    "token_ids": list(each.token_ids),
                    "finish_reason": each.finish_reason,
                    "stop_reason": each.stop_reason,
                    "logprobs": _logprobs(each.logprobs),
                }
                for each in output.outputs
            ]
            for output in outputs
        ]


def _logprobs(values: Any) -> list[dict[str, float]] | None:
    if values is None:
        return None
    return [{str(token): each.logprob for token, each in step.items()} for step in values]


def main(scheduler: str, model: str, lora: str, prompts_path: str, outputs_path: str) -> None:
    prompts = json.loads(Path(prompts_path).read_text())
    sys.modules.pop("llvmlite.binding.ffi", None)  # vLLM stumbles over it: see VLLMEngine
    # In turn, so that never more than one is in memory.
    found: dict[str, Any] = {}
    llm = start(scheduler, model, num_gpu_blocks_override=NUM_BLOCKS)
    preempted = count_preemptions(llm)
    generate = Generator(llm, prompts)
    found["tight_memory"] = generate(max_tokens=64, logprobs=2)
    found["num_preemptions"] = len(preempted)
    del llm, generate
    llm = start(scheduler, model, enable_lora=True, max_loras=1, max_lora_rank=8)
    generate = Generator(llm, prompts)
    found["stop_strings"] = generate(40, stop=["e", "th"], max_tokens=48)
    found["without_lora"] = generate(40, max_tokens=12)
    # Two that can't be in one step. (vLLM's CPU kernels give an adapter to requests without one
    # if they meet in a step, so they aren't mixed here.)
    adapters = [LoRARequest(name, idx + 1, f"{lora}/{name}") for idx, name in enumerate("ab")]
    found["lora"] = generate(40, lora=[adapters[idx % 2] for idx in range(40)], max_tokens=12)
    del llm, generate
    ngram = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 3}
    llm = start(scheduler, model, speculative_config=ngram, num_gpu_blocks_override=4 * NUM_BLOCKS)
    found["speculative_decoding"] = Generator(llm, prompts)(60)
    Path(outputs_path).write_text(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
