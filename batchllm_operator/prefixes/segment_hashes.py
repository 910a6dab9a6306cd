"""Hashes of prompts' segments, which recognise a prefix in another plan.

A segment is so many consecutive tokens of a prompt, counted from its beginning. Its hash is
chained: it depends on the segment's tokens and on all before them, as a block's hash does in
vLLM's prefix cache. Within a segment the tokens are hashed by a sum of products with random odd
numbers (multilinear hashing: Lemire and Kaser, "Strongly universal string hashing is fast", 2014).
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from batchllm_operator.prefixes.jit import compiled
from batchllm_operator.prefixes.token_table import TokenTable

_MIX = np.uint64(0x9E3779B97F4A7C15)  # 2**64 / the golden ratio, odd
_HASH_BITS = 62


def last_hashes(tokens: TokenTable, segment_tokens: int) -> NDArray[np.int64]:
    """Hash of each whole prompt, and of the prompt without its last segment.

    Returns:
        int64 [num_prompts, 2], from 0 to 2**62 - 1; -1 if empty.
    """
    generator = np.random.Generator(np.random.PCG64(0))
    # One for each token of a segment, and one for its length.
    multipliers = generator.integers(0, 2**64, segment_tokens + 1, dtype=np.uint64) | np.uint64(1)
    return _hash(tokens.token_ids, tokens.offsets, multipliers)


@compiled
def _hash(
    token_ids: NDArray[np.int32], offsets: NDArray[np.int64], multipliers: NDArray[np.uint64]
) -> NDArray[np.int64]:
    segment_tokens = len(multipliers) - 1
    hashes = np.full((len(offsets) - 1, 2), -1, dtype=np.int64)
    for idx in range(len(hashes)):
        chain = _MIX
        for begin in range(offsets[idx], offsets[idx + 1], segment_tokens):
            segment = token_ids[begin : min(begin + segment_tokens, offsets[idx + 1])]
            value = np.uint64(len(segment)) * multipliers[segment_tokens]
            for position in range(len(segment)):
                value += np.uint64(segment[position]) * multipliers[position]
            chain = (chain ^ (value ^ (value >> np.uint64(32)))) * _MIX
            chain ^= chain >> np.uint64(29)
            hashes[idx, 1] = hashes[idx, 0]
            hashes[idx, 0] = np.int64((chain * _MIX) >> np.uint64(64 - _HASH_BITS))
    return hashes
