"""Chooses the groups that a chain of all replicas computes, by predicted makespans (ADR 23).

A group can be placed in three ways on p replicas:

    whole      one replica computes the prefix and has all members
    recompute  every replica computes the prefix, and the members are spread over all
    chain      a chain of all replicas computes the prefix, and the members are spread

A chain saves at most T_prefix * (1 - 1/p) for its group, and occupies every replica. So it pays
where replicas would idle: fewer groups than replicas, an uneven rest, a giant group. The rule:
chain the k groups with the most work, or recompute the prefixes of the k whose members have the
most. k is the number with the shortest makespan, or fewer where that hardly takes longer.
`benchmarks.runahead_rules` compares the rule with the best of all sets.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from batchllm_operator.runahead.prediction import Chain, Split
from batchllm_operator.runahead.split import split_prefixes

MARGIN: Final = 0.05
"""Least share of the makespan that spreading groups, with a chain or without, must save."""
_SLACK: Final = 0.02
"""Share by which the makespan may exceed the shortest to spread fewer groups: several chains in a
row take longer than predicted, and the last ones' savings may be noise."""
_MOST_SPREAD: Final = 64
"""Most groups that are spread; of many, those beyond even out on any replica."""


@dataclass(frozen=True, slots=True, eq=False)
class GroupLoads:
    """The numbers that the placement of groups depends on, each float64 [num_groups].

    Members of a group are assumed to be equal.
    """

    prefix_tokens: NDArray[np.float64]
    num_members: NDArray[np.float64]
    distinct_tokens: NDArray[np.float64]
    """Of all members, after the prefix."""
    output_tokens: NDArray[np.float64]
    """Of all members."""

    def __len__(self) -> int:
        return len(self.prefix_tokens)


@dataclass(frozen=True, slots=True)
class Placement:
    """The groups to spread; the others are whole. Makespans in seconds."""

    splits: dict[int, Split]
    """By group, of those to compute by a chain."""
    recompute_idxs: tuple[int, ...]
    """Groups to spread where no group is chained, ascending."""
    makespan_s: float
    without_s: float
    """Makespan without chains."""


def choose_placement(
    loads: GroupLoads, chain: Chain, *, max_num_seqs: int = 1024, can_chain: bool = True
) -> Placement:
    """Choose which of all groups on the replicas are spread.

    Args:
        loads: at least one group.
        chain: the replicas; a step holds the longest chunk.
        max_num_seqs: most requests that run at a time on a replica.
        can_chain: whether groups may be computed by a chain.
    """
    prefixes = loads.prefix_tokens.astype(np.int64).tolist()
    chainable = [
        idx for idx, length in enumerate(prefixes) if can_chain and chain.can_split(length)
    ]
    lengths = split_prefixes(chain, [prefixes[idx] for idx in chainable])
    splits = {idx: lengths[prefixes[idx]] for idx in chainable}
    makespans = Makespans(loads, chain, max_num_seqs, splits)
    shareable = np.flatnonzero((loads.num_members > 1) & (loads.prefix_tokens > 0))
    by_members = shareable[np.argsort(-makespans.members_s[shareable], kind="stable")].tolist()
    by_work = [idx for idx in makespans.longest_first if idx in splits]
    whole_s = makespans.seconds(())
    without_s, recomputed = _first(by_members, makespans, chained=False)
    if without_s > whole_s * (1 - MARGIN):
        without_s, recomputed = whole_s, []
    makespan_s, chained = _first(by_work, makespans, chained=True)
    if makespan_s > without_s * (1 - MARGIN):
        makespan_s, chained = without_s, []
    return Placement(
        {idx: splits[idx] for idx in sorted(chained)},
        tuple(sorted(recomputed)),
        makespan_s,
        without_s,
    )


def _first(order: list[int], makespans: Makespans, *, chained: bool) -> tuple[float, list[int]]:
    """The first groups of an order to spread, and the makespan."""
    sizes = range(min(len(order), _MOST_SPREAD) + 1)
    seconds = [makespans.seconds(order[:num], chained=chained) for num in sizes]
    longest_s = min(seconds) * (1 + _SLACK)
    num = next(num for num, makespan_s in enumerate(seconds) if makespan_s <= longest_s)
    return seconds[num], order[:num]


