"""Turns rows into prompt texts and token ids, exactly as the engine's own tokenizer does."""

import json
import logging
from collections.abc import Sequence
from copy import copy
from functools import partial
from operator import itemgetter, methodcaller
from pathlib import Path
from typing import Any, Final, Self

import numpy as np
from numpy.typing import NDArray

from batchllm_operator.errors import ModelError
from batchllm_operator.model import (
    ChatTemplate,
    ModelFiles,
    choose_length,
    copy_backend,
    find_length,
    fingerprint_of,
    folder_digest,
    load_pretrained,
)
from batchllm_operator.prefixes import TokenTable
from batchllm_operator.prefixes.token_table import MAX_TOKEN_ID
from batchllm_operator.prompts.chats import ChatRenderer, sample_chat
from batchllm_operator.prompts.control_tokens import ControlTokens
from batchllm_operator.prompts.prompt_encoder import PromptEncoder
from batchllm_operator.prompts.template import EMPTY_PROMPT, PromptRenderer
from batchllm_operator.row_error import RowError
from batchllm_operator.spec import JobSpec, PromptSpec

PROMPT_TOO_LONG: Final = "prompt_too_long"
_UTF8_MAX_LEN: Final = 4096
_LEAST_BYTES: Final = 1 << 20
"""Tokenized in any case: some tokenizers drop white space, or make one token of a long word."""
_MOST_NAMED: Final = 5
_log = logging.getLogger(__name__)


