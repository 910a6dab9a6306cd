"""Models of published shapes, without their weights: what an engine needs to make dummy ones.

Each is the `config.json` that its publisher gives, as far as shapes and arithmetic go.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from benchmarks.workloads import WORKLOADS, longest_tokens, shrunk

_COMMON: Final = {
    "hidden_act": "silu",
    "torch_dtype": "bfloat16",
    "bos_token_id": 1,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
}
CONFIGS: Final[Mapping[str, Mapping[str, Any]]] = {
    "Mistral-7B": {
        **_COMMON,
        "architectures": ["MistralForCausalLM"],
        "model_type": "mistral",
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "vocab_size": 32000,
        "max_position_embeddings": 32768,
        "sliding_window": None,
        "rope_theta": 10000.0,
        "eos_token_id": 2,
    },
    "Qwen2-7B": {
        **_COMMON,
        "architectures": ["Qwen2ForCausalLM"],
        "model_type": "qwen2",
        "hidden_size": 3584,
        "intermediate_size": 18944,
        "num_hidden_layers": 28,
        "num_attention_heads": 28,
        "num_key_value_heads": 4,
        "vocab_size": 152064,
        "max_position_embeddings": 131072,
        "use_sliding_window": False,
        "rope_theta": 1000000.0,
        "rms_norm_eps": 1e-6,
        "eos_token_id": 151643,
    },
    "Llama-3-8B": {
        **_COMMON,
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "vocab_size": 128256,
        "max_position_embeddings": 8192,
        "rope_theta": 500000.0,
        "eos_token_id": 128001,
    },
}
TINY: Final = "tiny"
"""Mistral's architecture, small enough for a CPU."""
_TINY_SIZES: Final = {
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "vocab_size": 512,
    "max_position_embeddings": 4096,
}
MODELS: Final = (*CONFIGS, TINY)


def model_config(name: str) -> dict[str, Any]:
    """The `config.json` of one of `MODELS`."""
    if name == TINY:
        return {**CONFIGS["Mistral-7B"], **_TINY_SIZES}
    return dict(CONFIGS[name])


def write_model(name: str) -> Path:
    """A folder that vLLM takes for the model, with `load_format="dummy"`.

    It is the same one each time, for its path is part of what vLLM's cache of compiled code and a
    device's profile are known by.
    """
    folder = Path(tempfile.gettempdir(), f"batchllm-bench-models-{os.getuid()}", name)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(model_config(name)), encoding="utf-8")
    return folder


def max_model_len(name: str) -> int:
    """Most tokens of any prompt of any workload with its output; the same for all engines."""
    shapes = WORKLOADS.values()
    return max(longest_tokens(shrunk(each) if name == TINY else each) for each in shapes)
