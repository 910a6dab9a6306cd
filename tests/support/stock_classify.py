"""Run as a script: log-probabilities of the first token after each prompt, by stock vLLM.

    python -m support.stock_classify MODEL PROMPTS OUTPUTS

PROMPTS is JSON: a list of texts. OUTPUTS is written as JSON: for each, the log-probabilities of the
whole vocabulary, by token id.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path


def main(model: str, prompts_path: str, outputs_path: str) -> None:
    from vllm import LLM, SamplingParams

    sys.modules.pop("llvmlite.binding.ffi", None)  # vLLM stumbles over it: see VLLMEngine
    llm = LLM(
        model,
        dtype="float32",
        kv_cache_memory_bytes=1 << 27,
        block_size=32,
        enforce_eager=True,
        max_logprobs=-1,
    )
    params = SamplingParams(temperature=0.0, max_tokens=1, logprobs=-1)
    outputs = llm.generate(json.loads(Path(prompts_path).read_text()), params, use_tqdm=False)
    found = [
        {
            str(token_id): each.logprob
            for token_id, each in (output.outputs[0].logprobs or [{}])[0].items()
        }
        for output in outputs
    ]
    Path(outputs_path).write_text(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
