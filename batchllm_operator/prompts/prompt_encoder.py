"""Encodes prompts: with fastokens if it agrees with the tokenizer, else with `tokenizers`."""

import json
import logging
from collections.abc import Callable, Sequence
from functools import cache, cached_property
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer

from batchllm_operator.errors import ModelError
from batchllm_operator.prefixes import TokenTable
from batchllm_operator.prompts.control_tokens import MARK

_FIRST_SAMPLE: Final = 64
_LATER_SAMPLE: Final = 512
"""One in so many prompts is checked with the reference, in the first batch and in later ones."""
_HUGE_CHARS: Final = 1 << 20
"""Of longer texts, only the beginning is checked, and places of tokens are estimated: `tokenizers`,
of which both come, takes hundreds of bytes of memory for each byte."""
_BEGINNING_CHARS: Final = 1 << 16
_PROBES: Final = (
    "",
    "  Two spaces, don't  we'LL\tTAB \r\n\r\n \n  x = 12345.67; // 8,9 \u2028\u00a0\u3000 ",
    "na\u00efve e\u0301 \ufb01 \u212b \u1e9b\u0323 \u0130I\u0131i \u00df \u03a3\u03c2 \uff21\uff11",
    "\u4e2d\u6587\u3002\u8868\u8a9e \ud55c\uad6d\uc5b4 \u1112\u1161\u11ab \u0e20\u0e32\u0e29\u0e32"
    " \u0939\u093f\u0928\u094d\u0926\u0940 \u0627\u0644\u0639\u0631\u0628\u064a\u0629",
    "\U0001f642\U0001f469\u200d\U0001f4bb\ufe0f \0\x01\x7f\x85\ufeff\ufffd\U0010ffff",
    " <0x41> \u2581_ \u2581\u2581a_b __init__ #!/bin/sh {{x}}<|y|> http://a.b/c?d=e&f=%20",
)
"""Texts on which tokenizers and their copies differ, compared before the first prompt."""
_DISPUTED: Final = "\u180e"
"""White space in the expressions of `tokenizers` but not in those of fastokens, whose Unicode is
newer. All other characters were compared and agree. `tokenizers` encodes prompts with it."""
_log = logging.getLogger(__name__)

Encode = Callable[[Sequence[str]], Sequence[Sequence[int]]]


class TokenIdsDifferError(Exception):
    """A sample's token ids are wrong, so all prompts must be encoded again, with `tokenizers`."""


