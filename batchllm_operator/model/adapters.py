"""LoRA adapters of a model: their folders, versions and ranks, and whether they fit the model."""

import json
import logging
import re
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Final, NamedTuple

from safetensors import SafetensorError
from tokenizers import Tokenizer

from batchllm_operator.amounts import first_of
from batchllm_operator.errors import ModelError, one_line
from batchllm_operator.model.files import ModelFiles, cached_folder, folder_digest
from batchllm_operator.model.tokenizer import without_limits
from batchllm_operator.model.weights import check_adapter_weights, weight_shapes
from batchllm_operator.spec import ModelSpec

_CONFIG_FILE: Final = "adapter_config.json"
_TOKENIZER: Final = "tokenizer.json"
_TOKENIZER_CONFIG: Final = "tokenizer_config.json"
_LORA_WEIGHT: Final = re.compile(r"base_model\.model\.(?P<module>.+)\.lora_(?P<side>[AB])\.weight")
_NUMBER: Final = re.compile(r"\d+")
_MOST_NAMED: Final = 3
_log = logging.getLogger(__name__)


class Adapter(NamedTuple):
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
    def where(self) -> str:
        """Its place in the spec."""
        return f"model.adapters.{self.name}"

    @property
    def version(self) -> str:
        """Changes when the adapter does: the hub's commit, or a digest of the folder."""
        return f"commit:{self.folder.name}" if self.is_on_hub else folder_digest(self.folder)


def find_adapters(model: ModelSpec) -> tuple[Adapter, ...]:
    """The adapters of `model.adapters`, in the order of their names; those on the hub are loaded.

    A ModelError names one that is missing, isn't a LoRA adapter, or doesn't fit the model's
    weights, as far as these are on this machine.
    """
    named = enumerate(model.adapters.items(), start=1)
    adapters = tuple(_read(name, number, path) for number, (name, path) in named)
    folder: Path | None = Path(model.path)
    if adapters and not Path(model.path).is_absolute():
        folder = cached_folder(model.path, model.revision)
    for adapter in adapters:
        if folder is not None and (misfit := _misfit(adapter.folder, folder)):
            trained_on = f" (trained on {adapter.base_model})" if adapter.base_model else ""
            raise ModelError(
                f"{adapter.where}: is for another model than {model.path}{trained_on}: {misfit}"
            )
    return adapters


def check_adapters(
    model: ModelSpec, adapters: Iterable[Adapter], files: ModelFiles | None, *, chat: bool
) -> None:
    """Warn of adapters for another model, or with a tokenizer or chat template of their own.

    The fake engine without a model has no files. `chat`: whether prompts are chats.

    Raises:
        ModelError: an adapter has tokens that the model lacks, so it can't be given them and can't
            write them; a token that only fills up batches doesn't count. Or a file is damaged.
    """
    for adapter in adapters:
        base = adapter.base_model
        is_on_hub = base and not any(Path(path).is_absolute() for path in (model.path, base))
        if base and is_on_hub and base.lower() != model.path.lower():
            _log.warning(
                "%s: was trained on %s, and the job's model is %s", adapter.where, base, model.path
            )
        if files is not None:
            own = ModelFiles(str(adapter.folder), where=adapter.where)
            _check_tokenizer(own, files, chat=chat)


def _read(name: str, number: int, path: str) -> Adapter:
    where = f"model.adapters.{name}"
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
    by_module, base = config.get("rank_pattern") or {}, config.get("base_model_name_or_path")
    ranks = [config.get("r"), *(by_module.values() if isinstance(by_module, dict) else [None])]
    if not all(isinstance(rank, int) and rank > 0 for rank in ranks):
        raise ModelError(f"{where}: {_CONFIG_FILE} must have ranks (r, rank_pattern) above 0")
    is_on_hub, base_model = not Path(path).is_absolute(), base if isinstance(base, str) else None
    return Adapter(name, number, folder, is_on_hub, max(ranks), base_model)


def _load(path: str, where: str) -> Path:
    """The folder of an adapter on the hub, named by its commit."""
    from huggingface_hub import snapshot_download  # seconds to import

    try:
        return Path(snapshot_download(path))
    # An unknown name, no network, a full disk: all mean that the adapter can't be used.
    except Exception as error:
        raise ModelError(f"{where}: {path} can't be loaded: {one_line(error)}") from error


def _misfit(adapter: Path, model: Path) -> str | None:
    """Why an adapter in a folder isn't for the model in another; None if no reason is known.

    vLLM takes an adapter with smaller matrices than the model's, and leaves out layers that the
    model lacks, without a word. Modules are compared by name: quantized weights have other names.
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


def _check_tokenizer(own: ModelFiles, model: ModelFiles, *, chat: bool) -> None:
    tokens = _tokens(own)  # of most adapters none: then the model's needn't be read
    tokenizers = [_tokenizer(files) if tokens else None for files in (own, model)]
    if tokenizers[1] is not None:
        pad = own.read_mapping(_TOKENIZER_CONFIG).get("pad_token")
        padding = {str(pad.get("content") if isinstance(pad, dict) else pad)}
        if new := sorted(tokens - _tokens(model) - padding):
            raise ModelError(
                f"{own.where}: its tokenizer has tokens that the model lacks:"
                f" {first_of([*map(repr, new)], _MOST_NAMED)}; merge it into a model that has"
                " them, and use that as model.path"
            )
    known = {without_limits(tokenizer) for tokenizer in tokenizers if tokenizer is not None}
    is_other = {  # one alone has nothing to differ from
        "tokenizer": len(known) == 2,
        "chat template": chat and _template(own) not in (None, _template(model)),
    }
    if any(is_other.values()):
        _log.warning(
            "%s: has a %s of its own, which differs from the model's and isn't used: if it was"
            " trained with that, merge it into a model that has it",
            own.where,
            " and a ".join(name for name, differs in is_other.items() if differs),
        )


def _tokens(files: ModelFiles) -> set[str]:
    """The tokens that files name; none if there are no such files."""
    tokenizer = _tokenizer(files)
    listed = files.read_mapping(_TOKENIZER_CONFIG).get("added_tokens_decoder")
    contents = [
        token.get("content")
        for token in (listed.values() if isinstance(listed, dict) else ())
        if isinstance(token, dict)
    ]
    return {
        *(tokenizer.get_vocab() if tokenizer is not None else ()),
        *files.read_mapping("added_tokens.json"),
        *(content for content in contents if isinstance(content, str)),
    }


def _tokenizer(files: ModelFiles) -> Tokenizer | None:
    if (path := files.find(_TOKENIZER)) is None:
        return None
    try:
        return Tokenizer.from_file(str(path))
    except Exception as error:  # `tokenizers` raises plain exceptions
        raise ModelError(f"{files.where}: its {_TOKENIZER} can't be read: {error}") from error


def _template(files: ModelFiles) -> str | None:
    """The chat template, or all of them by name, without the space around it."""
    if (path := files.find("chat_template.jinja")) is not None:
        return path.read_text(encoding="utf-8", errors="replace").strip()
    for name in (_TOKENIZER_CONFIG, "chat_template.json"):
        if template := files.read_mapping(name).get("chat_template"):
            return str(template).strip()
    return None
