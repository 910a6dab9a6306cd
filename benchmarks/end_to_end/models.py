"""Models of published shapes, without their weights: what an engine needs to make dummy ones.

Each is the `config.json` that its publisher gives, as far as shapes and arithmetic go.
"""

import json
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from batchllm_operator.cost import MODEL_SHAPES, ModelShape
from benchmarks.workloads import WORKLOADS, longest_tokens, shrunk

TINY: Final = "tiny"
"""Mistral's architecture, small enough for a CPU."""
_TINY: Final = ModelShape(TINY, 2, 128, 4, 2, 32, 256, 512, 426_624)
_COMMON: Final = {
    "hidden_act": "silu",
    "torch_dtype": "bfloat16",
    "bos_token_id": 1,
    "tie_word_embeddings": False,
}
_MISTRAL: Final = {
    "architectures": ["MistralForCausalLM"],
    "model_type": "mistral",
    "max_position_embeddings": 32768,
    "sliding_window": None,
    "rope_theta": 10000.0,
    "rms_norm_eps": 1e-5,
    "eos_token_id": 2,
}
_CONFIGS: Final[Mapping[str, Mapping[str, Any]]] = {
    "Mistral-7B": _MISTRAL,
    "Qwen2-7B": {
        "architectures": ["Qwen2ForCausalLM"],
        "model_type": "qwen2",
        "max_position_embeddings": 131072,
        "use_sliding_window": False,
        "rope_theta": 1000000.0,
        "rms_norm_eps": 1e-6,
        "eos_token_id": 151643,
    },
    "Llama-3-8B": {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "max_position_embeddings": 8192,
        "rope_theta": 500000.0,
        "rms_norm_eps": 1e-5,
        "eos_token_id": 128001,
    },
    TINY: {**_MISTRAL, "max_position_embeddings": 4096},
}
MODELS: Final = tuple(_CONFIGS)


def model_config(name: str) -> dict[str, Any]:
    """The `config.json` of one of `MODELS`."""
    shape = _TINY if name == TINY else MODEL_SHAPES[name]
    return {
        **_COMMON,
        **_CONFIGS[name],
        "hidden_size": shape.hidden_size,
        "intermediate_size": shape.intermediate_size,
        "num_hidden_layers": shape.num_layers,
        "num_attention_heads": shape.num_heads,
        "num_key_value_heads": shape.num_kv_heads,
        "head_dim": shape.head_size,
        "vocab_size": shape.vocab_size,
    }


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
