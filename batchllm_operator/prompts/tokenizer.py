"""Prompt texts to token ids, exactly as the engine's own tokenizer gives them."""

from __future__ import annotations

import datetime
import hashlib
import json
import logging
import os
from collections.abc import Sequence
from operator import itemgetter
from pathlib import Path
from typing import Any, Final, Protocol

import numpy as np

from batchllm_operator.errors import ModelError
from batchllm_operator.planner import TokenTable
from batchllm_operator.planner.token_table import MAX_TOKEN_ID
from batchllm_operator.prompts.model_folder import folder_digest
from batchllm_operator.prompts.prompt_encoder import PromptEncoder
from batchllm_operator.prompts.template import EMPTY_PROMPT
from batchllm_operator.spec import JobSpec

PROMPT_TOO_LONG: Final = "prompt_too_long"
_UTF8_MAX_LEN: Final = 4096
_log = logging.getLogger(__name__)


class Tokenizer(Protocol):
    """Turns prompt texts into token ids."""

    @property
    def fingerprint(self) -> str:
        """Changes when the tokenizer does."""
        ...

    @property
    def model_version(self) -> str:
        """Changes when the model does: the hub's commit, or a digest of the model's folder."""
        ...

    @property
    def max_model_len(self) -> int:
        """Most tokens of a prompt and its output together."""
        ...

    def encode(self, texts: Sequence[str]) -> TokenTable:
        """Token ids of each text, chat template and special tokens included.

        Raises:
            TokenIdsDifferError: earlier calls may have given wrong ids: ask for all again.
        """
        ...

    def decode(self, token_ids: Sequence[int]) -> str:
        """The text of some tokens, for people: bytes that are no characters are replaced."""
        ...


class ModelTokenizer:
    """The model's own tokenizer, loaded by transformers from a folder or the hub.

    Raises:
        ModelError: the folder or hub name can't be loaded, or lacks a chat template
            that the spec asks for; from `encode`, the chat template refuses a prompt.
    """

    def __init__(self, spec: JobSpec, ds: str) -> None:
        os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")  # "PyTorch was not found"
        from transformers import AutoConfig, AutoTokenizer  # seconds to import

        model = spec.model
        if model.trust_remote_code:
            _log.warning("model %s: runs code of its own (trust_remote_code)", model.path)
        folder = Path(model.path)
        if folder.is_absolute() and not _is_folder(folder):
            raise ModelError(f"model {model.path}: there is no such folder")
        origin: dict[str, Any] = {
            "revision": model.revision,
            "trust_remote_code": model.trust_remote_code,
        }
        try:
            self._tokenizer: Any = AutoTokenizer.from_pretrained(model.path, **origin)
            config = AutoConfig.from_pretrained(model.path, **origin)
        # A damaged folder, an unknown name, a missing package: each library on the way has its
        # own kind of error, and all mean that the spec's model can't be used.
        except Exception as error:
            first_line = str(error).strip().splitlines()[0] if str(error).strip() else repr(error)
            hint = "" if folder.is_absolute() else " (a folder begins with ./, ../, ~/ or /)"
            raise ModelError(f"model {model.path}: can't be loaded{hint}: {first_line}") from error
        self._path = model.path
        self._ds = ds
        self._chat = spec.prompt.chat_template
        self._system = spec.prompt.system
        if self._chat and not self._tokenizer.chat_template:
            raise ModelError(
                f"model {model.path}: has no chat template; set prompt.chat_template: false"
            )
        _check_token_ids(self._tokenizer, model.path)
        self._max_model_len = spec.engine.max_model_len or _position_limit(config, model.path)
        # Now, because encoding changes what a fast tokenizer says of itself.
        self._fingerprint = _fingerprint(self._tokenizer, with_chat_template=self._chat)
        commit = getattr(config, "_commit_hash", None)
        self._model_version = f"commit:{commit}" if commit else folder_digest(folder)
        # A chat template writes its special tokens itself.
        self._encoder = PromptEncoder(
            self._tokenizer, f"model {model.path}", add_special_tokens=not self._chat
        )

    @property
    def fingerprint(self) -> str:
        return self._fingerprint

    @property
    def model_version(self) -> str:
        return self._model_version

    @property
    def max_model_len(self) -> int:
        return self._max_model_len

    @property
    def shares_text(self) -> bool:
        """Whether text that prompts share is tokenized once."""
        return self._encoder.shares_text

    def encode(self, texts: Sequence[str]) -> TokenTable:
        if not texts:
            return TokenTable.from_lists([])
        if self._chat:
            texts = [self._apply_chat_template(text) for text in texts]
        return self._encoder.encode(texts)

    def decode(self, token_ids: Sequence[int]) -> str:
        return str(self._tokenizer.decode(list(token_ids)))

    def _apply_chat_template(self, text: str) -> str:
        from jinja2 import TemplateError  # transformers renders chat templates with it

        messages = [{"role": "user", "content": text}]
        if self._system is not None:
            messages.insert(0, {"role": "system", "content": self._system})
        try:
            chat = self._tokenizer.apply_chat_template(
                messages,
                tokenize=False,
                add_generation_prompt=True,
                strftime_now=self._format_date,
            )
        except TemplateError as error:
            raise ModelError(
                f"model {self._path}: its chat template refuses the prompt: {error}; change"
                " prompt.system, or set prompt.chat_template: false"
            ) from error
        return str(chat)

    def _format_date(self, date_format: str) -> str:
        """For templates that ask for the date: the partition's, so that a plan can be repeated."""
        try:
            return datetime.date.fromisoformat(self._ds).strftime(date_format)
        except ValueError as error:
            raise ModelError(
                f"model {self._path}: its chat template asks for the date, and partition"
                f" {self._ds!r} isn't one (YYYY-MM-DD); set prompt.chat_template: false"
            ) from error


