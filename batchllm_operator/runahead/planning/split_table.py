"""Searched splits for some prefix lengths, and interpolated ones between them (KVR-P).

A search takes milliseconds to seconds with the model, and hours by measurements on the target
hardware (Cho et al., App. D). So splits are searched once for some lengths, and boundaries between
them are interpolated linearly, as shares of the prefix (Sec. 4.2). Shorter and longer prefixes have
the shares of the shortest and the longest one.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterable
from dataclasses import dataclass

from batchllm_operator.errors import PlanError
from batchllm_operator.runahead.planning.chain import Chain, Goal, Split
from batchllm_operator.runahead.planning.search import search_split, split_at


@dataclass(frozen=True, slots=True)
class SplitTable:
    """Splits by prefix length, for one chain and number of replicas."""

    num_replicas: int
    block_size: int
    max_step_tokens: int | None
    """Most tokens of a chunk; None without a limit."""
    splits: tuple[Split, ...]
    """Chunks of each prefix, in ascending order of their sums; at least one."""

    @property
    def lengths(self) -> tuple[int, ...]:
        """Searched prefix lengths, in tokens."""
        return tuple(sum(split) for split in self.splits)

    @classmethod
    def search(
        cls, chain: Chain, lengths: Iterable[int], num_replicas: int, until: Goal = "first_token"
    ) -> SplitTable:
        """Search a split for each length.

        Args:
            chain: predicts the times.
            lengths: prefix lengths in tokens, in any order.
            num_replicas: p.
            until: the time to minimize.

        Raises:
            PlanError: there are no lengths, or `search_split` refuses one.
        """
        splits = tuple(
            search_split(chain, each, num_replicas, until) for each in sorted(set(lengths))
        )
        if not splits:
            raise PlanError("table of splits: no lengths are given")
        return cls(num_replicas, chain.block_size, chain.max_step_tokens, splits)

    def split(self, num_tokens: int) -> Split:
        """The split of a prefix: searched for its length, or interpolated.

        Each replica gets whole blocks, at least one and at most a step's.

        Raises:
            PlanError: the prefix has fewer blocks than there are replicas, or doesn't fit into a
                step of each.
        """
        num_blocks = -(-num_tokens // self.block_size)
        most = num_blocks
        if self.max_step_tokens is not None:
            most = self.max_step_tokens // self.block_size
        if not self.num_replicas <= num_blocks <= most * self.num_replicas:
            raise PlanError(
                f"table of splits: a prefix of {num_tokens} tokens has {num_blocks} blocks of"
                f" {self.block_size}; {self.num_replicas} replicas compute 1 to {most} each"
            )
        found: list[int] = []
        for idx, share in enumerate(self._shares(num_tokens), 1):
            left = self.num_replicas - idx
            before = found[-1] if found else 0
            least = max(before + 1, num_blocks - left * most)
            greatest = min(before + most, num_blocks - left)
            found.append(min(max(round(share * num_tokens / self.block_size), least), greatest))
        return split_at(found, num_tokens, self.block_size)

    def _shares(self, num_tokens: int) -> list[float]:
        """The end of each chunk except the last, as a share of the prefix."""
        lengths = self.lengths
        after = bisect.bisect_left(lengths, num_tokens)
        if after == 0 or after == len(lengths):
            return _ends(self.splits[min(after, len(lengths) - 1)])
        low, high = lengths[after - 1], lengths[after]
        weight = (num_tokens - low) / (high - low)
        pairs = zip(_ends(self.splits[after - 1]), _ends(self.splits[after]), strict=True)
        return [start + weight * (end - start) for start, end in pairs]


def _ends(split: Split) -> list[float]:
    ends, num_tokens, total = [], 0, sum(split)
    for chunk in split[:-1]:
        num_tokens += chunk
        ends.append(num_tokens / total)
    return ends
