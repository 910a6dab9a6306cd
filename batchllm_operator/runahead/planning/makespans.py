"""Predicts makespans of groups that are placed whole, recomputed everywhere or chained.

A group is *whole* if one replica computes its prefix and has all its members, and *spread* if its
members are on all replicas: then each of them computes the prefix, or a chain of all does. The
makespan is the time of the chains, one after the other on all replicas, plus that of the slowest
replica, which is, as in `planner.cost.roofline`,

    prefill_s + max(decode tokens * s per token, steps * weights_s) + KV reads + steps * overhead

where steps is its longest output, or decode tokens / `max_num_seqs` if that is more. Whole groups
go to the replica with the least load so far, longest first.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from typing import Final

from batchllm_operator.errors import PlanError
from batchllm_operator.runahead.planning.chain import Chain, Split
from batchllm_operator.runahead.planning.replica_cost import ReplicaCost
from batchllm_operator.runahead.planning.split_table import SplitTable

_MOST_SPREAD: Final = 64
"""Most groups that may be spread, those with the longest prefixes; the others stay whole."""
_MOST_APART: Final = 128
"""Most groups that are placed one by one, those with the most work; the others form lumps."""
_LUMPS_PER_REPLICA: Final = 8
_MOST_SEARCHED: Final = 8
"""Most prefix lengths for which splits are searched: a search may take 0.3 s."""


@dataclass(frozen=True, slots=True)
class GroupLoad:
    """The numbers of a group that its placement depends on; members are assumed to be equal.

    Raises:
        PlanError: a count is below its least.
    """

    prefix_tokens: int
    num_members: int
    distinct_tokens: int
    """Of each member after the prefix; at least 0."""
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
    """Least share by which a chain must shorten the best makespan without one."""
    slack: float = 0.02
    """Share by which the makespan may exceed the shortest to use fewer chains:
    several in a row take longer than predicted, and the last ones' savings may be noise."""
    min_prefix_tokens: int = 0
    """Shorter prefixes are never computed by a chain."""
    max_num_seqs: int = 1024
    """Most requests that run at a time on a replica."""

    def __post_init__(self) -> None:
        if self.num_replicas < 1 or self.max_num_seqs < 1 or self.min_prefix_tokens < 0:
            raise PlanError(f"placement: a count is out of its range: {self}")
        for name in ("margin", "slack"):
            if not 0 <= getattr(self, name) < 1:
                raise PlanError(
                    f"placement: {name} is a share from 0 and below 1, not {getattr(self, name)}"
                )


@dataclass(frozen=True, slots=True)
class _ReplicaLoad:
    """Work of a replica; its decode time depends on all of it."""

    prefill_s: float = 0.0
    decode_tokens: int = 0
    read_tokens: float = 0.0
    """Tokens whose KV decoding reads, summed over decoded tokens."""
    longest_output: int = 0

    def __add__(self, other: _ReplicaLoad) -> _ReplicaLoad:
        return _ReplicaLoad(
            self.prefill_s + other.prefill_s,
            self.decode_tokens + other.decode_tokens,
            self.read_tokens + other.read_tokens,
            max(self.longest_output, other.longest_output),
        )

    def seconds(self, cost: ReplicaCost, max_num_seqs: int) -> float:
        """Seconds until all is done."""
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


