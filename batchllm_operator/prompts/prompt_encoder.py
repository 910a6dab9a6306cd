"""Token ids of prompts: by shared pieces where that is proven and holds on samples, else whole."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any, Final

from tokenizers import Tokenizer

from batchllm_operator.prompts.safe_cuts import NoProofError, find_cut_rule
from batchllm_operator.prompts.shared_text import SharedTextEncoder

_FIRST_SAMPLE: Final = 64
_LATER_SAMPLE: Final = 512
"""One prompt in so many of a batch is encoded whole too, and at least one."""
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
        self._shared: SharedTextEncoder | None = None
        try:
            self._shared = self._share_text()
        except NoProofError as error:
            _log.info("%s: prompts are tokenized whole: %s", name, error)

    @property
    def shares_text(self) -> bool:
        """Whether text that prompts share is tokenized once."""
        return self._shared is not None

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        """Token ids of each text.

        Raises:
            TokenIdsDifferError: at most once; later calls encode whole prompts.
        """
        if self._shared is None or not texts:
            return self.encode_whole(texts)
        encoded = self._shared.encode(texts)
        step = _LATER_SAMPLE if self._num_encoded else _FIRST_SAMPLE
        sample = range(0, len(texts), step)
        if self.encode_whole([texts[idx] for idx in sample]) == [encoded[idx] for idx in sample]:
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
        return self.encode_whole(texts)

    def encode_whole(self, texts: Sequence[str]) -> list[list[int]]:
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

    def _share_text(self) -> SharedTextEncoder:
        kind = type(self._tokenizer)
        if not self._tokenizer.is_fast:
            raise NoProofError("the tokenizer isn't one of the tokenizers library")
        if kind.__module__.partition(".")[0] != "transformers":
            raise NoProofError(f"{kind.__module__}.{kind.__name__} may do things of its own")
        # A copy, because calls of the original set how it cuts and pads.
        backend = Tokenizer.from_str(self._tokenizer.backend_tokenizer.to_str())
        backend.no_truncation()
        backend.no_padding()
        backend.encode_special_tokens = bool(
            getattr(self._tokenizer, "split_special_tokens", False)
        )
        return SharedTextEncoder(
            backend, find_cut_rule(backend), add_special_tokens=self._add_special_tokens
        )
