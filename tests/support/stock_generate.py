"""Run as a script: generates with stock vLLM, greedily and in the given order.

    python -m support.stock_generate MODEL PROMPTS OUTPUTS

PROMPTS is JSON: lists of texts (for `LLM.generate`) or of messages (for `LLM.chat`). OUTPUTS is
written as JSON: the text and the finish reason of each, list by list.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

MAX_TOKENS = 16


def main(model: str, prompts_path: str, outputs_path: str) -> None:
    from vllm import LLM, SamplingParams

    sys.modules.pop("llvmlite.binding.ffi", None)  # vLLM stumbles over it: see VLLMEngine
    llm = LLM(
        model, dtype="float32", kv_cache_memory_bytes=1 << 27, block_size=32, enforce_eager=True
    )
    params = SamplingParams(temperature=0.0, max_tokens=MAX_TOKENS)
    found = []
    for prompts in json.loads(Path(prompts_path).read_text()):
        generate = llm.generate if isinstance(prompts[0], str) else llm.chat
        outputs = [output.outputs[0] for output in generate(prompts, params, use_tqdm=False)]
        found.append([(output.text, output.finish_reason) for output in outputs])
    Path(outputs_path).write_text(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