class Makespans:
    """Makespans of groups on equal replicas; caches what all placements have in common.

    Args:
        groups: all groups on the replicas.

    Attributes:
        candidates: groups that may be spread, ascending, at most 64.
        splits: by group, of those that a chain can compute.
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
        self._prefixes = [_ReplicaLoad(_prefix_s(chain, each.prefix_tokens)) for each in groups]
        whole = [
            prefix + self._members(group, group.num_members)
            for prefix, group in zip(self._prefixes, groups, strict=True)
        ]
        self._num_on = [
            [group.num_members // p + (at < group.num_members % p) for at in range(p)]
            for group in groups
        ]
        self._members_on = [
            [self._members(group, num) for num in nums]
            for group, nums in zip(groups, self._num_on, strict=True)
        ]
        self._whole = self._longest_first(whole)

    def makespan(self, spread: Iterable[int], *, chained: bool = True) -> float:
        """Seconds if these candidates are spread over all replicas and all others are whole."""
        idxs = set(spread)
        loads = self._loads_of_spread(idxs, chained)
        seconds = [self._seconds(load) for load in loads]
        for idx, whole in self._whole:
            if idx not in idxs:
                at = min(range(len(loads)), key=seconds.__getitem__)
                loads[at] = loads[at] + whole
                seconds[at] = self._seconds(loads[at])
        return max(seconds) + (sum(self._chain_s[idx] for idx in idxs) if chained else 0.0)

    def makespan_of_all_recomputed(self) -> float:
        """Seconds if every replica computes every prefix, also of groups that aren't candidates."""
        loads = self._loads_of_spread(range(len(self._prefixes)), chained=False)
        return max(map(self._seconds, loads))

    def _loads_of_spread(self, idxs: Iterable[int], chained: bool) -> list[_ReplicaLoad]:
        """Each replica's load from spread groups."""
        loads = [_ReplicaLoad()] * self._settings.num_replicas
        for turn, idx in enumerate(sorted(idxs)):
            for at in range(len(loads)):
                share = (at - turn) % len(loads)  # odd members go to other replicas each time
                loads[at] = loads[at] + self._members_on[idx][share]
                if not chained and self._num_on[idx][share]:
                    loads[at] = loads[at] + self._prefixes[idx]
        return loads

    def _longest_first(self, whole: Sequence[_ReplicaLoad]) -> list[tuple[int, _ReplicaLoad]]:
        """Whole groups in the order of placement; the short ones of many form lumps.

        A lump has the index -1. Lumps bound the time of a placement; short groups even out on any
        replica.
        """
        lone_s = [self._seconds(load) for load in whole]
        order = sorted(range(len(whole)), key=lambda idx: (-lone_s[idx], idx))
        apart = {*self.candidates, *order[:_MOST_APART]}
        lumps = [_ReplicaLoad()] * (_LUMPS_PER_REPLICA * self._settings.num_replicas)
        for at, idx in enumerate(idx for idx in order if idx not in apart):
            lumps[at % len(lumps)] = lumps[at % len(lumps)] + whole[idx]
        found = [(idx, whole[idx]) for idx in order if idx in apart]
        found += [(-1, lump) for lump in lumps if lump != _ReplicaLoad()]
        return sorted(found, key=lambda each: -self._seconds(each[1]))

    def _find_splits(self, groups: Sequence[GroupLoad], chain: Chain) -> None:
        """Search the candidates' splits, and the time until all replicas have the prefix."""
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

    def _members(self, group: GroupLoad, num_members: int) -> _ReplicaLoad:
        """Work of some members of a group, without their prefix."""
        if num_members == 0:
            return _ReplicaLoad()
        context = group.prefix_tokens + group.distinct_tokens + (group.output_tokens + 1) / 2
        return _ReplicaLoad(
            num_members * self._member_s(group),
            num_members * group.output_tokens,
            num_members * group.output_tokens * context,
            group.output_tokens,
        )

    def _member_s(self, group: GroupLoad) -> float:
        """Seconds to prefill a member's own tokens, in full steps."""
        cost, own = self._cost, group.distinct_tokens
        matrices_s = own * (cost.qkv_s_per_token + cost.other_s_per_token)
        attention_s = cost.pairs(own, group.prefix_tokens) * cost.s_per_pair
        return cost.num_layers * (matrices_s + attention_s)

    def _seconds(self, load: _ReplicaLoad) -> float:
        return load.seconds(self._cost, self._settings.max_num_seqs)


def _prefix_s(chain: Chain, num_tokens: int) -> float:
    """Seconds to prefill a prefix on one replica; a partial step is shared with other groups."""
    cost, most = chain.cost, chain.max_step_tokens
    if most is None or num_tokens >= most:
        return cost.prefill_seconds(num_tokens, max_step_tokens=most)
    matrices_s = num_tokens * (cost.qkv_s_per_token + cost.other_s_per_token)
    layer_s = matrices_s + cost.pairs(num_tokens) * cost.s_per_pair
    step_s = cost.step_overhead_s + cost.sampled_token_s
    return cost.num_layers * layer_s + num_tokens / most * step_s


def _can_be_split(chain: Chain, num_tokens: int, num_replicas: int) -> bool:
    """Whether a prefix is neither too short for all replicas nor too long for a step of each."""
    try:
        chain.check_length(num_tokens, num_replicas)
    except PlanError:
        return False
    return True


def _searched_splits(chain: Chain, lengths: Sequence[int], num_replicas: int) -> dict[int, Split]:
    """Splits by length, ascending; of many lengths, some are interpolated."""
    some = lengths
    if len(lengths) > _MOST_SEARCHED:
        last = len(lengths) - 1
        some = [lengths[at * last // (_MOST_SEARCHED - 1)] for at in range(_MOST_SEARCHED)]
    if not some:
        return {}
    table = SplitTable.search(chain, some, num_replicas, until="whole_prefix")
    return {length: table.split(length) for length in lengths}
