"""Small random LoRA adapters in folders."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file


def write_adapter(
    folder: Path,
    modules: Mapping[str, tuple[int, int]],
    *,
    seed: int = 0,
    rank: int = 4,
    scale: float = 1.0,
    **config: Any,
) -> Path:
    """Write an adapter with random weights, as PEFT does.

    Args:
        modules: (inputs, outputs) by the module's name in the model.
        config: fields of `adapter_config.json` to add or replace.
    """
    folder.mkdir(parents=True, exist_ok=True)
    fields = {
        "peft_type": "LORA",
        "r": rank,
        "lora_alpha": 2 * rank,
        "bias": "none",
        "target_modules": sorted({name.rpartition(".")[2] for name in modules}),
        **config,
    }
    (folder / "adapter_config.json").write_text(json.dumps(fields))
    generator = np.random.default_rng(seed)
    weights = {}
    for name, (num_inputs, num_outputs) in modules.items():
        for side, shape in (("A", (rank, num_inputs)), ("B", (num_outputs, rank))):
            values = generator.normal(0, scale / shape[1] ** 0.5, shape)
            weights[f"base_model.model.{name}.lora_{side}.weight"] = values.astype("<f4")
    save_file(weights, folder / "adapter_model.safetensors")
    return folder
