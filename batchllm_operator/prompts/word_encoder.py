"""Token ids of texts from those of their words: words repeat where texts don't.

A word here is what lies between two neighbouring safe cuts (`safe_cuts`), with the space in front
of it. Those that aren't known yet go to the tokenizer together, each between two special tokens,
which keep them apart: a text for each would take longer to hand over than to encode.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Final

import numpy as np
from tokenizers import AddedToken, Tokenizer

from batchllm_operator.prompts.safe_cuts import CutRule
from batchllm_operator.prompts.token_cache import TokenCache

_CACHE_BYTES: Final = 32 << 20
_MAX_KEPT_LEN: Final = 64
"""Characters of a word worth keeping: longer ones hardly repeat."""
_BATCH_LEN: Final = 2048
"""Characters that are given to the tokenizer as one text, about."""


class WordEncoder:
    """Token ids of texts without what a tokenizer puts around them.

    Args:
        backend: used as it is; it must neither cut nor pad.
        rule: where texts can be cut for it.
    """

    def __init__(
        self, backend: Tokenizer, rule: CutRule, *, cache_bytes: int = _CACHE_BYTES
    ) -> None:
        self._backend = backend
        self._rule = rule
        self._cache = TokenCache(cache_bytes)
        self._separator, self._separator_id = _find_separator(backend)

    @property
    def num_bytes(self) -> int:
        """Memory in use for what is kept."""
        return self._cache.num_bytes

    def encode(self, texts: Sequence[str]) -> list[bytes]:
        """Token ids of each text, as the bytes of an int32 array.

        Args:
            texts: each a text or the part of one between two cuts that the rule allows.
        """
        known = self._cache.known
        joined: list[bytes] = []
        left: dict[int, list[str]] = {}
        """Words of the texts that have unknown ones, by the text's index."""
        for idx, text in enumerate(texts):
            words = self._rule.words(text)
            try:
                joined.append(b"".join(map(known.__getitem__, words)))
            except KeyError:
                joined.append(b"")
                left[idx] = words
        new = {word: b"" for words in left.values() for word in words if word not in known}
        with_token = {word for word in new if self._rule.holds_token(word)}
        if with_token:
            whole = [idx for idx, words in left.items() if not with_token.isdisjoint(words)]
            for idx, ids in zip(whole, self._encode_each([texts[i] for i in whole]), strict=True):
                joined[idx] = ids
                del left[idx]
            for word in with_token:
                del new[word]
        new.update(zip(new, self._encode_new(list(new)), strict=True))
        known.update(new)  # all of them, until the texts are joined
        for idx, words in left.items():
            joined[idx] = b"".join(map(known.__getitem__, words))
        for word in new:
            del known[word]
        for word, ids in new.items():
            if len(word) <= _MAX_KEPT_LEN:
                self._cache.put(word, ids)
        return joined

    def _encode_each(self, texts: Sequence[str]) -> Iterator[bytes]:
        for encoding in self._backend.encode_batch_fast(texts, add_special_tokens=False):
            yield np.array(encoding.ids, dtype=np.int32).tobytes()

    def _encode_new(self, words: Sequence[str]) -> Iterator[bytes]:
        """Token ids of each word, in order."""
        batches = list(self._batches(words))
        joined = [(self._separator or "").join(batch) for batch in batches]
        encodings = self._backend.encode_batch_fast(joined, add_special_tokens=False)
        for batch, encoding in zip(batches, encodings, strict=True):
            token_ids = np.array(encoding.ids, dtype=np.int32)
            if len(batch) == 1:
                yield token_ids.tobytes()
                continue
            ends = np.flatnonzero(token_ids == self._separator_id)
            if len(ends) == len(batch) - 1:
                yield from _split(token_ids.tobytes(), (4 * ends).tolist())
            else:  # the model makes the same token of something in a word
                yield from self._encode_each(batch)

    def _batches(self, words: Iterable[str]) -> Iterator[list[str]]:
        """Consecutive words that can be encoded together."""
        batch: list[str] = []
        num_chars = 0
        for word in words:
            alone = self._separator is None or not self._rule.same_behind_token(word)
            if batch and (alone or num_chars + len(word) > _BATCH_LEN):
                yield batch
                batch, num_chars = [], 0
            if alone:
                yield [word]
                continue
            batch.append(word)
            num_chars += len(word)
        if batch:
            yield batch


def _split(token_ids: bytes, ends: Iterable[int]) -> Iterator[bytes]:
    start = 0
    for end in ends:
        yield token_ids[start:end]
        start = end + 4
    yield token_ids[start:]


def _find_separator(backend: Tokenizer) -> tuple[str | None, int]:
    """A special token that takes nothing from its neighbours, and its id."""
    if backend.encode_special_tokens:
        return None, -1  # not looked for in texts
    added: dict[int, AddedToken] = backend.get_added_tokens_decoder()
    for token_id, token in sorted(added.items()):
        takes = token.lstrip or token.rstrip or token.single_word or token.normalized
        content: str = token.content
        if token.special and not takes and len(content) > 2 and not any(map(str.isspace, content)):
            # Once, so it isn't what unknown characters become.
            text = f"a\U0010fffd{content}\U0010fffda"
            if backend.encode(text, add_special_tokens=False).ids.count(token_id) == 1:
                return content, token_id
    return None, -1
