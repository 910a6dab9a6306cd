"""Any model's tokenizer, loaded and called by transformers, with its chat template."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer as Backend

from batchllm_operator.errors import ModelError
from batchllm_operator.model.chat_template import ChatTemplate, advise_without_template
from batchllm_operator.model.stored_tokenizer import fingerprint
from batchllm_operator.spec import ModelSpec, PromptSpec


class TransformersTokenizer:
    """The tokenizer of a model, with numbers of its configuration.

    Args:
        model: a folder or a name on the hub.
        prompt: the spec's, which says whether prompts go through its chat template.

    Attributes:
        backend: a copy of what its call passes its texts to, set not to cut or pad; None if the
            call does more than that.
        fingerprint: see `StoredTokenizer`; includes the chat template if it is used.
        position_limit: the configuration's limit of prompt and output, unchecked.
        commit: the hub's commit; None for a folder.

    Raises:
        ModelError: the tokenizer can't be loaded, or has no chat template.
    """

    def __init__(self, model: ModelSpec, prompt: PromptSpec) -> None:
        self._path, self._prompt = model.path, prompt
        self._tokenizer, config = _load(model)
        self._chat = chat = prompt.chat_template
        template = self._tokenizer.chat_template if chat else ""
        if chat and not template:
            raise ModelError(
                f"model {model.path}: has no chat template; {advise_without_template(prompt)}"
            )
        self.backend = _copy_backend(self._tokenizer)
        self.fingerprint = self._fingerprint(json.dumps(template) if chat else "")
        self.position_limit: object = getattr(
            config.get_text_config(), "max_position_embeddings", None
        )
        self.commit: str | None = getattr(config, "_commit_hash", None)

    def vocabulary(self) -> dict[str, int]:
        found: dict[str, int] = self._tokenizer.get_vocab()
        return found

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        """Token ids of each text; a chat template adds its special tokens itself."""
        # verbose=False: the caller checks the lengths.
        encoded = self._tokenizer(
            list(texts),
            add_special_tokens=not self._chat,
            return_attention_mask=False,
            return_token_type_ids=False,
            verbose=False,
        )
        ids: list[list[int]] = encoded["input_ids"]
        return ids

    def decode(self, token_ids: Sequence[int]) -> str:
        return str(self._tokenizer.decode(list(token_ids)))

    def chat_template(self, ds: str) -> ChatTemplate:
        """Its chat template; see there."""
        return ChatTemplate(self._tokenizer, self._path, ds, self._prompt)

    def _fingerprint(self, chat_template: str) -> str:
        """The fingerprint by the backend, or by class and vocabulary without one."""
        special = json.dumps(self._tokenizer.special_tokens_map, sort_keys=True, default=str)
        if self._tokenizer.is_fast:
            return fingerprint(self._tokenizer.backend_tokenizer.to_str(), special, chat_template)
        kind = type(self._tokenizer).__name__
        vocabulary = json.dumps(self._tokenizer.get_vocab(), sort_keys=True)
        return fingerprint(None, kind, vocabulary, special, chat_template)


def _load(model: ModelSpec) -> tuple[Any, Any]:
    """The tokenizer and the configuration of a model.

    Raises:
        ModelError: they can't be loaded.
    """
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")  # "PyTorch was not found"
    from transformers import AutoConfig, AutoTokenizer  # seconds to import

    origin: dict[str, Any] = {
        "revision": model.revision,
        "trust_remote_code": model.trust_remote_code,
    }
    try:
        tokenizer = AutoTokenizer.from_pretrained(model.path, **origin)
        return tokenizer, AutoConfig.from_pretrained(model.path, **origin)
    # A damaged folder, an unknown name, a missing package: each library has its own errors, and
    # all mean that the spec's model can't be used.
    except Exception as error:
        first_line = str(error).strip().splitlines()[0] if str(error).strip() else repr(error)
        is_folder = Path(model.path).is_absolute()
        hint = "" if is_folder else " (a folder begins with ./, ../, ~/ or /)"
        raise ModelError(f"model {model.path}: can't be loaded{hint}: {first_line}") from error


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