class Tokenizer:
    """Turns rows into prompt texts, and these into token ids, as the model's own tokenizer does.

    Attributes:
        fingerprint: changes when the tokenizer does.
        model_version: changes when the model does: the hub's commit, or a digest of its folder.
        files: the model's; None if there is no model.
        max_model_len: most tokens of a prompt and its output together.
        max_prompt_len: most tokens of a prompt.
        max_prompt_bytes: most bytes of a text that can be a prompt; a longer one isn't tokenized.
        vocabulary_bound: above all token ids.
        control_tokens: those of the model, and what becomes of text that spells one.
        chat: the model's chat template; None if prompts don't go through it.
    """

    files: ModelFiles | None
    control_tokens = ControlTokens()
    chat: ChatTemplate | None = None

    def __init__(self, spec: JobSpec, ds: str) -> None:
        model, where = spec.model, f"model {spec.model.path}"
        if model.trust_remote_code:
            _log.warning("%s: runs code of its own (trust_remote_code)", where)
        self.files = ModelFiles(model.path, model.revision)
        self._tokenizer, config = load_pretrained(model, self.files)
        templates = ""
        if spec.prompt.chat_template:
            self._take_chat(spec, ds)
            templates = json.dumps(self._tokenizer.chat_template)
        self.fingerprint = fingerprint_of(self._tokenizer, templates)
        commit = getattr(config, "_commit_hash", None)
        self.model_version = f"commit:{commit}" if commit else folder_digest(Path(model.path))
        vocabulary: dict[str, int] = self._tokenizer.get_vocab()
        self.vocabulary_bound = _vocabulary_bound(vocabulary, where)
        length = find_length(config, self.files, spec.engine, is_pooled=spec.is_pooled)
        self.max_model_len = choose_length(length, spec.engine.max_model_len, model.path)
        self.max_prompt_len = self.max_model_len - (not spec.is_pooled)  # room for one of output
        encoded = map(methodcaller("encode", errors="replace"), vocabulary)
        longest = max(map(len, encoded), default=1)
        self.max_prompt_bytes = max(_LEAST_BYTES, self.max_model_len * longest)
        # Here, so that its memory counts as resident before any row is read.
        backend, adds_special = copy_backend(self._tokenizer), self.chat is None
        # Not a method of this object: each would hold the other, until garbage is searched for.
        call = partial(_ids_by_call, self._tokenizer, adds_special)
        self._encoder = PromptEncoder(call, backend, where, add_special_tokens=adds_special)
        self._take_prompt(spec)

    def of(self, spec: JobSpec, ds: str) -> Self:
        """The same for a job that differs in its prompt, but not in whether that goes through the
        chat template, or keeps control tokens."""
        other = copy(self)
        if spec.prompt.chat_template:
            other._take_chat(spec, ds)
        other._take_prompt(spec)
        return other

    def _take_chat(self, spec: JobSpec, ds: str) -> None:
        self.chat = ChatTemplate(self._tokenizer, spec.model.path, ds, spec.prompt)

    def _take_prompt(self, spec: JobSpec) -> None:
        prompt = spec.prompt
        self.control_tokens = self._find_control_tokens(prompt)
        if prompt.turns:  # their roles come from the spec, so either all rows fit or none
            sample = self.renderer(prompt).render(sample_chat(prompt))
            for error in sample.errors.values():
                raise ModelError(f"model {spec.model.path}: prompt.turns: {error}")

    def _find_control_tokens(self, prompt: PromptSpec) -> ControlTokens:
        """Special tokens, and other markup that the prompt or the chat template writes."""
        added = list(self._tokenizer.added_tokens_decoder.values())
        special = {token.content for token in added if token.special}
        special |= set(map(str, self._tokenizer.all_special_tokens))
        written = "\0".join(["" if self.chat is None else self.chat.source, *prompt.literals])
        others = {token.content for token in added} - special
        # Markup isn't just a word or white space that a vocabulary was extended by.
        markup = {t for t in others if not (t[0].isalnum() or t[0].isspace() or t[-1].isalnum())}
        mode = prompt.control_mode
        can_be_text = self._encoder.drop_marks() if mode != "keep" else None
        in_use = {token for token in markup if token in written}
        return ControlTokens(special, in_use, mode=mode, can_be_text=can_be_text)

    @property
    def library(self) -> str:
        """See `PromptEncoder.library`."""
        return self._encoder.library

    def renderer(
        self, prompt: PromptSpec, *, fills_nulls: bool = False
    ) -> PromptRenderer | ChatRenderer:
        """Makes the texts for `encode` by a prompt that is the spec's, but for columns' order."""
        kind = ChatRenderer if prompt.is_chat else PromptRenderer
        return kind(prompt, self.control_tokens, self.chat, fills_nulls)

    def encode(self, texts: Sequence[str]) -> TokenTable:
        """Token ids of each text, special tokens included.

        Raises:
            TokenIdsDifferError: earlier calls may have returned wrong ids; encode all again.
            ModelError: the tokenizer fails at a text.
        """
        return self._encoder.encode(texts)

    def be_exact(self) -> None:
        """Encode without a fast library from now on: its ids have differed in another process."""
        self._encoder.be_exact()

    def answer_tokens(self, prompt: str, answers: Sequence[str]) -> list[list[int]]:
        """The tokens by which a model gives each answer to a prompt's text."""
        texts = [prompt, "", *(prompt + answer for answer in answers), *answers]
        before, special, *ids = self.encode(texts).to_lists()
        # An answer may merge with the prompt's end, which is fixed when the model begins.
        tokens = {
            answer: whole[len(before) :]
            for answer, whole in zip(answers, ids, strict=False)
            if whole[: len(before)] == before
        }
        merged = [answer for answer in answers if answer not in tokens]
        if merged and prompt[-1:].isspace():
            _log.warning(
                "labels: the prompt's end and %s would be one token, which the model can't choose"
                " any more; end the prompt without its last space or line break",
                ", ".join(map(repr, merged[:_MOST_NAMED])),
            )
        alone = zip(answers, ids[len(answers) :], strict=True)
        return [tokens.get(answer, own_ids[len(special) :]) for answer, own_ids in alone]

    def spans(self, texts: Sequence[str | None]) -> list[NDArray[np.int64]]:
        """The places of the tokens of texts by themselves: [num_tokens, 2] begin and end in a text.

        Estimated, as if tokens had equal sizes, for a tokenizer that doesn't tell them, and for
        texts of more than a million characters. None has no tokens.
        """
        return [self._encoder.spans(text or "") for text in texts]

    def decode(self, token_ids: Sequence[int]) -> str:
        """The text of some tokens, for people: invalid bytes are replaced."""
        return str(self._tokenizer.decode(list(token_ids)))


