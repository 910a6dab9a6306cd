"""Ranges of prompts, each sorted and planned by one task.

A boundary is a key and a place: prompts before it are those with a smaller key, or with the same
key and a smaller place. A key is a prompt's token ids, as big-endian integers, so that bytes sort
as ids do. Boundaries come from a sample that hashes choose, and lie where its neighbours share
least. As far as possible they are as short as separators in a B-tree, so that a prefix on which
neighbours agree isn't cut; equal prompts that fill a range are cut by place.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from batchllm_operator.prefixes import TokenTable

RANGE_BYTES: Final = 128 << 20
"""Of keys: a JVM of 1 GB sorts them without spilling."""
MOST_RANGES: Final = 10_000
_SLACK: Final = 8
"""A boundary may move by so many-th part of a range to where neighbours share less."""
_TOKEN_BYTES: Final = 4
_HEAD_BYTES: Final = 16 * _TOKEN_BYTES

Place = tuple[bytes, int]


def key_array(tokens: TokenTable) -> pa.Array:
    """The keys of some megabytes of prompts: `pa.binary`."""
    ends = (tokens.offsets * _TOKEN_BYTES).astype(np.int32)
    data = tokens.token_ids.astype(">u4")
    return pa.Array.from_buffers(pa.binary(), len(tokens), [None, *map(pa.py_buffer, (ends, data))])


def tokens_of(data: npt.NDArray[np.uint8], offsets: npt.NDArray[np.int64]) -> TokenTable:
    """The prompts of the keys in `data`: uint8 [num_bytes]; `offsets`: int64 [num_prompts + 1]."""
    used = data[offsets[0] : offsets[-1]]
    token_ids = used.view(">u4").astype(np.int32)
    return TokenTable(token_ids, (offsets - offsets[0]) // _TOKEN_BYTES)


def common_tokens(a: bytes, b: bytes) -> int:
    """Length of the longest common prefix of two keys, in tokens."""
    most = min(len(a), len(b)) // _TOKEN_BYTES
    first, second = (np.frombuffer(key, ">u4", count=most) for key in (a, b))
    differs = first != second
    return int(np.argmax(differs)) if differs.any() else most


def num_ranges(num_rows: int, sample: Sequence[Place]) -> int:
    """Ranges for so many rows, as long as those of the sample."""
    if not sample:
        return 1
    mean_bytes = sum(len(key) for key, _ in sample) / len(sample)
    return min(max(1, round(num_rows * mean_bytes / RANGE_BYTES)), MOST_RANGES)


@dataclass(frozen=True, slots=True)
class Ranges:
    """Boundaries of ranges, ascending, and the shards of each range."""

    boundaries: tuple[Place, ...]
    """One fewer than ranges."""
    num_shards: tuple[int | None, ...]
    """Of each range; None where its work decides."""

    def __len__(self) -> int:
        return len(self.num_shards)

    def of(self, key: bytes, place: int) -> int:
        """The range of a prompt."""
        return bisect_right(self.boundaries, (key, place))

    def numbers(self, keys: pa.Array, places: npt.NDArray[np.int64]) -> list[int]:
        """The range of each prompt."""
        # One byte more than any boundary has: cut keys lie where whole ones do.
        most = 1 + max((len(key) for key, _ in self.boundaries), default=0)
        return list(map(self.of, pc.binary_slice(keys, 0, most).to_pylist(), places.tolist()))

    def heads(self, keys: pa.Array, numbers: Sequence[int]) -> pa.Array:
        """A few bytes of each key that sort as the keys of its range do: `pa.binary`.

        Where they are equal, keys decide. Spark copies both keys for each comparison.
        """
        starts = {number: self._num_shared_bytes(number) for number in set(numbers)}
        ends = np.frombuffer(keys.buffers()[1], np.int32)[: len(keys) + 1].tolist()
        data = memoryview(keys.buffers()[2])
        cut = (
            bytes(data[min(begin + starts[number], end) : end][:_HEAD_BYTES])
            for number, (begin, end) in zip(numbers, pairwise(ends), strict=True)
        )
        return pa.array(cut, pa.binary())

    def _num_shared_bytes(self, number: int) -> int:
        """Bytes with which all keys of a range begin."""
        if not 0 < number < len(self.boundaries):
            return 0
        (lower, _), (upper, _) = self.boundaries[number - 1 : number + 1]
        return common_tokens(lower, upper) * _TOKEN_BYTES


def choose_ranges(sample: Sequence[Place], num: int, num_shards: int | None) -> Ranges:
    """About `num` ranges of as many prompts, by a sorted sample.

    With the spec's `num_shards` at most as many, each with its share of them.
    """
    num = num if num_shards is None else min(num, num_shards)
    total = num_shards or num
    ends = [(idx + 1) * total // num for idx in range(num)]  # shards up to the end of each range
    reach = max(1, len(sample) // num // _SLACK)
    boundaries: list[Place] = []
    shards: list[int] = []
    given = 0
    for end in ends[:-1]:
        target = end * len(sample) // total
        candidates = range(max(1, target - reach), min(len(sample), target + reach + 1))
        boundary = _boundary(sample, candidates, target)
        if boundary is not None and (not boundaries or boundary > boundaries[-1]):
            boundaries.append(boundary)
            shards.append(end - given)
            given = end
    shards.append(total - given)
    counts: tuple[int | None, ...] = tuple(shards)
    return Ranges(tuple(boundaries), counts if num_shards is not None else (None,) * len(shards))


def _boundary(sample: Sequence[Place], candidates: Sequence[int], target: int) -> Place | None:
    """The boundary between two neighbours that share least; the nearest to `target` of those."""
    if not candidates:
        return None
    shared = {at: common_tokens(sample[at - 1][0], sample[at][0]) for at in candidates}
    at = min(candidates, key=lambda place: (shared[place], abs(place - target), place))
    before, (key, place) = sample[at - 1][0], sample[at]
    if before == key:
        return key, place
    return key[: (shared[at] + 1) * _TOKEN_BYTES], -1
