"""Run as a script: what stock vLLM makes of chats.

    python -m support.stock_chat MODEL CALLS OUTPUTS

CALLS is JSON: a list of keyword arguments of `LLM.chat`, and `max_tokens`. OUTPUTS is written as
JSON: for each call and each of its chats the prompt's token ids, the text and the finish reason.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path


def main(model: str, calls_path: str, outputs_path: str) -> None:
    from vllm import LLM, SamplingParams

    sys.modules.pop("llvmlite.binding.ffi", None)  # vLLM stumbles over it: see VLLMEngine
    llm = LLM(
        model,
        dtype="float32",
        kv_cache_memory_bytes=1 << 27,
        block_size=32,
        enforce_eager=True,
    )
    found = []
    for call in json.loads(Path(calls_path).read_text()):
        params = SamplingParams(temperature=0.0, max_tokens=call.pop("max_tokens"))
        outputs = llm.chat(sampling_params=params, use_tqdm=False, **call)
        found.append(
            [
                [output.prompt_token_ids, output.outputs[0].text, output.outputs[0].finish_reason]
                for output in outputs
            ]
        )
    Path(outputs_path).write_text(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