class PromptEncoder:
    """Encodes as `reference` does, but faster where `backend` allows it.

    Args:
        reference: token ids of each text, by the tokenizer's own call.
        backend: what that call passes its texts to, set not to cut or pad; None if the call does
            more than that, and must be used for all prompts.
        name: the tokenizer's name in the log.
        add_special_tokens: whether the tokenizer adds its own to each prompt.
    """

    def __init__(
        self, reference: Encode, backend: Tokenizer | None, name: str, *, add_special_tokens: bool
    ) -> None:
        self._reference, self._backend, self._name = reference, backend, name
        self._add_special_tokens = add_special_tokens
        self._num_encoded = self._num_until_sample = 0
        self._drops_marks = False
        self._fast = None if backend is None else self._make_fast(backend)
        if backend is not None and self._fast is not None:
            probes = [*_PROBES, *_with_added_tokens(backend)]
            if not self._agrees(self._encode_fast(probes), probes):
                self._give_up("its token ids of some test texts differ")

    @property
    def library(self) -> str:
        """The library in use: `fastokens`, `tokenizers` or `transformers`."""
        if self._fast is not None:
            return "fastokens"
        return "transformers" if self._backend is None else "tokenizers"

    def encode(self, texts: Sequence[str]) -> TokenTable:
        """Token ids of each text; see `Tokenizer.encode` for errors.

        A TokenIdsDifferError comes at most once: later calls don't use fastokens.
        """
        if not self._drops_marks or not (marked := [i for i, t in enumerate(texts) if MARK in t]):
            return self._encode_unmarked(texts)
        others = sorted({*range(len(texts))}.difference(marked))
        plain = self._encode_unmarked([texts[idx] for idx in others])
        rest = self._encode_by(self._marked, [texts[idx] for idx in marked])
        token_ids = np.concatenate([plain.token_ids, rest.token_ids])
        offsets = np.concatenate([plain.offsets, plain.num_tokens + rest.offsets[1:]])
        return TokenTable(token_ids, offsets).take(np.argsort([*others, *marked]))

    def spans(self, text: str) -> NDArray[np.int64]:
        """See `Tokenizer.spans`."""
        if self._backend is None or len(text) > _HUGE_CHARS:
            num_tokens = self._encode_unmarked([text]).num_tokens
            bounds = np.arange(num_tokens + 1) * len(text) // max(1, num_tokens)
            return np.stack([bounds[:-1], bounds[1:]], axis=1)
        offsets = self._backend.encode(text, add_special_tokens=False).offsets
        return np.array(offsets, dtype=np.int64).reshape(-1, 2)

    def drop_marks(self) -> Callable[[str], bool] | None:
        """From now on, drop marks in texts after the search for control tokens.

        Returns whether a token's marked spelling becomes ordinary text; None if none can.
        """
        if self._backend is None:
            return None
        self._drops_marks = True

        @cache
        def can_be_text(token: str) -> bool:
            marked = token[0] + MARK + token[1:]
            texts = [marked, f"a{marked}a", f" {marked} "]
            encodings = self._marked.encode_batch_fast(texts, add_special_tokens=False)
            own = self._marked.token_to_id(token)
            return all(own not in encoding.ids for encoding in encodings)

        return can_be_text

    @cached_property
    def _marked(self) -> Tokenizer:
        """For texts with marks; few plans have such texts."""
        assert self._backend is not None
        return _without_marks(self._backend)

    def _encode_unmarked(self, texts: Sequence[str]) -> TokenTable:
        if self._fast is None or not texts or any(_DISPUTED in text for text in texts):
            return self._encode_plainly(texts)
        try:
            encoded = self._encode_fast(texts)
            sample = self._next_sample(len(texts))
            heads = [texts[i][:_BEGINNING_CHARS] for i in sample if len(texts[i]) > _HUGE_CHARS]
            of_heads = self._encode_fast(heads)
        except (ValueError, RuntimeError) as error:  # such as a limit of its expressions
            self._give_up(f"it can't encode a prompt: {error}")
        else:
            wholes = [i for i in sample if len(texts[i]) <= _HUGE_CHARS]
            if self._agrees(encoded, texts, wholes) and self._agrees(of_heads, heads):
                self._num_encoded += len(texts)
                return encoded
            self._give_up("its token ids of a prompt differ; please report this")
        if self._num_encoded:
            raise TokenIdsDifferError(f"{self._name}: {self._num_encoded} prompts to encode again")
        return self._encode_plainly(texts)

    def _agrees(
        self, encoded: TokenTable, texts: Sequence[str], idxs: Sequence[int] | None = None
    ) -> bool:
        """Whether the texts at `idxs`, or all, have the ids that the tokenizer's own call gives.

        If that fails at one of them, there is nothing to compare.
        """
        idxs = range(len(texts)) if idxs is None else idxs
        try:
            expected = self._reference([texts[idx] for idx in idxs]) if idxs else []
        except BaseException as error:
            if not _is_panic(error):
                raise
            return True
        return all(
            np.array_equal(encoded.prompt(idx), token_ids)
            for idx, token_ids in zip(idxs, expected, strict=True)
        )

    def be_exact(self) -> None:
        """Encode without fastokens from now on."""
        if self._fast is not None:
            self._give_up("its token ids have differed in another process")

    def _make_fast(self, backend: Tokenizer) -> Any:
        """The same tokenizer in fastokens; None, with a note in the log, if it is unavailable."""
        try:
            import fastokens  # has no wheel for some platforms

            return fastokens.Tokenizer.from_json_str(backend.to_str())
        except (ImportError, ValueError) as error:
            _log.info("%s: tokenized by `tokenizers`, not fastokens: %s", self._name, error)
            return None

    def _give_up(self, reason: str) -> None:
        self._fast = None
        _log.warning(
            "%s: prompts are tokenized by `tokenizers`, which takes longer, not by fastokens: %s",
            self._name,
            reason,
        )

    def _next_sample(self, num_texts: int) -> range:
        """Indexes of the next texts to check. The very first text is one."""
        step = _LATER_SAMPLE if self._num_encoded else _FIRST_SAMPLE
        sample = range(self._num_until_sample, num_texts, step)
        following = sample[-1] + _LATER_SAMPLE if sample else self._num_until_sample
        self._num_until_sample = max(0, following - num_texts)
        return sample

    def _encode_fast(self, texts: Sequence[str]) -> TokenTable:
        assert self._fast is not None and self._backend is not None
        token_ids, offsets = self._fast.encode_batch_flat(
            list(texts),
            add_special_tokens=self._add_special_tokens,
            split_special_tokens=self._backend.encode_special_tokens,
        )
        return TokenTable(
            np.frombuffer(token_ids, dtype="<u4").astype(np.int32),
            np.frombuffer(offsets, dtype="<u8").astype(np.int64),
        )

    def _encode_plainly(self, texts: Sequence[str]) -> TokenTable:
        if self._backend is not None:
            return self._encode_by(self._backend, texts)
        return TokenTable.from_lists(self._reference(texts) if texts else [])

    def _encode_by(self, backend: Tokenizer, texts: Sequence[str]) -> TokenTable:
        try:
            # Like the tokenizer's own call, but without offsets.
            encodings = backend.encode_batch_fast(
                list(texts), add_special_tokens=self._add_special_tokens
            )
        except BaseException as error:
            if not _is_panic(error):
                raise
            raise ModelError(
                f"{self._name}: its tokenizer gives up on one of {len(texts)} prompts, of which the"
                f" longest has {max(map(len, texts))} characters: {error}; leave the row out"
                " (input.filter)"
            ) from error
        return TokenTable.from_lists([encoding.ids for encoding in encodings])


