"""Whether a model's weights are there, whole, and in a format that vLLM loads."""

import re
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Final

from safetensors import SafetensorError, safe_open

from batchllm_operator.amounts import first_of
from batchllm_operator.errors import ModelError
from batchllm_operator.model.files import ModelFiles, pointer_fault

_CONSOLIDATED: Final = "consolidated*.safetensors"
_PATTERNS: Final = {
    "hf": ("*.safetensors", "*.bin", "*.pt"),
    "mistral": (_CONSOLIDATED,),
    "npcache": ("*.bin", "*.pt"),
    "pt": ("*.pt",),
    **dict.fromkeys(("safetensors", "fastsafetensors", "instanttensor"), ("*.safetensors",)),
}
"""Files by vLLM's load format, of which it takes the first that match."""
_ADAPTER: Final = tuple(f"adapter_model.{suffix}" for suffix in ("safetensors", "bin", "pt"))
_OTHERS: Final = frozenset(
    ("training_args.bin", "optimizer.bin", "optimizer.pt", "scheduler.pt", "scaler.pt", *_ADAPTER)
)
"""Files that match the patterns, and hold no weights of a model."""
_SHARD: Final = re.compile(r"(?P<head>.+-)(?P<number>\d{5})-of-(?P<count>\d{5})(?P<tail>\..+)")
_MAX_SHARDS: Final = 10_000
_MAX_NAMED: Final = 3


def check_weights(files: ModelFiles, load_format: str = "auto") -> None:
    """Refuse a model whose weights vLLM can't load, as far as names, sizes and headers tell.

    The ModelError names those that are missing, of another format, cut off or empty.
    """
    if load_format == "auto":
        has_own = any(fnmatchcase(name, _CONSOLIDATED) for name in files.names)
        load_format = "mistral" if has_own else "hf"
    if load_format not in _PATTERNS or files.is_cached:  # another machine may load the rest
        return
    present = _present(files, _PATTERNS[load_format])
    listed = _listed(files, load_format, present)
    if missing := sorted((listed or _numbered(present)) - files.names):
        named = first_of(missing, _MAX_NAMED)
        raise ModelError(f"{files.where}: lacks files of its weights: {named}")
    if not present:
        raise _without_weights(files, _PATTERNS[load_format])
    for name in sorted(listed & present or present):
        _check_file(files, name)


def check_adapter_weights(files: ModelFiles) -> None:
    """Refuse an adapter without weights; see `check_weights`."""
    name = next((name for name in _ADAPTER if name in files.names), None)
    if name is None:
        raise ModelError(f"{files.where}: has no weights: there is no {_ADAPTER[0]}")
    _check_file(files, name)


def weight_shapes(path: Path) -> dict[str, list[int]]:
    """Shapes of the weights in a safetensors file, by name; raises OSError or SafetensorError."""
    with safe_open(path, framework="numpy") as file:
        return {name: file.get_slice(name).get_shape() for name in file.keys()}  # noqa: SIM118


def _check_file(files: ModelFiles, name: str) -> None:
    """Refuse a file of weights by its size and its head; files on the hub aren't here yet."""
    if files.folder is None:
        return
    path, fault = files.folder / name, None
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            fault = pointer_fault(file.read(64)) if size else "is empty"
        if not fault and path.suffix == ".safetensors" and not weight_shapes(path):
            fault = "has no weights in it"
    except OSError as error:
        fault = f"can't be read: {error}"
    except SafetensorError as error:
        fault = f"isn't a safetensors file, or is cut off: it has {size:,} bytes: {error}"
    if fault:
        raise ModelError(f"{files.where}: its {name} {fault}")


def _present(files: ModelFiles, patterns: tuple[str, ...]) -> set[str]:
    """The weights that vLLM takes: those of the first pattern that any name matches."""
    own = [name for name in files.names if "/" not in name]
    matching = ({name for name in own if fnmatchcase(name, pattern)} for pattern in patterns)
    return next(filter(None, matching), set[str]()) - _OTHERS


def _listed(files: ModelFiles, load_format: str, present: set[str]) -> set[str]:
    """The files that the index of the shards names; empty for a model without an index."""
    safetensors, torch = "model.safetensors", "pytorch_model.bin"
    indexed = [torch] if present else [safetensors, torch]
    if load_format == "mistral":
        indexed = ["consolidated.safetensors"]
    elif any(name.endswith(".safetensors") for name in present):
        indexed = [safetensors]
    names: set[str] = set()
    for name in indexed:
        shards = files.read_mapping(f"{name}.index.json").get("weight_map")
        names |= set(map(str, shards.values())) if isinstance(shards, dict) else set()
    return names


def _numbered(present: set[str]) -> set[str]:
    """All shards, by the names of some: `model-00001-of-00003.safetensors` is one of three."""
    return {
        f"{match['head']}{number:05d}-of-{match['count']}{match['tail']}"
        for match in filter(None, map(_SHARD.fullmatch, present))
        for number in range(1, min(int(match["count"]), _MAX_SHARDS) + 1)
    }


def _without_weights(files: ModelFiles, patterns: tuple[str, ...]) -> ModelError:
    if any(name.lower().endswith(".gguf") for name in files.names):
        return files.gguf_error()
    if "adapter_config.json" in files.names:
        return ModelError(
            f"{files.where}: is a LoRA adapter, not a model: give the model that it is for as"
            " model.path, and the adapter in model.adapters"
        )
    return ModelError(
        f"{files.where}: has no weights ({', '.join(patterns)}); complete the folder, or download"
        " it again (engine.backend: fake needs none)"
    )
