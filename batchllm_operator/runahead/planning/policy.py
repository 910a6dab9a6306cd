"""Chooses the groups that a chain of all replicas computes, by predicted makespans.

A group can be placed in three ways on p replicas (`makespans`):

    whole_group  one replica computes the prefix and has all members
    recompute    every replica computes the prefix, and the members are spread over all
    runahead     a chain of all replicas computes the prefix, and the members are spread

A chain saves at most T_prefix * (1 - 1/p) for its group, and occupies every replica. So it pays
where replicas would idle: fewer groups than replicas, an uneven rest, a giant group.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Final, Literal

from batchllm_operator.errors import PlanError
from batchllm_operator.runahead.planning.chain import Chain, Split
from batchllm_operator.runahead.planning.makespans import GroupLoad, Makespans, PlacementSettings

PlacementName = Literal["whole_group", "recompute", "runahead"]
_MOST_EXACT: Final = 10
"""Most groups for which every subset is tried."""
_MOST_SWAPPED: Final = 16
"""Most candidates for which sets also swap one group for another."""


@dataclass(frozen=True, slots=True)
class Placement:
    """The choice, and the predictions of all policies."""

    policy: PlacementName
    """`runahead` if any group is marked; else `recompute` if a prefix is computed by all replicas;
    else `whole_group`."""
    runahead_idxs: tuple[int, ...]
    """Groups to compute by a chain, ascending; the others are placed whole."""
    splits: tuple[Split, ...]
    """The split of each group of `runahead_idxs`."""
    makespan_s: float
    """Makespan of the choice."""
    whole_group_s: float
    """Makespan with each group on one replica."""
    recompute_s: float
    """Makespan with each prefix computed by all replicas."""
    without_s: float
    """The best makespan without chains: some groups whole, the others recomputed everywhere."""
    recompute_idxs: tuple[int, ...]
    """Those others, ascending: used if no group is marked, or there is no chain."""


def choose_placement(
    groups: Sequence[GroupLoad], chain: Chain, settings: PlacementSettings
) -> Placement:
    """Choose which of all groups on the replicas to mark for runahead.

    Tries all sets of groups to chain, with the others whole; of more than ten groups, the sets with
    the longest prefixes or the fewest members first, improved by adding or dropping one at a time.
    Groups that hardly shorten the makespan are dropped from the best set. The rest is compared with
    the best without chains: the same search with `recompute` in their place, so that it is never
    longer than either policy for all groups. `recompute_idxs` are the groups of that choice.

    Returns:
        The choice. No group is marked with one replica, or if no split is possible.

    Raises:
        PlanError: there are no groups.
    """
    if not groups:
        raise PlanError("placement: there are no groups")
    makespans = Makespans(groups, chain, settings)
    whole_s, recompute_s = makespans.makespan(()), makespans.makespan_of_all_recomputed()
    without_s, recomputed = _best_set(
        groups, makespans.candidates, lambda idxs: makespans.makespan(idxs, chained=False)
    )
    if recompute_s < without_s:
        without_s, recomputed = recompute_s, tuple(range(len(groups)))
    chainable = [idx for idx in makespans.candidates if idx in makespans.splits]
    best_s, marked = _best_set(groups, chainable, makespans.makespan)
    best_s, marked = _without_idle(best_s, marked, makespans, settings.slack)
    policy: PlacementName = "runahead"
    if not marked or best_s > without_s * (1 - settings.margin):
        policy = "recompute" if recomputed else "whole_group"
        marked, best_s = (), without_s
    return Placement(
        policy=policy,
        runahead_idxs=marked,
        splits=tuple(makespans.splits[idx] for idx in marked),
        makespan_s=best_s,
        whole_group_s=whole_s,
        recompute_s=recompute_s,
        without_s=without_s,
        recompute_idxs=recomputed,
    )


def _best_set(
    groups: Sequence[GroupLoad],
    candidates: Sequence[int],
    makespan: Callable[[Iterable[int]], float],
) -> tuple[float, tuple[int, ...]]:
    """The set of candidates to spread with the shortest makespan; of equal ones, the smallest."""
    if len(candidates) <= _MOST_EXACT:
        sets = (
            each for size in range(len(candidates) + 1) for each in combinations(candidates, size)
        )
        return min(((makespan(each), each) for each in sets), key=lambda each: each[0])
    by_prefix = sorted(candidates, key=lambda idx: (-groups[idx].prefix_tokens, idx))
    by_members = sorted(by_prefix, key=lambda idx: (groups[idx].num_members, idx))
    found = [
        (makespan(order[:size]), order[:size])
        for order in (by_prefix, by_members)
        for size in range(len(by_prefix) + 1)
    ]
    best_s, best = min(found, key=lambda each: each[0])
    while True:
        near = [(makespan(each), each) for each in _neighbours(best, by_prefix)]
        seconds, better = min(near, key=lambda each: each[0])
        if seconds >= best_s:
            return best_s, tuple(sorted(best))
        best_s, best = seconds, better


def _without_idle(
    best_s: float, marked: tuple[int, ...], makespans: Makespans, slack: float
) -> tuple[float, tuple[int, ...]]:
    """A set with as few groups as `slack` over the best makespan allows, and its makespan."""
    longest_s = best_s * (1 + slack)
    while marked:
        fewer = [tuple(idx for idx in marked if idx != out) for out in marked]
        seconds, smaller = min((makespans.makespan(each), each) for each in fewer)
        if seconds > longest_s:
            break
        best_s, marked = seconds, smaller
    return best_s, marked


def _neighbours(chosen: Sequence[int], candidates: Sequence[int]) -> Iterator[list[int]]:
    """Sets with one group more, one less, or, with few candidates, one swapped."""
    outside = [idx for idx in candidates if idx not in chosen]
    for idx in outside:
        yield [*chosen, idx]
    for out in chosen:
        kept = [idx for idx in chosen if idx != out]
        yield kept
        if len(candidates) <= _MOST_SWAPPED:
            for idx in outside:
                yield [*kept, idx]
