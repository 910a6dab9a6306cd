"""Text that many prompts share is tokenized once, wherever in a prompt it is.

Prompts are cut where it is safe (`safe_cuts`), at places that the text around them chooses, so
that equal passages give equal pieces. Each piece is encoded once and kept for the prompts to
come, within a bound. A prompt's token ids are those of its pieces, one after the other.
"""

from __future__ import annotations

import re
from array import array
from collections.abc import Iterator, Sequence
from typing import Final

from tokenizers import Encoding, Tokenizer

from batchllm_operator.prompts.safe_cuts import CutRule, NoProofError

# Words with these starts are rare enough in most languages to make pieces of about 500 characters:
# shorter ones cost more to encode, longer ones share less of the text around their ends.
_ANCHOR: Final = re.compile(r" (?=[kvKV0-9\u0432\u0438])")
_MIN_PIECE_LEN: Final = 256
_MAX_PIECE_LEN: Final = 1024
_CACHE_TOKENS: Final = 8_000_000
"""Token ids kept: about 10 bytes each with their text."""


class SharedTextEncoder:
    """Token ids of whole prompts, from pieces that are each encoded once.

    Args:
        backend: used as it is; it must neither cut nor pad.
        rule: where texts can be cut for it.
        add_special_tokens: whether a prompt gets what the tokenizer puts around a text.

    Raises:
        NoProofError: what the tokenizer puts around a text isn't the same for all texts.
    """

    def __init__(
        self,
        backend: Tokenizer,
        rule: CutRule,
        *,
        add_special_tokens: bool,
        cache_tokens: int = _CACHE_TOKENS,
    ) -> None:
        self._backend = backend
        self._rule = rule
        self._head, self._tail = _frame(backend) if add_special_tokens else ([], [])
        self._pieces = _PieceCache(cache_tokens)

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        """Token ids of each text, special tokens included."""
        pieces_of = [list(self._pieces_of(text)) for text in texts]
        batch: dict[str, array[int]] = {}
        missing = []
        for pieces in pieces_of:
            for piece in pieces:
                if piece not in batch:
                    batch[piece] = known = self._pieces.get(piece)
                    if not known:
                        missing.append(piece)
        encodings = self._backend.encode_batch_fast(missing, add_special_tokens=False)
        for piece, encoding in zip(missing, encodings, strict=True):
            batch[piece] = token_ids = array("i", encoding.ids)
            self._pieces.put(piece, token_ids)
        return [self._join(batch[piece] for piece in pieces) for pieces in pieces_of]

    def _join(self, parts: Iterator[array[int]]) -> list[int]:
        joined = self._head.copy()
        for part in parts:
            joined.extend(part)
        joined.extend(self._tail)
        return joined

    def _pieces_of(self, text: str) -> Iterator[str]:
        start = 0
        for cut in self._cuts(text):
            yield text[start:cut]
            start = cut + 1 if self._rule.drops_space else cut
        yield text[start:]

    def _cuts(self, text: str) -> Iterator[int]:
        last = 0
        match = self._rule.pattern.match
        for anchor in _ANCHOR.finditer(text):
            position = anchor.start()
            if position - last < _MIN_PIECE_LEN or not match(text, position):
                continue
            if self._rule.allows(text, position):
                yield from self._fillers(text, last, position)
                yield position
                last = position
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


class _PieceCache:
    """The pieces used last, in two generations: the older one goes when the younger is full."""

    def __init__(self, max_tokens: int) -> None:
        self._max_tokens = max_tokens
        self._young: dict[str, array[int]] = {}
        self._old: dict[str, array[int]] = {}
        self._num_young_tokens = 0

    def get(self, piece: str) -> array[int]:
        """Token ids of `piece`; empty if they aren't known."""
        found = self._young.get(piece)
        if found is None and (found := self._old.get(piece)) is not None:
            self.put(piece, found)
        return found if found is not None else array("i")

    def put(self, piece: str, token_ids: array[int]) -> None:
        self._young[piece] = token_ids
        self._num_young_tokens += len(token_ids) + 1
        if 2 * self._num_young_tokens > self._max_tokens:
            self._old, self._young, self._num_young_tokens = self._young, {}, 0


def _frame(backend: Tokenizer) -> tuple[list[int], list[int]]:
    """Ids that the tokenizer puts before and behind every text."""
    for text in ("a", "The", "1", " "):
        bare: list[int] = backend.encode(text, add_special_tokens=False).ids
        full: Encoding = backend.encode(text)
        own = [place for place, special in enumerate(full.special_tokens_mask) if not special]
        if bare and len(own) == len(bare) and own == list(range(own[0], own[-1] + 1)):
            head, tail = full.ids[: own[0]], full.ids[own[-1] + 1 :]
            if full.ids == head + bare + tail and backend.encode("").ids == head + tail:
                return head, tail
    raise NoProofError("what the post-processor adds depends on the text")
