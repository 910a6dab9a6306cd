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
from tokenizers import Tokenizer as Backend

from batchllm_operator.errors import ModelError
from batchllm_operator.planner import TokenTable
from batchllm_operator.planner.token_table import MAX_TOKEN_ID
from batchllm_operator.prompts.model_folder import folder_digest
from batchllm_operator.prompts.prompt_encoder import PromptEncoder
from batchllm_operator.prompts.stored_tokenizer import read_stored
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
    """The model's own tokenizer: read from its folder, or loaded by transformers.

    transformers takes a second and hundreds of megabytes to import, so it is only asked where a
    chat template needs it, or where `read_stored` isn't sure what it would make of the files.

    Raises:
        ModelError: the folder or hub name can't be loaded, or lacks a chat template
            that the spec asks for; from `encode`, the chat template refuses a prompt.
    """

    def __init__(self, spec: JobSpec, ds: str) -> None:
        model = spec.model
        if model.trust_remote_code:
            _log.warning("model %s: runs code of its own (trust_remote_code)", model.path)
        folder = Path(model.path)
        if folder.is_absolute() and not _is_folder(folder):
            raise ModelError(f"model {model.path}: there is no such folder")
        self._path = model.path
        self._ds = ds
        self._chat = spec.prompt.chat_template
        self._system = spec.prompt.system
        needs_transformers = self._chat or model.trust_remote_code
        self._stored = None if needs_transformers else read_stored(folder)
        backend: Backend | None
        commit = None
        # Fingerprints are taken now, because encoding changes what a tokenizer says of itself.
        if self._stored is not None:
            vocabulary: Any = self._stored.backend
            backend = self._stored.backend
            limit: object = self._stored.max_position_embeddings
            special = self._stored.special_tokens
            self._fingerprint = _fingerprint(backend, None, special, "")
        else:
            vocabulary, config = _load(spec)
            self._tokenizer = vocabulary
            if self._chat and not vocabulary.chat_template:
                raise ModelError(
                    f"model {model.path}: has no chat template; set prompt.chat_template: false"
                )
            backend = _copy_backend(vocabulary)
            limit = getattr(config.get_text_config(), "max_position_embeddings", None)
            commit = getattr(config, "_commit_hash", None)
            self._fingerprint = _fingerprint(
                vocabulary.backend_tokenizer if vocabulary.is_fast else None,
                vocabulary,
                vocabulary.special_tokens_map,
                json.dumps(vocabulary.chat_template) if self._chat else "",
            )
        _check_token_ids(vocabulary, model.path)
        self._max_model_len = spec.engine.max_model_len or _position_limit(limit, model.path)
        self._model_version = f"commit:{commit}" if commit else folder_digest(folder)
        # A chat template writes its special tokens itself. Made now, so that what it takes counts
        # as resident before any row is read.
        self._encoder = PromptEncoder(
            self._call, backend, f"model {model.path}", add_special_tokens=not self._chat
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
    def library(self) -> str:
        """See `PromptEncoder.library`."""
        return self._encoder.library

    def encode(self, texts: Sequence[str]) -> TokenTable:
        if self._chat and texts:
            texts = self._apply_chat_template(texts)
        return self._encoder.encode(texts)

    def decode(self, token_ids: Sequence[int]) -> str:
        if self._stored is not None:
            return self._stored.backend.decode(list(token_ids), skip_special_tokens=False)
        return str(self._tokenizer.decode(list(token_ids)))

    def _call(self, texts: Sequence[str]) -> list[list[int]]:
        """Token ids of each text, by the tokenizer's own call."""
        if self._stored is not None:
            encodings = self._stored.backend.encode_batch_fast(list(texts))
            return [encoding.ids for encoding in encodings]
        # verbose=False: who calls this checks the lengths.
        encoded = self._tokenizer(
            list(texts),
            add_special_tokens=not self._chat,
            return_attention_mask=False,
            return_token_type_ids=False,
            verbose=False,
        )
        ids: list[list[int]] = encoded["input_ids"]
        return ids

    def _apply_chat_template(self, texts: Sequence[str]) -> list[str]:
        from jinja2 import TemplateError  # transformers renders chat templates with it

        head = [] if self._system is None else [{"role": "system", "content": self._system}]
        try:
            chats: list[str] = self._tokenizer.apply_chat_template(
                [[*head, {"role": "user", "content": text}] for text in texts],
                tokenize=False,
                add_generation_prompt=True,
                strftime_now=self._format_date,
            )
        except TemplateError as error:
            raise ModelError(
                f"model {self._path}: its chat template refuses the prompt: {error}; change"
                " prompt.system, or set prompt.chat_template: false"
            ) from error
        return chats

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


def _load(spec: JobSpec) -> tuple[Any, Any]:
    """The tokenizer and the configuration of the spec's model, by transformers.

    Raises:
        ModelError: they can't be loaded.
    """
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")  # "PyTorch was not found"
    from transformers import AutoConfig, AutoTokenizer  # seconds to import

    model = spec.model
    origin: dict[str, Any] = {
        "revision": model.revision,
        "trust_remote_code": model.trust_remote_code,
    }
    try:
        tokenizer = AutoTokenizer.from_pretrained(model.path, **origin)
        return tokenizer, AutoConfig.from_pretrained(model.path, **origin)
    # A damaged folder, an unknown name, a missing package: each library on the way has its
    # own kind of error, and all mean that the spec's model can't be used.
    except Exception as error:
        first_line = str(error).strip().splitlines()[0] if str(error).strip() else repr(error)
        is_folder = Path(model.path).is_absolute()
        hint = "" if is_folder else " (a folder begins with ./, ../, ~/ or /)"
        raise ModelError(f"model {model.path}: can't be loaded{hint}: {first_line}") from error


def _fingerprint(
    backend: Backend | None, tokenizer: Any, special_tokens: dict[str, str], chat_template: str
) -> str:
    """Of the backend if there is one, else of what transformers says of its own kind."""
    if backend is not None:
        content = json.loads(backend.to_str())
        # Set anew by each call that encodes; prompts are never cut or padded here.
        content.pop("truncation", None)
        content.pop("padding", None)
        parts = [json.dumps(content, sort_keys=True)]
    else:
        parts = [type(tokenizer).__name__, json.dumps(tokenizer.get_vocab(), sort_keys=True)]
    parts += [json.dumps(special_tokens, sort_keys=True, default=str), chat_template]
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


def _position_limit(limit: object, path: str) -> int:
    if not isinstance(limit, int) or limit < 2:
        raise ModelError(
            f"model {path}: its config.json doesn't say how long a prompt may be; set"
            " engine.max_model_len"
        )
    return limit


def _copy_backend(tokenizer: Any) -> Backend | None:
    """A copy of what `tokenizer` encodes with, set as its call sets it: no cutting, no padding.

    None if the call doesn't just hand its texts on to that.
    """
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
