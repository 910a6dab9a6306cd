"""Which groups are computed by a chain of all replicas: the prediction behind the choice.

A group can be placed in three ways on p replicas:

    whole_group  one replica computes the prefix and has all members
    recompute    every replica computes the prefix, and the members are spread over all
    runahead     a chain of all replicas computes the prefix, and the members are spread

The makespan of a placement is that of its chains, one after the other while all replicas take part,
and then that of the slowest replica, whose time is, as in `planner.cost`,

    prefill_s + max(decode tokens * s per token, steps * weights_s) + KV reads + steps * overhead

with as many steps as its longest output, or as its places for requests make necessary, if that is
more. Whole groups go to the replica with the least load so far, those that take longest first.

A chain saves at most T_prefix * (1 - 1/p) for its group, and every replica has to work on it. So
it pays where replicas would idle: fewer groups than replicas, the uneven rest, a giant group.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, fields
from itertools import combinations
from typing import Final, Literal

from batchllm_operator.errors import PlanError
from batchllm_operator.planner.runahead.chain import Chain, Split
from batchllm_operator.planner.runahead.replica_cost import ReplicaCost
from batchllm_operator.planner.runahead.split_table import SplitTable

PlacementName = Literal["whole_group", "recompute", "runahead"]
_MOST_EXACT: Final = 10
"""Up to so many groups, every subset is looked at."""
_MOST_SPREAD: Final = 64
"""Of more groups, so many with the longest prefixes may be spread; the others stay whole."""
_MOST_SWAPPED: Final = 16
"""Of up to so many that may be spread, sets are also changed by one for another."""
_MOST_APART: Final = 128
"""Of more groups, so many with the most work are placed one by one, the others in lumps."""
_LUMPS_PER_REPLICA: Final = 8
_MOST_SEARCHED: Final = 8
"""Of more lengths of prefixes, so many are searched a split for: a search may take 0.3 s."""


@dataclass(frozen=True, slots=True)
class GroupLoad:
    """A group, as far as its placement depends on it; members are taken to be alike.

    Raises:
        PlanError: a count is below its least.
    """

    prefix_tokens: int
    num_members: int
    distinct_tokens: int
    """Of each member besides the prefix; 0 at least."""
    output_tokens: int
    """Of each member."""

    def __post_init__(self) -> None:
        for field, least in zip(fields(self), (1, 1, 0, 0), strict=True):
            value = getattr(self, field.name)
            if value < least:
                raise PlanError(f"group: {field.name} must be at least {least}, not {value}")


@dataclass(frozen=True, slots=True)
class PlacementSettings:
    """When a group is marked for runahead.

    Raises:
        PlanError: a value is out of its range.
    """

    num_replicas: int
    margin: float = 0.05
    """By what share the makespan must be shorter than the best without runahead."""
    min_prefix_tokens: int = 0
    """Shorter prefixes are never computed by a chain."""
    max_num_seqs: int = 1024
    """Requests that run at a time on a replica."""

    def __post_init__(self) -> None:
        if self.num_replicas < 1 or self.max_num_seqs < 1 or self.min_prefix_tokens < 0:
            raise PlanError(f"placement: a count is out of its range: {self}")
        if not 0 <= self.margin < 1:
            raise PlanError(f"placement: margin is a share from 0 and below 1, not {self.margin}")


@dataclass(frozen=True, slots=True)
class Placement:
    """What was chosen, and what was predicted of the ways to choose from."""

    policy: PlacementName
    """`runahead` if any group is marked; else the better of the other two."""
    runahead_idxs: tuple[int, ...]
    """Groups to compute by a chain, ascending; the others are placed whole."""
    splits: tuple[Split, ...]
    """Of each group of `runahead_idxs`."""
    makespan_s: float
    """As chosen."""
    gain: float
    """Share of the best makespan without runahead that the choice saves; 0 if none is marked."""
    whole_group_s: float
    """Makespan with each group on one replica."""
    recompute_s: float
    """With each prefix computed by all replicas."""
    runahead_s: float | None
    """With all groups computed by chains; None: not all of them can be, or they are too many."""


def choose_placement(
    groups: Sequence[GroupLoad], chain: Chain, settings: PlacementSettings
) -> Placement:
    """Which groups to mark for runahead, and what that is predicted to gain.

    Looked at are all sets of groups to chain while the others are whole; of more than ten groups,
    those with the longest prefixes or the fewest members first, and what adding or dropping one
    improves. The best is compared with the best that does without chains: the same search with
    `recompute` in their place, so that it is at most as long as either policy for all.

    Args:
        groups: that share the replicas; none of them elsewhere.
        chain: replicas, links, block size and longest chunk.
        settings: number of replicas and thresholds.

    Returns:
        The choice. No group is marked with one replica, or where no split is possible.

    Raises:
        PlanError: there are no groups.
    """
    if not groups:
        raise PlanError("placement: there are no groups")
    model = _Model(groups, chain, settings)
    whole_s, recompute_s = model.makespan(()), model.makespan_of_all_spread(chained=False)
    without_s, _ = _best_set(
        groups, model.candidates, lambda idxs: model.makespan(idxs, chained=False)
    )
    without_s = min(without_s, recompute_s)
    chainable = [idx for idx in model.candidates if idx in model.splits]
    best_s, marked = _best_set(groups, chainable, model.makespan)
    runahead_s = None
    if len(chainable) == len(groups):
        runahead_s = model.makespan_of_all_spread(chained=True)
    if not marked or best_s > without_s * (1 - settings.margin):
        policy: PlacementName = "recompute" if recompute_s < whole_s else "whole_group"
        marked, best_s, gain = (), min(whole_s, recompute_s), 0.0
    else:
        policy, gain = "runahead", 1 - best_s / without_s
    return Placement(
        policy=policy,
        runahead_idxs=marked,
        splits=tuple(model.splits[idx] for idx in marked),
        makespan_s=best_s,
        gain=gain,
        whole_group_s=whole_s,
        recompute_s=recompute_s,
        runahead_s=runahead_s,
    )


@dataclass(frozen=True, slots=True)
class _Load:
    """Work of a replica; what its decoding takes depends on all of it."""

    prefill_s: float = 0.0
    decode_tokens: int = 0
    read_tokens: float = 0.0
    """KV that decoding reads, summed over its tokens."""
    longest_output: int = 0

    def __add__(self, other: _Load) -> _Load:
        return _Load(
            self.prefill_s + other.prefill_s,
            self.decode_tokens + other.decode_tokens,
            self.read_tokens + other.read_tokens,
            max(self.longest_output, other.longest_output),
        )

    def seconds(self, cost: ReplicaCost, max_num_seqs: int) -> float:
        """Until all is done."""
        steps = max(float(self.longest_output), self.decode_tokens / max_num_seqs)
        layer_s = self.decode_tokens * (cost.qkv_s_per_token + cost.other_s_per_token)
        matrices_s = max(layer_s, steps * cost.weights_s)
        layers_s = matrices_s + self.read_tokens * cost.read_s_per_token
        return (
            self.prefill_s
            + cost.num_layers * max(layers_s, steps * cost.overhead_s)
            + self.decode_tokens * cost.sampled_token_s
            + steps * cost.step_overhead_s
        )


class _Model:
    """Makespans of placements of some groups; what doesn't depend on the placement is kept.

    Attributes:
        candidates: groups that may be spread, ascending.
        splits: of those that can be computed by a chain.
    """

    def __init__(
        self, groups: Sequence[GroupLoad], chain: Chain, settings: PlacementSettings
    ) -> None:
        self._cost, self._settings, p = chain.cost, settings, settings.num_replicas
        everyone = range(len(groups))
        by_prefix = sorted(everyone, key=lambda idx: (-groups[idx].prefix_tokens, idx))
        self.candidates = sorted(by_prefix[:_MOST_SPREAD])
        self.splits: dict[int, Split] = {}
        self._chain_s: dict[int, float] = {}
        self._find_splits(groups, chain)
        self._prefixes = [
            _Load(
                chain.cost.prefill_seconds(
                    group.prefix_tokens, max_step_tokens=chain.max_step_tokens
                )
            )
            for group in groups
        ]
        whole = [
            prefix + self._members(group, group.num_members)
            for prefix, group in zip(self._prefixes, groups, strict=True)
        ]
        self._members_on = [
            [
                self._members(group, group.num_members // p + (at < group.num_members % p))
                for at in range(p)
            ]
            for group in groups
        ]
        self._whole = self._longest_first(whole)

    def makespan(self, spread: Iterable[int], *, chained: bool = True) -> float:
        """Seconds if some candidates are spread over all replicas and all others are whole."""
        idxs = set(spread)
        loads = self._loads_of_spread(idxs, chained)
        seconds = [self._seconds(load) for load in loads]
        for idx, whole in self._whole:
            if idx not in idxs:
                at = min(range(len(loads)), key=seconds.__getitem__)
                loads[at] = loads[at] + whole
                seconds[at] = self._seconds(loads[at])
        return max(seconds) + (sum(self._chain_s[idx] for idx in idxs) if chained else 0.0)

    def makespan_of_all_spread(self, *, chained: bool) -> float:
        """Seconds if all groups are spread; if `chained`, all have to have a split."""
        everyone = range(len(self._prefixes))
        chains_s = sum(self._chain_s[idx] for idx in everyone) if chained else 0.0
        return chains_s + max(map(self._seconds, self._loads_of_spread(everyone, chained)))

    def _loads_of_spread(self, idxs: Iterable[int], chained: bool) -> list[_Load]:
        """What each replica has of the groups that are spread."""
        loads = [_Load()] * self._settings.num_replicas
        for turn, idx in enumerate(sorted(idxs)):
            for at in range(len(loads)):  # odd members of several groups go to several replicas
                load = self._members_on[idx][(at - turn) % len(loads)]
                loads[at] = loads[at] + (load if chained else self._prefixes[idx] + load)
        return loads

    def _longest_first(self, whole: Sequence[_Load]) -> list[tuple[int, _Load]]:
        """Whole groups in the order in which they are placed; short ones, of many, in lumps.

        A lump has the index -1. Lumps keep the time for a placement short, however many groups
        there are; so many even out, whatever replica each of them is on.
        """
        lone_s = [self._seconds(load) for load in whole]
        order = sorted(range(len(whole)), key=lambda idx: (-lone_s[idx], idx))
        apart = {*self.candidates, *order[:_MOST_APART]}
        lumps = [_Load()] * (_LUMPS_PER_REPLICA * self._settings.num_replicas)
        for at, idx in enumerate(idx for idx in order if idx not in apart):
            lumps[at % len(lumps)] = lumps[at % len(lumps)] + whole[idx]
        found = [(idx, whole[idx]) for idx in order if idx in apart]
        found += [(-1, lump) for lump in lumps if lump != _Load()]
        return sorted(found, key=lambda each: -self._seconds(each[1]))

    def _find_splits(self, groups: Sequence[GroupLoad], chain: Chain) -> None:
        """Search the splits of candidates, and how long it takes until all replicas have all."""
        p, least = self._settings.num_replicas, self._settings.min_prefix_tokens
        possible = [
            idx
            for idx in (self.candidates if p > 1 else ())
            if groups[idx].prefix_tokens >= least
            and _can_be_split(chain, groups[idx].prefix_tokens, p)
        ]
        splits = _searched_splits(chain, sorted({groups[idx].prefix_tokens for idx in possible}), p)
        for idx in possible:
            split = splits[groups[idx].prefix_tokens]
            self.splits[idx] = split
            self._chain_s[idx] = max(chain.times(split).whole_s)

    def _members(self, group: GroupLoad, num_members: int) -> _Load:
        """Work of some members of a group, beside their prefix."""
        if num_members == 0:
            return _Load()
        context = group.prefix_tokens + group.distinct_tokens + (group.output_tokens + 1) / 2
        return _Load(
            num_members * self._member_s(group),
            num_members * group.output_tokens,
            num_members * group.output_tokens * context,
            group.output_tokens,
        )

    def _member_s(self, group: GroupLoad) -> float:
        """Seconds to prefill a member's own tokens, as part of steps that are full."""
        cost, own = self._cost, group.distinct_tokens
        matrices_s = own * (cost.qkv_s_per_token + cost.other_s_per_token)
        attention_s = cost.pairs(own, group.prefix_tokens) * cost.s_per_pair
        return cost.num_layers * (matrices_s + attention_s)

    def _seconds(self, load: _Load) -> float:
        return load.seconds(self._cost, self._settings.max_num_seqs)


