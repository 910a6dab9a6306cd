"""Compares the shapes of an adapter's weights with those of its model.

vLLM takes an adapter with smaller matrices than the model's, and leaves out layers that the model
lacks, without a word.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Final

from batchllm_operator.model.weights import read_header

_LORA_WEIGHT: Final = re.compile(r"base_model\.model\.(?P<module>.+)\.lora_(?P<side>[AB])\.weight")
_NUMBER: Final = re.compile(r"\d+")


def find_misfit(adapter: Path, model: Path) -> str | None:
    """Why an adapter in a folder isn't for the model in another; None if no reason is known.

    Only safetensors files are compared, and modules that have the same name in both: quantized
    weights have other names.
    """
    shapes = weight_shapes(model)
    layers = {_NUMBER.sub("#", name) for name in shapes}
    for name, shape in weight_shapes(adapter).items():
        if (match := _LORA_WEIGHT.fullmatch(name)) is None:
            continue
        weight = f"{match['module']}.weight"
        if weight not in shapes:
            if _NUMBER.sub("#", weight) in layers:
                return f"the model has no {match['module']}"
            continue
        side, axis = ("inputs", 1) if match["side"] == "A" else ("outputs", 0)
        if len(shape) == len(shapes[weight]) == 2 and shape[axis] != shapes[weight][axis]:
            return (
                f"{match['module']} has {shapes[weight][axis]} {side} in the model, and"
                f" {shape[axis]} in the adapter"
            )
    return None


def weight_shapes(folder: Path) -> dict[str, list[int]]:
    """Shapes of all weights in a folder's safetensors files, by name; damaged files have none."""
    shapes: dict[str, list[int]] = {}
    for path in sorted(folder.glob("*.safetensors")):
        try:
            header, _ = read_header(path)
            shapes |= {
                name: [int(each) for each in tensor["shape"]] for name, tensor in header.items()
            }
        except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
            continue
    return shapes