class Utf8Tokenizer:
    """One token per UTF-8 byte: for the `fake` engine where there is no model."""

    def __init__(self, spec: JobSpec) -> None:
        self._max_model_len = spec.engine.max_model_len or _UTF8_MAX_LEN

    @property
    def fingerprint(self) -> str:
        return "utf-8"

    @property
    def model_version(self) -> str:
        return "none"

    @property
    def max_model_len(self) -> int:
        return self._max_model_len

    def encode(self, texts: Sequence[str]) -> TokenTable:
        encoded = [text.encode("utf-8", errors="replace") for text in texts]
        return TokenTable.from_lists([np.frombuffer(text, dtype=np.uint8) for text in encoded])

    def decode(self, token_ids: Sequence[int]) -> str:
        return bytes(token_ids).decode("utf-8", errors="replace")


def load_tokenizer(spec: JobSpec, ds: str) -> Tokenizer:
    """The tokenizer of the spec's model or fake engine, for prompts of partition `ds`.

    Raises:
        ModelError: see `ModelTokenizer`.
    """
    is_fake = spec.engine.backend == "fake"
    if is_fake and spec.engine.extra_args.get("byte_tokens"):
        return Utf8Tokenizer(spec)
    try:
        return ModelTokenizer(spec, ds)
    except ModelError as error:
        if not is_fake:
            raise
        raise ModelError(
            f"{error}; for the fake engine, engine.extra_args: {{byte_tokens: true}} needs no model"
        ) from error


def _is_folder(path: Path) -> bool:
    try:
        return path.is_dir()
    except OSError:  # a name that is too long
        return False


def _fingerprint(tokenizer: Any, *, with_chat_template: bool) -> str:
    if tokenizer.is_fast:
        backend = json.loads(tokenizer.backend_tokenizer.to_str())
        # Set anew by each call that encodes; prompts are never cut or padded here.
        backend.pop("truncation", None)
        backend.pop("padding", None)
        parts = [json.dumps(backend, sort_keys=True)]
    else:
        parts = [type(tokenizer).__name__, json.dumps(tokenizer.get_vocab(), sort_keys=True)]
    parts.append(json.dumps(tokenizer.special_tokens_map, sort_keys=True, default=str))
    parts.append(json.dumps(tokenizer.chat_template) if with_chat_template else "")
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()


def length_fault(num_prompt_tokens: int, max_model_len: int) -> str | None:
    """The row error of a prompt without tokens, or without room for one of output."""
    if num_prompt_tokens == 0:
        return f"{EMPTY_PROMPT}: the tokenizer makes no tokens of this row's text"
    if num_prompt_tokens < max_model_len:
        return None
    return (
        f"{PROMPT_TOO_LONG}: {num_prompt_tokens} tokens, the model allows {max_model_len - 1}"
        " and one of output"
    )


def _check_token_ids(tokenizer: Any, path: str) -> None:
    """Refuse a vocabulary whose ids don't fit into 31 bits, before any row is read."""
    token, token_id = max(tokenizer.get_vocab().items(), key=itemgetter(1), default=("", 0))
    if token_id > MAX_TOKEN_ID:
        raise ModelError(
            f"model {path}: token {token!r} of its vocabulary has the id {token_id}; ids above"
            f" {MAX_TOKEN_ID} can't be planned"
        )


def _position_limit(config: Any, path: str) -> int:
    limit = getattr(config.get_text_config(), "max_position_embeddings", None)
    if not isinstance(limit, int) or limit < 2:
        raise ModelError(
            f"model {path}: its config.json doesn't say how long a prompt may be; set"
            " engine.max_model_len"
        )
    return limit
