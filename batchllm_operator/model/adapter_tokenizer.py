"""An adapter's own tokenizer and chat template, in whose place a job uses those of its model."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import Any, Final

from tokenizers import Tokenizer as Backend

from batchllm_operator.amounts import first_of
from batchllm_operator.errors import ModelError
from batchllm_operator.model.adapters import Adapter
from batchllm_operator.model.files import ModelFiles
from batchllm_operator.model.stored_tokenizer import fingerprint

_TOKENIZER: Final = "tokenizer.json"
_CONFIG: Final = "tokenizer_config.json"
_TEMPLATE: Final = "chat_template.jinja"
_MOST_NAMED: Final = 3
_log = logging.getLogger(__name__)


def check_adapter_tokenizers(adapters: Iterable[Adapter], model: ModelFiles, *, chat: bool) -> None:
    """Warn of adapters with a tokenizer or a chat template of their own that isn't the model's.

    Args:
        chat: whether prompts go through the model's chat template.

    Raises:
        ModelError: an adapter has tokens that the model lacks, so it can't be given them and can't
            write them; a token that only fills up batches doesn't count. Or a file is damaged.
    """
    known = _tokens(model) if _TOKENIZER in model.names else set()
    for adapter in adapters:
        where = f"model.adapters.{adapter.name}"
        own = ModelFiles(str(adapter.folder), where=where)
        if new := sorted(_tokens(own) - known - {_padding(own)}) if known else []:
            raise ModelError(
                f"{where}: its tokenizer has tokens that the model lacks:"
                f" {first_of([*map(repr, new)], _MOST_NAMED)}; merge it into a model that has"
                " them, and use that as model.path"
            )
        differs = [
            name
            for name, is_other in {
                "tokenizer": _is_other_tokenizer(own, model),
                "chat template": chat and _template(own) not in (None, _template(model)),
            }.items()
            if is_other
        ]
        if differs:
            _log.warning(
                "%s: has a %s of its own, which differs from the model's and isn't used: if it was"
                " trained with that, merge it into a model that has it",
                where,
                " and a ".join(differs),
            )


def _tokens(files: ModelFiles) -> set[str]:
    """The tokens that files name; none if there are no such files."""
    backend = _backend(files)
    tokens = set(backend.get_vocab() if backend is not None else ())
    tokens |= _mapping(files, "added_tokens.json").keys()
    listed = _mapping(files, _CONFIG).get("added_tokens_decoder")
    for token in listed.values() if isinstance(listed, dict) else ():
        if isinstance(token, dict) and isinstance(content := token.get("content"), str):
            tokens.add(content)
    return tokens


def _is_other_tokenizer(own: ModelFiles, model: ModelFiles) -> bool:
    """Whether both have a `tokenizer.json`, and these make other ids."""
    backends = [backend for backend in map(_backend, (own, model)) if backend is not None]
    prints = {fingerprint(backend.to_str()) for backend in backends}
    return len(backends) == len(prints) == 2


def _backend(files: ModelFiles) -> Backend | None:
    if (path := files.find(_TOKENIZER)) is None:
        return None
    try:
        return Backend.from_file(str(path))
    except Exception as error:  # `tokenizers` raises plain exceptions
        raise ModelError(f"{files.where}: its {_TOKENIZER} can't be read: {error}") from error


def _mapping(files: ModelFiles, name: str) -> dict[str, Any]:
    found = files.read_json(name)
    return found if isinstance(found, dict) else {}


def _padding(files: ModelFiles) -> str:
    token = _mapping(files, _CONFIG).get("pad_token")
    return str(token.get("content") if isinstance(token, dict) else token)


def _template(files: ModelFiles) -> str | None:
    """The chat template, or all of them by name, without the space around it."""
    if (path := files.find(_TEMPLATE)) is not None:
        return path.read_text(encoding="utf-8", errors="replace").strip()
    for name in (_CONFIG, "chat_template.json"):
        if found := _mapping(files, name).get("chat_template"):
            return str(found).strip()
    return None