class Makespans:
    """Makespans of groups on equal replicas.

    That is the time of the chains, one after the other on all replicas, plus that of the slowest
    replica, which is, as in `cost.roofline`,

        prefill_s + max(decode tokens * s per token, steps * weights_s) + KV reads
                  + steps * overhead

    where steps is its longest output, or decode tokens / `max_num_seqs` if that is more. Whole
    groups go to the replica with the least work so far, longest first.

    Attributes:
        members_s: float64 [num_groups], seconds of all members alone, without the prefix.
        longest_first: groups by the seconds of prefix and members.
    """

    def __init__(
        self, loads: GroupLoads, chain: Chain, max_num_seqs: int, splits: dict[int, Split]
    ) -> None:
        cost = chain.cost
        self._cost, self._max_num_seqs, self._p = cost, max_num_seqs, chain.num_replicas
        members, outputs, prefix = loads.num_members, loads.output_tokens, loads.prefix_tokens
        step_s = cost.step_overhead_s + cost.sampled_token_s
        # A prefix that fills no step shares one with other groups.
        steps = prefix / (chain.max_chunk_blocks * chain.block_size)
        self._prefix_s = cost.tokens_seconds(prefix) + steps * step_s
        own = loads.distinct_tokens / members
        self._longest = outputs / members
        reads = outputs * (prefix + own + (self._longest + 1) / 2)
        self._work = np.stack([members * cost.tokens_seconds(own, prefix), outputs, reads], axis=1)
        self._members = members.astype(np.int64)
        decoded_s = cost.num_layers * cost.s_per_token + cost.sampled_token_s
        rates = np.array([1.0, decoded_s, cost.num_layers * cost.read_s_per_token])
        steps_s = self._longest * (cost.num_layers * cost.weights_s + cost.step_overhead_s)
        self.members_s: NDArray[np.float64] = self._work @ rates + steps_s
        self._whole_work = np.column_stack([self._work, self._longest])
        self._whole_work[:, 0] += self._prefix_s
        lone_s = self._prefix_s + self.members_s
        self.longest_first: list[int] = np.argsort(-lone_s, kind="stable").tolist()
        self._chain_s = np.zeros(len(loads))
        if splits:
            self._chain_s[list(splits)] = chain.seconds(np.array(list(splits.values())))

    def seconds(self, spread: Sequence[int], *, chained: bool = True) -> float:
        """Makespan if these groups are spread over all replicas and all others are whole."""
        p, idxs = self._p, np.sort(np.array(spread, dtype=np.int64))
        # Odd members go to other replicas each time.
        turns = (np.arange(p) - np.arange(len(idxs))[:, np.newaxis]) % p
        num_on = self._members[idxs, np.newaxis] // p + (
            turns < self._members[idxs, np.newaxis] % p
        )
        loads = np.zeros((p, 4))
        loads[:, :3] = (num_on / self._members[idxs, np.newaxis]).T @ self._work[idxs]
        loads[:, 3] = np.max((num_on > 0).T * self._longest[idxs], axis=1, initial=0.0)
        if not chained:
            loads[:, 0] += (num_on > 0).T @ self._prefix_s[idxs]
        is_whole = np.ones(len(self._members), dtype=bool)
        is_whole[idxs] = False
        order = [idx for idx in self.longest_first if is_whole[idx]]
        chain_s = float(self._chain_s[idxs].sum()) if chained else 0.0
        return chain_s + self._with_whole(loads.tolist(), self._whole_work[order].tolist())

    def _with_whole(self, loads: list[list[float]], whole: list[list[float]]) -> float:
        """Makespan once each whole group has gone to the replica with the least work so far."""
        heap = [(self._replica_s(*load), *load) for load in loads]
        heapq.heapify(heap)
        for prefill_s, decoded, reads, longest in whole:
            _, its_prefill_s, its_decoded, its_reads, its_longest = heap[0]
            load = (
                its_prefill_s + prefill_s,
                its_decoded + decoded,
                its_reads + reads,
                max(its_longest, longest),
            )
            heapq.heapreplace(heap, (self._replica_s(*load), *load))
        return max(heap)[0]

    def _replica_s(self, prefill_s: float, decoded: float, reads: float, longest: float) -> float:
        """Seconds of a replica: of prefill, then for decoded tokens and KV that they read."""
        cost, steps = self._cost, max(longest, decoded / self._max_num_seqs)
        layer_s = max(decoded * cost.s_per_token, steps * cost.weights_s)
        layer_s += reads * cost.read_s_per_token
        steps_s = decoded * cost.sampled_token_s + steps * cost.step_overhead_s
        return prefill_s + cost.num_layers * layer_s + steps_s
