"""Prompts as rows of hashes, one per segment of tokens: short enough for memory.

A segment is `SEGMENT_TOKENS` consecutive tokens of a prompt, counted from its beginning. Its
hash is chained: it depends on the segment's tokens and on all before them, as a block's hash
does in vLLM's prefix cache. The rest after the last full segment gets a hash too, which also
depends on its length, so that prompts with equal rows are equal prompts.

Within a segment the tokens are hashed by a sum of products with random odd numbers (multilinear
hashing: Lemire and Kaser, "Strongly universal string hashing is fast", 2014), which leaves the
processor free to work on several tokens at once. Hashes have 62 bits, in two numbers below
2**31, so that a row is one for `sort_rows`. Equal prefixes have equal hashes. That
different ones don't is likely, not sure: users of rows have to compare tokens afterwards.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from batchllm_operator.errors import PlanError
from batchllm_operator.prefixes.jit import compiled
from batchllm_operator.prefixes.token_table import TokenTable

SEGMENT_TOKENS = 128
"""Longer segments make shorter rows, but more tokens to compare where prompts diverge."""
HASH_BITS = 62
HASH_SYMBOLS = 2
"""int32 per segment."""
_MIX = np.uint64(0x9E3779B97F4A7C15)  # 2**64 / the golden ratio, odd


class SegmentHasher:
    """Hashes the segments of prompts.

    Args:
        seed: another seed gives other hashes.
        segment_tokens: tokens per segment, at least 1.
        hash_bits: 1 to 62; fewer make collisions more likely, for tests.

    Raises:
        PlanError: an argument is out of its range.
    """

    def __init__(
        self, seed: int = 0, *, segment_tokens: int = SEGMENT_TOKENS, hash_bits: int = HASH_BITS
    ) -> None:
        if segment_tokens < 1:
            raise PlanError(f"segments hold at least 1 token, not {segment_tokens}")
        if not 1 <= hash_bits <= HASH_BITS:
            raise PlanError(f"hashes have 1 to {HASH_BITS} bits, not {hash_bits}")
        self.segment_tokens = segment_tokens
        self._shift = 64 - hash_bits
        generator = np.random.Generator(np.random.PCG64(seed))
        # One for each token of a segment, and one for its length.
        multipliers = generator.integers(0, 2**64, segment_tokens + 1, dtype=np.uint64)
        self._multipliers = multipliers | np.uint64(1)

    def rows(self, tokens: TokenTable) -> TokenTable:
        """The row of each prompt: [2 * segments], including a partial last one."""
        offsets = np.zeros(len(tokens) + 1, dtype=np.int64)
        np.cumsum(-(-tokens.lengths // self.segment_tokens) * HASH_SYMBOLS, out=offsets[1:])
        symbols = np.empty(offsets[-1], dtype=np.int32)
        _hash_segments(
            tokens.token_ids,
            tokens.offsets,
            self.segment_tokens,
            self._multipliers,
            self._shift,
            symbols,
        )
        return TokenTable.unchecked(symbols, offsets)

    def last_hashes(self, tokens: TokenTable) -> NDArray[np.int64]:
        """Hash of each whole prompt, and of the prompt without its last segment.

        Returns:
            int64 [num_prompts, 2], from 0 to 2**62 - 1; -1 if empty.
        """
        rows = self.rows(tokens)
        hashes = np.full((len(tokens), 2), -1, dtype=np.int64)
        for column in (0, 1):
            places = rows.offsets[1:] - (column + 1) * HASH_SYMBOLS
            exists = places >= rows.offsets[:-1]
            upper = rows.token_ids[places[exists]].astype(np.int64)
            hashes[exists, column] = (upper << 31) | rows.token_ids[places[exists] + 1]
        return hashes


@compiled
def _hash_segments(
    token_ids: NDArray[np.int32],
    offsets: NDArray[np.int64],
    segment_tokens: int,
    multipliers: NDArray[np.uint64],
    shift: int,
    symbols: NDArray[np.int32],
) -> None:
    place = 0
    for idx in range(len(offsets) - 1):
        begin, prompt_end = offsets[idx], offsets[idx + 1]
        chain = _MIX
        while begin < prompt_end:
            end = min(begin + segment_tokens, prompt_end)
            segment = token_ids[begin:end]
            value = np.uint64(len(segment)) * multipliers[segment_tokens]
            for position in range(len(segment)):
                value += np.uint64(segment[position]) * multipliers[position]
            chain = (chain ^ (value ^ (value >> np.uint64(32)))) * _MIX
            chain ^= chain >> np.uint64(29)
            out = (chain * _MIX) >> np.uint64(shift)
            symbols[place] = np.int32(out >> np.uint64(31))
            symbols[place + 1] = np.int32(out & np.uint64(0x7FFFFFFF))
            place += 2
            begin = end
