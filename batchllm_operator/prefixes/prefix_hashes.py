"""Hashes of prefixes, by which another plan recognises them.

Where a prefix ends depends on how its group's prompts go on, so it is hashed up to the ends of
segments of 64 tokens. The hash of a segment is chained: it depends on the segment's tokens and on
all before them, as a block's hash does in vLLM's prefix cache. Within a segment the tokens are
hashed by a sum of products with random odd numbers (multilinear hashing: Lemire and Kaser,
"Strongly universal string hashing is fast", 2014).
"""

from typing import Final

import numpy as np
from numpy.typing import NDArray

from batchllm_operator.prefixes.algorithm1 import PrefixGroups
from batchllm_operator.prefixes.jit import Int32s, Int64s, compiled
from batchllm_operator.prefixes.prompt_store import chunks
from batchllm_operator.prefixes.requests import Requests

NO_HASH: Final = -1
_SEGMENT_TOKENS: Final = 64
_MIX = np.uint64(0x9E3779B97F4A7C15)  # 2**64 / the golden ratio, odd
_HASH_BITS = 62


def hash_prefixes(requests: Requests, groups: PrefixGroups) -> Int64s:
    """Hashes of each group's prefix: to the end of its last full segment, and of the one before.

    Returns:
        [num_groups, 2] int64 from 0 to 2**62 - 1; `NO_HASH` where there is no such segment, as in
        groups of one.
    """
    generator = np.random.Generator(np.random.PCG64(0))
    # One for each token of a segment, and one for its length.
    multipliers = generator.integers(0, 2**64, _SEGMENT_TOKENS + 1, dtype=np.uint64) | np.uint64(1)
    hashes = np.full((len(groups), 2), NO_HASH, dtype=np.int64)
    num_segments = groups.num_prefix_tokens // _SEGMENT_TOKENS
    chosen = np.flatnonzero(num_segments)
    prompt_idxs = requests.prompt_idxs[groups.member_idxs[groups.offsets[chosen]]]
    num_tokens = num_segments[chosen] * _SEGMENT_TOKENS
    for part in chunks(num_tokens):
        prefixes = requests.prompts.slices(prompt_idxs[part], 0, num_tokens[part])
        hashes[chosen[part]] = _last_hashes(prefixes.token_ids, prefixes.offsets, multipliers)
    return hashes


@compiled
def _last_hashes(token_ids: Int32s, offsets: Int64s, multipliers: NDArray[np.uint64]) -> Int64s:
    """Hash of each whole prompt, and of the prompt without its last segment: [num_prompts, 2]."""
    segment_tokens = len(multipliers) - 1
    hashes = np.full((len(offsets) - 1, 2), NO_HASH, dtype=np.int64)
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