def _can_be_split(chain: Chain, num_tokens: int, num_replicas: int) -> bool:
    """Whether a prefix is neither too short for the replicas nor too long for a step of each."""
    try:
        chain.check_length(num_tokens, num_replicas)
    except PlanError:
        return False
    return True


def _searched_splits(chain: Chain, lengths: Sequence[int], num_replicas: int) -> dict[int, Split]:
    """Splits by length, [num_lengths] ascending; where there are many, interpolated."""
    some = lengths
    if len(lengths) > _MOST_SEARCHED:
        last = len(lengths) - 1
        some = [lengths[at * last // (_MOST_SEARCHED - 1)] for at in range(_MOST_SEARCHED)]
    if not some:
        return {}
    table = SplitTable.search(
        chain, some, num_replicas, model="any", gpu="any", until="whole_prefix"
    )
    return {length: table.split(length) for length in lengths}


def _best_set(
    groups: Sequence[GroupLoad],
    candidates: Sequence[int],
    makespan: Callable[[Iterable[int]], float],
) -> tuple[float, tuple[int, ...]]:
    """The set of candidates to spread with the least makespan, and among equals the smallest."""
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


def _neighbours(chosen: Sequence[int], candidates: Sequence[int]) -> Iterator[list[int]]:
    """Sets with one group more, one less, or, of few candidates, one for another."""
    outside = [idx for idx in candidates if idx not in chosen]
    for idx in outside:
        yield [*chosen, idx]
    for out in chosen:
        kept = [idx for idx in chosen if idx != out]
        yield kept
        if len(candidates) <= _MOST_SWAPPED:
            for idx in outside:
                yield [*kept, idx]
