"""Token ids of prompts: by shared pieces where that is proven and holds on samples, else whole."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any, Final

import numpy as np
from tokenizers import Tokenizer

from batchllm_operator.planner import TokenTable
from batchllm_operator.prompts.safe_cuts import NoProofError, find_cut_rule
from batchllm_operator.prompts.shared_text import SharedTextEncoder

_FIRST_SAMPLE: Final = 64
_LATER_SAMPLE: Final = 512
"""One prompt in so many is encoded whole too: of the first batch, and of all later ones."""
_log = logging.getLogger(__name__)


class TokenIdsDifferError(Exception):
    """A sample's token ids aren't the tokenizer's own, and prompts were handed out before.

    Those may be wrong too, so all have to be encoded again, which is then done whole.
    """


class PromptEncoder:
    """Encodes with a transformers tokenizer; its settings are left as they are.

    Args:
        tokenizer: a tokenizer of transformers, fast or not.
        name: what to call it in a warning.
        add_special_tokens: whether the tokenizer puts its own around each prompt.
    """

    def __init__(self, tokenizer: Any, name: str, *, add_special_tokens: bool) -> None:
        self._tokenizer = tokenizer
        self._name = name
        self._add_special_tokens = add_special_tokens
        self._num_encoded = 0
        self._num_until_sample = 0
        self._backend: Tokenizer | None = None
        self._shared: SharedTextEncoder | None = None
        try:
            self._backend = backend = _copy_backend(tokenizer)
            self._shared = SharedTextEncoder(
                backend, find_cut_rule(backend), add_special_tokens=add_special_tokens
            )
        except NoProofError as error:
            _log.info("%s: prompts are tokenized whole: %s", name, error)

    @property
    def shares_text(self) -> bool:
        """Whether text that prompts share is tokenized once."""
        return self._shared is not None

    def encode(self, texts: Sequence[str]) -> TokenTable:
        """Token ids of each text.

        Raises:
            TokenIdsDifferError: at most once; later calls encode whole prompts.
        """
        if self._shared is None or not texts:
            return self._encode_whole(texts)
        encoded = self._shared.encode(texts)
        sample = self._next_sample(len(texts))
        if self._agrees(encoded, sample, texts):
            self._num_encoded += len(texts)
            return encoded
        self._shared = None
        _log.warning(
            "%s: token ids of a prompt in pieces aren't those of the whole, so all prompts are"
            " tokenized whole, which takes longer; please report this with the model's name",
            self._name,
        )
        if self._num_encoded:
            raise TokenIdsDifferError(f"{self._name}: {self._num_encoded} prompts to encode again")
        return self._encode_whole(texts)

    def _next_sample(self, num_texts: int) -> range:
        """Which of the next texts to check. The first text of all is one."""
        step = _LATER_SAMPLE if self._num_encoded else _FIRST_SAMPLE
        sample = range(self._num_until_sample, num_texts, step)
        following = sample[-1] + _LATER_SAMPLE if sample else self._num_until_sample
        self._num_until_sample = max(0, following - num_texts)
        return sample

    def _agrees(self, encoded: TokenTable, sample: range, texts: Sequence[str]) -> bool:
        whole = self._call([texts[idx] for idx in sample])
        return all(
            np.array_equal(encoded.prompt(idx), token_ids)
            for idx, token_ids in zip(sample, whole, strict=True)
        )

    def _encode_whole(self, texts: Sequence[str]) -> TokenTable:
        if self._backend is None or not texts:
            return TokenTable.from_lists(self._call(texts))
        # What the tokenizer's own call comes to (see `_copy_backend`), but without offsets.
        encodings = self._backend.encode_batch_fast(
            list(texts), add_special_tokens=self._add_special_tokens
        )
        return TokenTable.from_lists([encoding.ids for encoding in encodings])

    def _call(self, texts: Sequence[str]) -> list[list[int]]:
        """Token ids of each text, by the tokenizer's own call."""
        if not texts:
            return []
        # verbose=False: who calls this checks the lengths.
        encoded = self._tokenizer(
            list(texts),
            add_special_tokens=self._add_special_tokens,
            return_attention_mask=False,
            return_token_type_ids=False,
            verbose=False,
        )
        ids: list[list[int]] = encoded["input_ids"]
        return ids


def _copy_backend(tokenizer: Any) -> Tokenizer:
    """A copy of what `tokenizer` encodes with, set as its call sets it: no cutting, no padding.

    Raises:
        NoProofError: it doesn't just hand its texts on to that.
    """
    kind = type(tokenizer)
    if not tokenizer.is_fast:
        raise NoProofError("the tokenizer isn't one of the tokenizers library")
    if kind.__module__.partition(".")[0] != "transformers":
        raise NoProofError(f"{kind.__module__}.{kind.__name__} may do things of its own")
    from transformers import PreTrainedTokenizerFast  # seconds to import

    for name in ("__call__", "_encode_plus"):
        if getattr(kind, name) is not getattr(PreTrainedTokenizerFast, name):
            raise NoProofError(f"{kind.__name__}.{name} isn't the usual one")
    if hasattr(tokenizer, "_switch_to_input_mode"):
        raise NoProofError(f"{kind.__name__} switches to an input mode")
    backend = Tokenizer.from_str(tokenizer.backend_tokenizer.to_str())
    backend.no_truncation()
    backend.no_padding()
    backend.encode_special_tokens = bool(tokenizer.split_special_tokens)
    return backend
