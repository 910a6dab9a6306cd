"""Run as a script: what stock vLLM makes of chats.

    python -m support.stock_chat MODEL CALLS OUTPUTS

CALLS is JSON: a list of keyword arguments of `LLM.chat`, with `max_tokens`, and `plugin` for a file
of a reasoning parser. OUTPUTS is written as JSON: for each call and each of its chats the prompt's
token ids, the finish reason, the reasoning (null without a parser) and the text.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any


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
        plugin = call.pop("plugin", None)
        params = SamplingParams(
            temperature=0.0, max_tokens=call.pop("max_tokens"), skip_special_tokens=not plugin
        )
        outputs = llm.chat(sampling_params=params, use_tqdm=False, **call)
        split = parser_of(plugin, llm.get_tokenizer()) if plugin else lambda text: (None, text)
        found.append(
            [
                [output.prompt_token_ids, first.finish_reason, *split(first.text)]
                for output in outputs
                for first in output.outputs
            ]
        )
    Path(outputs_path).write_text(json.dumps(found))


def parser_of(plugin: str, tokenizer: Any) -> Callable[[str], tuple[str | None, str]]:
    """Takes a text apart by the parser `demo`."""
    from vllm.reasoning import ReasoningParserManager

    ReasoningParserManager.import_reasoning_parser(plugin)
    parser = ReasoningParserManager.get_reasoning_parser("demo")(tokenizer)

    def split(text: str) -> tuple[str | None, str]:
        reasoning, answer = parser.extract_reasoning(text, None)
        return reasoning, answer or ""

    return split


if __name__ == "__main__":
    main(*sys.argv[1:])