def _without_marks(backend: Tokenizer) -> Tokenizer:
    """A copy that drops marks once it has searched a text for control tokens."""
    content = json.loads(backend.to_str())
    drop: dict[str, Any] = {"type": "Replace", "pattern": {"String": MARK}, "content": ""}
    first = content["normalizer"]
    if first is None:  # then normalized tokens, which are searched after it, may come before it
        for token in content["added_tokens"]:
            token["normalized"] = False
    content["normalizer"] = {"type": "Sequence", "normalizers": [drop, *([first] if first else [])]}
    copy = Tokenizer.from_str(json.dumps(content))
    copy.encode_special_tokens = backend.encode_special_tokens
    return copy


def _is_panic(error: BaseException) -> bool:
    """Whether Rust code panicked, as in a too long search through megabytes of spaces."""
    return type(error).__name__ == "PanicException"  # each library has its own, not importable


def _with_added_tokens(backend: Tokenizer) -> list[str]:
    """Texts with all added tokens, and with each pair that overlaps and is searched separately.

    `tokenizers` removes tokens that aren't normalized from a text before it searches the others.
    """
    tokens = list(backend.get_added_tokens_decoder().values())
    contents = [token.content for token in tokens]
    texts = {separator.join(["", *contents, ""]) for separator in ("", "  ", "a", "\n")}
    starts: dict[tuple[str, bool], list[str]] = {}  # by beginning and whether normalized
    for token in tokens:
        for end in range(1, len(token.content)):
            start = (token.content[:end], token.normalized)
            starts.setdefault(start, []).append(token.content)
    for token in tokens:
        for begin in range(1, len(token.content)):
            shared = token.content[begin:]
            following = starts.get((shared, not token.normalized), ())
            texts.update(token.content + other[len(shared) :] for other in following)
    return sorted(texts)
