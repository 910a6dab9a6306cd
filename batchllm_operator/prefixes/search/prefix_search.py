"""Searches the common prefixes of prompts that may be on disk.

    add      prompts -> rows of segment hashes, in bounded memory           (`hash_rows`)
    finish   rows -> order and common segments of neighbours
             every pair of neighbours compared, token by token
             the segment in which they part looked at, for the rest         (`refine`)

Memory holds only some numbers per prompt. The result doesn't depend on how coarse the rows are: it
is the lexicographic order with LCPs, from which one pass with a stack builds the tree (`lcp_tree`),
over tokens or over blocks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Final

import numpy as np
from numpy.typing import NDArray

from batchllm_operator.errors import PlanError
from batchllm_operator.prefixes.jit import compiled
from batchllm_operator.prefixes.prompt_store import Prompts, chunks, read_ahead
from batchllm_operator.prefixes.search.hash_rows import HashRows
from batchllm_operator.prefixes.search.lcp_tree import RankedPrompts
from batchllm_operator.prefixes.search.refine import Refinement
from batchllm_operator.prefixes.search.row_sort import num_equal
from batchllm_operator.prefixes.search.segment_hashes import (
    HASH_BITS,
    SEGMENT_TOKENS,
    SegmentHasher,
)
from batchllm_operator.prefixes.token_table import TokenTable

_MAX_SEEDS: Final = 100  # with 62 bits, one of many thousand plans needs a second one

Advance = Callable[[int], None]
"""Called with the number of prompts done since the last call."""
Phase = Callable[[str, int], AbstractContextManager[Advance]]


class PrefixSearch:
    """Finds the common prefixes of prompts, which are added batch by batch.

    Args:
        max_row_bytes: upper bound of the rows of hashes until `finish`; None for no bound. It and
            the other arguments change the work, not the result.
        segment_tokens: see `SegmentHasher`.
        hash_bits: see `SegmentHasher`.

    Raises:
        PlanError: an argument is out of its range.
    """

    def __init__(
        self,
        max_row_bytes: int | None = None,
        *,
        segment_tokens: int = SEGMENT_TOKENS,
        hash_bits: int = HASH_BITS,
    ) -> None:
        self._max_row_bytes = max_row_bytes
        self._segment_tokens = segment_tokens
        self._hash_bits = hash_bits
        self._start(seed=0)

    def add(self, tokens: TokenTable) -> None:
        """Add the next prompts."""
        for part in chunks(tokens.lengths):
            begin, end = tokens.offsets[part.start], tokens.offsets[part.stop]
            offsets = tokens.offsets[part.start : part.stop + 1] - begin
            self._rows.add(TokenTable.unchecked(tokens.token_ids[begin:end], offsets))

    def finish(self, prompts: Prompts, phase: Phase | None = None) -> RankedPrompts:
        """The prompts in lexicographic order, with their LCPs.

        Args:
            prompts: all added prompts, in the same order.
            phase: called with the name of each phase ("sort", "compare") and its number of
                prompts; returns a context whose value is an `Advance`.

        Raises:
            PlanError: no seed avoids collisions; never with the default `hash_bits`.
            OSError: the prompts can't be read.
        """
        phase = phase if phase is not None else _silent
        for seed in range(1, _MAX_SEEDS + 1):
            with phase("sort", len(prompts)) as advance:
                segments = self._rows.sort(prompts.lengths)
                advance(len(prompts))
            with phase("compare", len(prompts)) as advance:
                ranked = _refined(prompts, segments, self._rows.segment_tokens, advance)
            if ranked is not None:
                return ranked
            self._start(seed)
            for part in chunks(prompts.lengths):
                idxs = np.arange(part.start, part.stop)
                self.add(prompts.prefixes(idxs, prompts.lengths[part]))
        raise PlanError(f"hashes of {self._hash_bits} bits don't tell all prompts apart")

    def _start(self, seed: int) -> None:
        hasher = SegmentHasher(seed, segment_tokens=self._segment_tokens, hash_bits=self._hash_bits)
        self._rows = HashRows(hasher, self._max_row_bytes)


def _refined(
    prompts: Prompts, segments: RankedPrompts, segment_tokens: int, advance: Advance
) -> RankedPrompts | None:
    """Compares neighbours by their tokens, and sorts within segments.

    Returns:
        None after a collision: prompts share less than their hashes say.
    """
    ranked = segments.prompt_idxs
    lengths = prompts.lengths[ranked]
    refinement = Refinement(segments.tree(prompts.lengths), prompts, segment_tokens)
    shared = np.where(segments.is_repeat, lengths, segments.num_shared_tokens)
    # Tokens read of each prompt: its LCPs with its neighbours, and one more segment.
    wanted = np.maximum(shared, np.append(shared[1:], 0)) + segment_tokens
    parts = list(chunks(np.minimum(wanted, lengths)))
    looks = [slice(max(part.start - 1, 0), part.stop) for part in parts]  # with the one before
    tables = read_ahead(prompts, ((ranked[look], wanted[look]) for look in looks))
    for part, look, tokens in zip(parts, looks, tables, strict=True):
        if not _agree(tokens.token_ids, tokens.offsets, shared[look]):
            return None
        refinement.read(tokens, look.start)
        advance(part.stop - part.start)
    return refinement.finish()


def ignore(_: int) -> None:
    """An `Advance` without a display."""


@contextmanager
def _silent(_: str, __: int) -> Iterator[Advance]:
    yield ignore


@compiled
def _agree(
    token_ids: NDArray[np.int32], offsets: NDArray[np.int64], shared: NDArray[np.int64]
) -> bool:
    """Whether each prompt after the first really shares `shared` tokens with the one before."""
    for position in range(1, len(shared)):
        before = token_ids[offsets[position - 1] : offsets[position]]
        prompt = token_ids[offsets[position] : offsets[position + 1]]
        wanted = shared[position]
        if wanted > min(len(before), len(prompt)):
            return False
        if num_equal(before[:wanted], prompt[:wanted]) < wanted:
            return False
    return True
