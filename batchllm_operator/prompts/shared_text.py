"""Text that many prompts share is tokenized once, wherever in a prompt it is.

Prompts are cut where it is safe (`safe_cuts`), at places that the text around them chooses, so
that equal passages give equal pieces. The token ids of a piece are made once, from those of its
words, and kept for the prompts to come, within a bound. A prompt's token ids are those of its
pieces, one after the other.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Final

import numpy as np
from tokenizers import Encoding, Tokenizer

from batchllm_operator.planner import TokenTable
from batchllm_operator.prompts.safe_cuts import CutRule, NoProofError
from batchllm_operator.prompts.token_cache import TokenCache
from batchllm_operator.prompts.word_encoder import WordEncoder

# Words with these starts are rare enough in most languages to make pieces of about 500 characters:
# shorter ones cost more to look up, longer ones share less of the text around their ends.
_ANCHOR: Final = "(?= [kvKV0-9\u0432\u0438])"
_MIN_PIECE_LEN: Final = 256
_MAX_PIECE_LEN: Final = 1024
_CACHE_BYTES: Final = 64 << 20
_SLICE_LEN: Final = 1 << 20
"""Characters that are worked on at a time, for a bound of the memory."""


class SharedTextEncoder:
    """Token ids of whole prompts, from pieces that are each encoded once.

    Args:
        backend: used as it is; it must neither cut nor pad.
        rule: where texts can be cut for it.
        add_special_tokens: whether a prompt gets what the tokenizer puts around a text.
        cache_bytes: bound of the memory for pieces.

    Raises:
        NoProofError: what the tokenizer puts around a text isn't the same for all texts.
    """

    def __init__(
        self,
        backend: Tokenizer,
        rule: CutRule,
        *,
        add_special_tokens: bool,
        cache_bytes: int = _CACHE_BYTES,
    ) -> None:
        self._rule = rule
        self._anchor = re.compile(f"{_ANCHOR}(?:{rule.pattern.pattern})")
        self._head, self._tail = _frame(backend) if add_special_tokens else (b"", b"")
        self._words = WordEncoder(backend, rule)
        self._cache = TokenCache(cache_bytes)

    @property
    def num_bytes(self) -> int:
        """Memory in use for what is kept."""
        return self._cache.num_bytes + self._words.num_bytes

    def encode(self, texts: Sequence[str]) -> TokenTable:
        """Token ids of each text, special tokens included."""
        joined: list[bytes] = []
        for part in _slices(texts):
            joined += self._encode_slice(texts[part])
        offsets = np.zeros(len(joined) + 1, dtype=np.int64)
        np.cumsum([len(each) // 4 for each in joined], out=offsets[1:])
        # Into a bytearray, so that the array can be written to like any other.
        return TokenTable(np.frombuffer(bytearray().join(joined), dtype=np.int32), offsets)

    def _encode_slice(self, texts: Sequence[str]) -> list[bytes]:
        """Token ids of each text, as the bytes of an int32 array."""
        pieces_of = [self._pieces_of(text) for text in texts]
        found = {piece: self._cache.known.get(piece) for pieces in pieces_of for piece in pieces}
        missing = [piece for piece, ids in found.items() if ids is None]
        for piece, ids in zip(missing, self._words.encode(missing), strict=True):
            found[piece] = ids
            self._cache.put(piece, ids)
        head, tail = self._head, self._tail
        return [
            b"".join([head, *(found[piece] or b"" for piece in pieces), tail])
            for pieces in pieces_of
        ]

    def _pieces_of(self, text: str) -> list[str]:
        pieces = []
        start = 0
        for cut in self._cuts(text):
            pieces.append(text[start:cut])
            start = cut + 1 if self._rule.drops_space else cut
        pieces.append(text[start:])
        return pieces

    def _cuts(self, text: str) -> Iterator[int]:
        last = 0
        position = _MIN_PIECE_LEN
        search = self._anchor.search
        while anchor := search(text, position):
            position = anchor.start()
            if self._rule.allows(text, position):
                if position - last > _MAX_PIECE_LEN:
                    yield from self._fillers(text, last, position)
                yield position
                last = position
                position += _MIN_PIECE_LEN
            else:
                position += 1
        yield from self._fillers(text, last, len(text))

    def _fillers(self, text: str, start: int, end: int) -> Iterator[int]:
        """Cuts where anchors are too far apart: counted from the last one, so equal for prompts
        with an equal start."""
        while end - start > _MAX_PIECE_LEN:
            for found in self._rule.pattern.finditer(text, start + _MIN_PIECE_LEN, end):
                if self._rule.allows(text, found.start()):
                    break
            else:
                return
            start = found.start()
            yield start


def _slices(texts: Sequence[str]) -> Iterator[slice]:
    """Consecutive slices of texts with about `_SLICE_LEN` characters each."""
    start, num_chars = 0, 0
    for idx, text in enumerate(texts):
        if num_chars and num_chars + len(text) > _SLICE_LEN:
            yield slice(start, idx)
            start, num_chars = idx, 0
        num_chars += len(text)
    if start < len(texts):
        yield slice(start, len(texts))


def _frame(backend: Tokenizer) -> tuple[bytes, bytes]:
    """Ids that the tokenizer puts before and behind every text."""
    for text in ("a", "The", "1", " "):
        bare: list[int] = backend.encode(text, add_special_tokens=False).ids
        full: Encoding = backend.encode(text)
        own = [place for place, special in enumerate(full.special_tokens_mask) if not special]
        if bare and len(own) == len(bare) and own == list(range(own[0], own[-1] + 1)):
            head, tail = full.ids[: own[0]], full.ids[own[-1] + 1 :]
            if full.ids == head + bare + tail and backend.encode("").ids == head + tail:
                return _to_bytes(head), _to_bytes(tail)
    raise NoProofError("what the post-processor adds depends on the text")


def _to_bytes(token_ids: list[int]) -> bytes:
    return np.array(token_ids, dtype=np.int32).tobytes()
