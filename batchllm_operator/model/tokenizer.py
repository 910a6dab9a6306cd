"""Any model's tokenizer, loaded and called by transformers, with its chat template."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Sequence
from typing import Any, Final

from tokenizers import Tokenizer as Backend

from batchllm_operator.errors import ModelError
from batchllm_operator.model.chat_template import ChatTemplate
from batchllm_operator.model.files import ModelFiles, one_line, pointer_fault
from batchllm_operator.spec import ModelSpec, PromptSpec

_CONFIG_FILE: Final = "config.json"
_MISTRAL_FILE: Final = "tekken.json"
_TOKENIZERS: Final = frozenset({"tokenizer.json", "tokenizer.model", "vocab.json"})


class TransformersTokenizer:
    """The tokenizer of a model.

    Args:
        prompt: the spec's, which says whether prompts go through the model's chat template.
        files: the model's.
        ds: the partition, for chat templates that ask for the date.

    Attributes:
        chat: the chat template; None if prompts don't go through it.
        backend: a copy of what its call passes its texts to, set not to cut or pad; None if the
            call does more than that.
        fingerprint: changes when the tokenizer, or a chat template that is used, does.
        config: the model's configuration.
        commit: the hub's commit; None for a folder.

    Raises:
        ModelError: the tokenizer can't be loaded, or has no chat template.
    """

    def __init__(self, model: ModelSpec, prompt: PromptSpec, files: ModelFiles, ds: str) -> None:
        self._tokenizer, self.config = _load(model, files)
        self.chat: ChatTemplate | None = None
        template = ""
        if prompt.chat_template:
            self.chat = ChatTemplate(self._tokenizer, model.path, ds, prompt)
            template = json.dumps(self._tokenizer.chat_template)
        self.backend = _copy_backend(self._tokenizer)
        # Before encoding, which changes the tokenizer's own JSON.
        self.fingerprint = self._fingerprint(template)
        self.commit: str | None = getattr(self.config, "_commit_hash", None)

    def vocabulary(self) -> dict[str, int]:
        vocabulary: dict[str, int] = self._tokenizer.get_vocab()
        return vocabulary

    def added_tokens(self) -> dict[str, bool]:
        """Tokens beside the model's own vocabulary, and whether they are special."""
        added = self._tokenizer.added_tokens_decoder.values()
        tokens = {token.content: bool(token.special) for token in added}
        return tokens | dict.fromkeys(map(str, self._tokenizer.all_special_tokens), True)

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        """Token ids of each text; a chat template adds its special tokens itself."""
        # verbose=False: the caller checks the lengths.
        encoded = self._tokenizer(
            list(texts),
            add_special_tokens=self.chat is None,
            return_attention_mask=False,
            return_token_type_ids=False,
            verbose=False,
        )
        ids: list[list[int]] = encoded["input_ids"]
        return ids

    def decode(self, token_ids: Sequence[int]) -> str:
        return str(self._tokenizer.decode(list(token_ids)))

    def _fingerprint(self, chat_template: str) -> str:
        """By the backend, or by class and vocabulary without one."""
        special = json.dumps(self._tokenizer.special_tokens_map, sort_keys=True, default=str)
        if self._tokenizer.is_fast:
            return fingerprint(self._tokenizer.backend_tokenizer.to_str(), special, chat_template)
        kind, vocabulary = type(self._tokenizer).__name__, self._tokenizer.get_vocab()
        return _digest(kind, json.dumps(vocabulary, sort_keys=True), special, chat_template)


def fingerprint(backend: str, *more: str) -> str:
    """A digest of a backend's JSON, and of all else that a tokenizer's ids depend on."""
    content = json.loads(backend)
    # Each call that encodes sets these; prompts are never cut or padded here.
    content.pop("truncation", None)
    content.pop("padding", None)
    return _digest(json.dumps(content, sort_keys=True), *more)


def _digest(*parts: str) -> str:
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()


def _load(model: ModelSpec, files: ModelFiles) -> tuple[Any, Any]:
    """The tokenizer and the configuration of a model.

    Raises:
        ModelError: they can't be loaded.
    """
    _check_format(files)
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")  # "PyTorch was not found"
    from transformers import AutoConfig, AutoTokenizer  # seconds to import

    origin: dict[str, Any] = {
        "revision": model.revision,
        "trust_remote_code": model.trust_remote_code,
        "local_files_only": files.is_cached,
    }
    # Of Mistral's models with both, transformers would take its own format.
    one_format = {"mistral_format": False} if _MISTRAL_FILE in files.names else {}
    try:
        config = AutoConfig.from_pretrained(model.path, **origin)
        tokenizer = AutoTokenizer.from_pretrained(model.path, **origin, **one_format)
        is_empty = not tokenizer.get_vocab().keys() - tokenizer.get_added_vocab().keys()
    # A damaged folder, a missing package: each library has its own errors, and all mean that the
    # spec's model can't be used.
    except Exception as error:
        absent = [n for n in (_CONFIG_FILE, "tokenizer.json") if n not in files.names]
        hint = f" (there is no {' and no '.join(absent)})" if absent else ""
        raise ModelError(f"{files.where}: can't be loaded{hint}: {one_line(error)}") from error
    if is_empty:  # as transformers makes it where the files are missing
        raise ModelError(f"{files.where}: has no tokenizer: there is no tokenizer.json")
    return tokenizer, config


def _check_format(files: ModelFiles) -> None:
    """Refuse what transformers fails at with a message of its own code.

    Raises:
        ModelError: the tokenizer or the configuration is in a format that isn't supported.
    """
    has_config = files.read_json(_CONFIG_FILE) is not None
    if not has_config and any(name.lower().endswith(".gguf") for name in files.names):
        raise files.gguf_error()
    if _MISTRAL_FILE in files.names and not (has_config and files.names & _TOKENIZERS):
        raise ModelError(
            f"{files.where}: is in Mistral's own format ({_MISTRAL_FILE}), which isn't supported;"
            f" use a copy of the model that has {_CONFIG_FILE} and tokenizer.json, as transformers"
            " writes them"
        )
    for name in sorted(files.names & _TOKENIZERS):
        if files.folder and (fault := pointer_fault((files.folder / name).read_bytes())):
            raise ModelError(f"{files.where}: its {name} {fault}")


def _copy_backend(tokenizer: Any) -> Backend | None:
    kind = type(tokenizer)
    if not tokenizer.is_fast or kind.__module__.partition(".")[0] != "transformers":
        return None
    from transformers import PreTrainedTokenizerFast  # seconds to import

    is_usual = all(
        getattr(kind, name) is getattr(PreTrainedTokenizerFast, name)
        for name in ("__call__", "_encode_plus")
    )
    if not is_usual or hasattr(tokenizer, "_switch_to_input_mode"):
        return None
    backend = Backend.from_str(tokenizer.backend_tokenizer.to_str())
    backend.no_truncation()
    backend.no_padding()
    backend.encode_special_tokens = bool(tokenizer.split_special_tokens)
    return backend
