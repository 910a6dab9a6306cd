"""Chooses the groups whose prefixes a chain of all replicas computes, by makespans (ADR 23).

A chain saves at most T_prefix * (1 - 1/p) for its group, and occupies every replica. So it pays
where replicas would idle: fewer groups than replicas, an uneven rest, a giant group.
"""

import heapq
from collections.abc import Collection
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from batchllm_operator.runahead.prediction import Chain, Split

MARGIN: Final = 0.05
"""Least share of the makespan that chains must save."""
_SLACK: Final = 0.02
"""Share by which the makespan may exceed the shortest to chain fewer groups: several chains in a
row take longer than predicted, and the last ones' savings may be noise."""


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


@dataclass(frozen=True, slots=True)
class Placement:
    """The groups to chain; the others are whole. Makespans in seconds."""

    splits: dict[int, Split]
    """By group, ascending."""
    makespan_s: float
    without_s: float
    """Makespan without chains."""


class Makespans:
    """Makespans of groups on equal replicas.

    That is the time of the chains, one after the other on all replicas, plus that of the replica
    with the most other work. A whole group, or the members of a chained one, go to the replica with
    the least work so far, longest first. Groups that hardly count by themselves fill the gaps.

    Attributes:
        splits: by group, of those that a chain can compute, longest first.
    """

    def __init__(self, loads: GroupLoads, chain: Chain, max_num_seqs: int) -> None:
        cost, self._p = chain.cost, chain.num_replicas
        members, outputs, prefix = loads.num_members, loads.output_tokens, loads.prefix_tokens
        own, longest = loads.distinct_tokens / members, outputs / members
        # A prefix that fills no step shares one with other groups.
        prefill_step_s = cost.step_overhead_s + cost.sampled_token_s
        prefix_s = cost.tokens_seconds(prefix) + prefix / chain.longest_chunk * prefill_step_s
        token_s = cost.num_layers * cost.s_per_token + cost.sampled_token_s
        reads = outputs * (prefix + own + (longest + 1) / 2)
        work_s = members * cost.tokens_seconds(own, prefix) + outputs * token_s
        work_s += reads * cost.num_layers * cost.read_s_per_token
        decode_step_s = cost.num_layers * cost.weights_s + cost.step_overhead_s
        members_s = work_s + longest * decode_step_s
        whole_s = prefix_s + members_s
        is_large = whole_s > MARGIN * whole_s.sum() / self._p
        order = [int(idx) for idx in np.argsort(-whole_s, kind="stable") if is_large[idx]]
        self._seconds = {idx: (float(whole_s[idx]), float(members_s[idx])) for idx in order}
        # Their decode steps are full of others' tokens.
        small_s = prefix_s + work_s + outputs / max_num_seqs * decode_step_s
        self._small_s = float(small_s[~is_large].sum())
        lengths = {idx: int(prefix[idx]) for idx in order}
        self.splits = {
            idx: chain.split(length) for idx, length in lengths.items() if chain.can_split(length)
        }
        rows = np.array(list(self.splits.values()), dtype=np.int64).reshape(-1, self._p)
        seconds: list[float] = chain.seconds(rows).tolist()
        self._chain_s = dict(zip(self.splits, seconds, strict=True))

    def seconds(self, chained: Collection[int]) -> float:
        """Makespan if these groups are chained and all others are whole."""
        work = sorted((both[idx in chained] for idx, both in self._seconds.items()), reverse=True)
        loads = [0.0] * self._p
        for seconds in work:
            heapq.heapreplace(loads, loads[0] + seconds)
        slowest_s: float = max(*loads, (sum(loads) + self._small_s) / self._p)
        return slowest_s + sum(self._chain_s[idx] for idx in chained)


def choose_placement(loads: GroupLoads, chain: Chain, *, max_num_seqs: int = 1024) -> Placement:
    """Choose to chain the k groups with the most work.

    k has the shortest makespan, or is smaller where that hardly takes longer.
    `benchmarks.runahead_rules` compares the choice with the best of all sets.

    Args:
        loads: at least one group.
        chain: the replicas; a step holds the longest chunk.
        max_num_seqs: most requests that run at a time on a replica.
    """
    makespans = Makespans(loads, chain, max_num_seqs)
    order = list(makespans.splits)
    seconds = [makespans.seconds(order[:num]) for num in range(len(order) + 1)]
    longest_s = min(seconds) * (1 + _SLACK)
    num = next(num for num, makespan_s in enumerate(seconds) if makespan_s <= longest_s)
    if seconds[num] > seconds[0] * (1 - MARGIN):
        num = 0
    return Placement(
        {idx: makespans.splits[idx] for idx in sorted(order[:num])}, seconds[num], seconds[0]
    )
