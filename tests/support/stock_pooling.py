"""Run as a script: vectors of texts by stock vLLM's `LLM.embed` or `LLM.classify`.

    python -m support.stock_pooling MODEL TASK PROMPTS OUTPUTS

TASK is embed or classify. PROMPTS is JSON: a list of texts. OUTPUTS is written as JSON: for each,
a list of numbers.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path


def main(model: str, task: str, prompts_path: str, outputs_path: str) -> None:
    from vllm import LLM

    sys.modules.pop("llvmlite.binding.ffi", None)  # vLLM stumbles over it: see VLLMEngine
    llm = LLM(
        model,
        runner="pooling",
        dtype="float32",
        kv_cache_memory_bytes=1 << 27,
        block_size=32,
        enforce_eager=True,
    )
    prompts = json.loads(Path(prompts_path).read_text())
    if task == "embed":
        found = [each.outputs.embedding for each in llm.embed(prompts, use_tqdm=False)]
    else:
        found = [each.outputs.probs for each in llm.classify(prompts, use_tqdm=False)]
    Path(outputs_path).write_text(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
