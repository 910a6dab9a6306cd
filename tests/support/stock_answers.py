"""Run as a script: what stock vLLM's `LLM.generate` gives for some jobs, one after the other.

    python -m support.stock_answers MODEL JOBS OUTPUTS

JOBS is JSON: for each job `prompts` (texts) and `sampling` (of `SamplingParams`), and maybe
`adapters` (for each prompt the path of a LoRA adapter, or null) and `structured_outputs` (of
`StructuredOutputsParams`). OUTPUTS is written as JSON: for each prompt of each job, its completions
as [text, places], where places are null or, for each token, [its log-probability, [[token,
log-probability] of the likeliest, in order]].
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

WITHOUT_SPACES = {"backend": "xgrammar", "disable_any_whitespace": True}
"""Of structured outputs: a random model would write spaces wherever it may."""


def main(model: str, jobs_path: str, outputs_path: str) -> None:
    from vllm import LLM, SamplingParams
    from vllm.lora.request import LoRARequest
    from vllm.sampling_params import StructuredOutputsParams

    sys.modules.pop("llvmlite.binding.ffi", None)  # vLLM stumbles over it: see VLLMEngine
    jobs = json.loads(Path(jobs_path).read_text())
    paths = sorted({path for job in jobs for path in job.get("adapters", ()) if path})
    numbers = {path: number for number, path in enumerate(paths, start=1)}
    # On a CPU, vLLM adds the adapter in the last slot to prompts without one.
    lora = {"enable_lora": True, "max_loras": len(paths) + 1} if paths else {}
    llm = LLM(
        model,
        dtype="float32",
        kv_cache_memory_bytes=1 << 27,
        block_size=32,
        enforce_eager=True,
        structured_outputs_config=WITHOUT_SPACES,
        enable_chunked_prefill=False,  # on a CPU, vLLM dies of a seeded prompt in pieces
        **lora,
    )
    found = []
    for job in jobs:
        sampling = SamplingParams(**job["sampling"])
        if form := job.get("structured_outputs"):
            sampling.structured_outputs = StructuredOutputsParams(**form)
        adapters = [
            path and LoRARequest(path, numbers[path], path) for path in job.get("adapters", ())
        ]
        outputs = llm.generate(
            job["prompts"], sampling, use_tqdm=False, lora_request=adapters or None
        )
        found.append([[completion(each) for each in output.outputs] for output in outputs])
    Path(outputs_path).write_text(json.dumps(found))


def completion(found: Any) -> list[Any]:
    """Its text, and log-probabilities if there are any."""
    if found.logprobs is None:
        return [found.text, None]
    places = []
    for token_id, logprobs in zip(found.token_ids, found.logprobs, strict=True):
        ranked = sorted(logprobs.values(), key=lambda each: each.rank)
        tops = [[each.decoded_token, each.logprob] for each in ranked]
        places.append([logprobs[token_id].logprob, tops])
    return [found.text, places]


if __name__ == "__main__":
    main(*sys.argv[1:])
