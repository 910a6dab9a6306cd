"""LoRA adapters of a model: their folders, versions and ranks."""

from __future__ import annotations

import json
import logging
import re
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from safetensors import SafetensorError

from batchllm_operator.errors import ModelError
from batchllm_operator.model.files import ModelFiles, one_line
from batchllm_operator.model.folder import folder_digest
from batchllm_operator.model.weights import check_adapter_weights, weight_shapes
from batchllm_operator.spec import ModelSpec

_CONFIG_FILE: Final = "adapter_config.json"
_LORA_WEIGHT: Final = re.compile(r"base_model\.model\.(?P<module>.+)\.lora_(?P<side>[AB])\.weight")
_NUMBER: Final = re.compile(r"\d+")
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Adapter:
    """A LoRA adapter, as its folder describes it."""

    name: str
    number: int
    """From 1, in the order of the names."""
    folder: Path
    is_on_hub: bool
    rank: int
    """The largest of its modules."""
    base_model: str | None
    """What it was trained on, by its own account."""

    @property
    def version(self) -> str:
        """Changes when the adapter does: the hub's commit, or a digest of the folder."""
        return f"commit:{self.folder.name}" if self.is_on_hub else folder_digest(self.folder)


def find_adapters(model: ModelSpec) -> tuple[Adapter, ...]:
    """The adapters of `model.adapters`, in the order of their names; those on the hub are loaded.

    Raises:
        ModelError: one is missing, isn't a LoRA adapter, or doesn't fit the model's weights, as far
            as these are on this machine.
    """
    adapters = tuple(
        _read(name, number, path)
        for number, (name, path) in enumerate(model.adapters.items(), start=1)
    )
    folder = _model_folder(model) if adapters else None
    for adapter in adapters:
        if folder is not None and (misfit := _misfit(adapter.folder, folder)):
            trained_on = f" (trained on {adapter.base_model})" if adapter.base_model else ""
            raise ModelError(
                f"{_where(adapter.name)}: is for another model than {model.path}{trained_on}:"
                f" {misfit}"
            )
    return adapters


def warn_of_other_models(model: ModelSpec, adapters: tuple[Adapter, ...]) -> None:
    """Warn of adapters that name another model on the hub than the job's."""
    for adapter in adapters:
        if (
            adapter.base_model
            and not Path(model.path).is_absolute()
            and not Path(adapter.base_model).is_absolute()
            and adapter.base_model.lower() != model.path.lower()
        ):
            _log.warning(
                "%s: was trained on %s, and the job's model is %s",
                _where(adapter.name),
                adapter.base_model,
                model.path,
            )


def _read(name: str, number: int, path: str) -> Adapter:
    where, is_on_hub = _where(name), not Path(path).is_absolute()
    files = ModelFiles(path, where=f"{where}: {path}")
    folder = files.folder or _load(path, where)
    try:
        config = json.loads((folder / _CONFIG_FILE).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModelError(
            f"{where}: {folder} isn't a LoRA adapter: {_CONFIG_FILE} can't be read: {error}"
        ) from error
    kind = config.get("peft_type", "LORA") if isinstance(config, dict) else None
    if kind != "LORA":
        raise ModelError(f"{where}: {folder} isn't a LoRA adapter: its peft_type is {kind!r}")
    check_adapter_weights(files)
    base = config.get("base_model_name_or_path")
    base_model = base if isinstance(base, str) else None
    return Adapter(name, number, folder, is_on_hub, _rank(config, where), base_model)


def _rank(config: dict[str, Any], where: str) -> int:
    by_module = config.get("rank_pattern") or {}
    given = [config.get("r"), *(by_module.values() if isinstance(by_module, dict) else [None])]
    ranks = [rank for rank in given if isinstance(rank, int) and rank > 0]
    if len(ranks) < len(given):
        raise ModelError(f"{where}: {_CONFIG_FILE} must have ranks (r, rank_pattern) above 0")
    return max(ranks)


def _misfit(adapter: Path, model: Path) -> str | None:
    """Why an adapter in a folder isn't for the model in another; None if no reason is known.

    vLLM takes an adapter with smaller matrices than the model's, and leaves out layers that the
    model lacks, without a word. Only modules with the same name in both are compared: quantized
    weights have other names.
    """
    shapes = _shapes(model)
    layers = {_NUMBER.sub("#", name) for name in shapes}
    for name, shape in _shapes(adapter).items():
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


def _shapes(folder: Path) -> dict[str, list[int]]:
    """Shapes of all weights in a folder's safetensors files; damaged files have none."""
    shapes: dict[str, list[int]] = {}
    for path in sorted(folder.glob("*.safetensors")):
        with suppress(OSError, SafetensorError):
            shapes |= weight_shapes(path)
    return shapes


def _model_folder(model: ModelSpec) -> Path | None:
    """The folder of the model, as far as it is on this machine."""
    if Path(model.path).is_absolute():
        return Path(model.path)
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(model.path, revision=model.revision, local_files_only=True))
    # Not there yet, or not a name of the hub (the fake engine takes any).
    except Exception:  # noqa: BLE001
        return None


def _load(path: str, where: str) -> Path:
    """The folder of an adapter on the hub, named by its commit."""
    from huggingface_hub import snapshot_download  # seconds to import

    try:
        return Path(snapshot_download(path))
    # An unknown name, no network, a full disk: all mean that the adapter can't be used.
    except Exception as error:
        raise ModelError(f"{where}: {path} can't be loaded: {one_line(error)}") from error


def _where(name: str) -> str:
    return f"model.adapters.{name}"