class Utf8Tokenizer(Tokenizer):
    """One token per UTF-8 byte: for the `fake` engine without a model."""

    fingerprint = "utf-8"
    model_version = "none"
    vocabulary_bound = 256

    def __init__(self, spec: JobSpec) -> None:
        try:
            self.files = (
                ModelFiles(spec.model.path) if Path(spec.model.path).is_absolute() else None
            )
        except ModelError:  # there is no model
            self.files = None
        self.max_model_len = spec.engine.max_model_len or _UTF8_MAX_LEN
        self.max_prompt_len = self.max_model_len - (not spec.is_pooled)
        self.max_prompt_bytes = max(_LEAST_BYTES, self.max_model_len)
        self._answer_prefix = spec.prompt.answer_prefix or ""

    def encode(self, texts: Sequence[str]) -> TokenTable:
        encoded = [(text + self._answer_prefix).encode("utf-8", "replace") for text in texts]
        return TokenTable.from_lists([np.frombuffer(text, dtype=np.uint8) for text in encoded])

    def be_exact(self) -> None:
        pass

    def answer_tokens(self, prompt: str, answers: Sequence[str]) -> list[list[int]]:
        """The first byte of each answer stands for all of it: no word is one byte."""
        return [list(answer.encode("utf-8", errors="replace")[:1]) for answer in answers]

    def spans(self, texts: Sequence[str | None]) -> list[NDArray[np.int64]]:
        def places(text: str) -> NDArray[np.int64]:
            sizes = [len(char.encode("utf-8", errors="replace")) for char in text]
            return np.repeat(np.arange(len(sizes)), sizes)

        return [np.stack([starts := places(text or ""), starts + 1], axis=1) for text in texts]

    def decode(self, token_ids: Sequence[int]) -> str:
        return bytes(token_ids).decode("utf-8", errors="replace")


def load_tokenizer(spec: JobSpec, ds: str) -> Tokenizer:
    """The tokenizer of the spec's model or fake engine, for prompts of partition `ds`.

    Raises ModelError if the model can't be used, or lacks a chat template that the spec asks for.
    """
    is_fake = spec.engine.backend == "fake"
    if is_fake and spec.engine.extra_args.get("byte_tokens"):
        return Utf8Tokenizer(spec)
    try:
        return Tokenizer(spec, ds)
    except ModelError as error:
        if not is_fake:
            raise
        raise ModelError(
            f"{error}; for the fake engine, engine.extra_args: {{byte_tokens: true}} needs no model"
        ) from error


def load_tokenizers(spec: JobSpec, ds: str) -> tuple[Tokenizer, ...]:
    """A tokenizer for each of a job's questions, which share what is large; raises as above."""
    tokenizers = list[Tokenizer]()
    loaded: dict[tuple[bool, bool], Tokenizer] = {}
    for asked in spec.questions:
        alike = (asked.prompt.chat_template, asked.prompt.control_mode == "keep")
        if alike in loaded and not isinstance(loaded[alike], Utf8Tokenizer):
            tokenizers.append(loaded[alike].of(asked, ds))
        else:
            tokenizers.append(load_tokenizer(asked, ds))
            loaded[alike] = tokenizers[-1]
    return tuple(tokenizers)


def joint_fingerprint(tokenizers: Sequence[Tokenizer]) -> str:
    """The fingerprint of all questions' tokenizers together."""
    return " ".join(dict.fromkeys(tokenizer.fingerprint for tokenizer in tokenizers))


def _ids_by_call(tokenizer: Any, adds_special: bool, texts: Sequence[str]) -> list[list[int]]:
    """Token ids by the tokenizer's own call; a chat template adds its special tokens itself."""
    # verbose=False: the caller checks the lengths.
    options = {"return_attention_mask": False, "return_token_type_ids": False, "verbose": False}
    encoded = tokenizer(list(texts), add_special_tokens=adds_special, **options)
    ids: list[list[int]] = encoded["input_ids"]
    return ids


def length_fault(num_prompt_tokens: int, tokenizer: Tokenizer) -> RowError | None:
    """The row error of a prompt without tokens, or with more than the model allows."""
    if num_prompt_tokens == 0:
        return RowError(EMPTY_PROMPT, "the tokenizer makes no tokens of this row's text")
    most = tokenizer.max_prompt_len
    if num_prompt_tokens <= most:
        return None
    output = " and one of output" if most < tokenizer.max_model_len else ""
    reason = f"{num_prompt_tokens} tokens, the model allows {most}{output}"
    return RowError(PROMPT_TOO_LONG, reason)


def _vocabulary_bound(vocabulary: dict[str, int], where: str) -> int:
    """One more than the largest id. Refuses ids that don't fit into 31 bits."""
    token, token_id = max(vocabulary.items(), key=itemgetter(1), default=("", 0))
    if token_id > MAX_TOKEN_ID:
        raise ModelError(
            f"{where}: token {token!r} of its vocabulary has the id {token_id}; ids above"
            f" {MAX_TOKEN_ID} can't be planned"
        )
    return token_id + 1
