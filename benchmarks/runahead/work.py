"""What replicas are given: prompts that any process can make, and who has which in a policy."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

# Not the planner's, which a replica mustn't import: vLLM 0.32 on a CPU doesn't start beside numba.
Split = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Sizes:
    """Of the groups, which are all alike; lengths in tokens."""

    prefix: int = 4096
    members: int = 8
    distinct: int = 32
    """Of each member."""
    output: int = 16
    """Of each member."""
    vocabulary: int = 512
    seed: int = 0

    @property
    def max_model_len(self) -> int:
        """Most tokens of a prompt and its output."""
        return self.prefix + self.distinct + self.output

    def prefix_tokens(self, group: int) -> list[int]:
        """The prefix of a group."""
        return self._tokens(self.prefix, group)

    def prompt(self, group: int, member: int) -> list[int]:
        """The prompt of a member."""
        return [*self.prefix_tokens(group), *self._tokens(self.distinct, group, 1 + member)]

    def _tokens(self, count: int, *key: int) -> list[int]:
        generator = np.random.default_rng([self.seed, *key])
        found: list[int] = generator.integers(3, self.vocabulary, count).tolist()
        return found


@dataclass(frozen=True, slots=True)
class ReplicaWork:
    """What one replica does in a run: first its share of the chains, then its members."""

    chained: tuple[tuple[int, Split], ...] = ()
    """Groups, and the tokens of each replica's chunk; the same for all replicas."""
    members: tuple[tuple[int, int], ...] = ()
    """(group, member), in order."""

    def to_json(self) -> dict[str, Any]:
        """Plain JSON."""
        return {"chained": self.chained, "members": self.members}

    @classmethod
    def from_json(cls, fields: Mapping[str, Any]) -> ReplicaWork:
        """What `to_json` made."""
        return cls(
            tuple((group, tuple(split)) for group, split in fields["chained"]),
            tuple((group, member) for group, member in fields["members"]),
        )


def place(
    sizes: Sizes, num_groups: int, num_replicas: int, *, spread: Sequence[int], split: Split | None
) -> list[ReplicaWork]:
    """Who does what: some groups spread over all replicas, the others whole, one after another.

    Args:
        sizes: of the groups.
        num_groups: groups 0 to `num_groups` - 1.
        num_replicas: that share them.
        spread: groups whose members are spread.
        split: how a chain computes each prefix of those; None: every replica computes it.
    """
    works = [ReplicaWork() for _ in range(num_replicas)]
    if split is not None:
        chained = tuple((group, split) for group in spread)
        works = [replace(work, chained=chained) for work in works]

    def give(rank: int, group: int, members: Sequence[int]) -> None:
        given = tuple((group, member) for member in members)
        works[rank] = replace(works[rank], members=works[rank].members + given)

    for group in spread:
        for rank in range(num_replicas):
            give(rank, group, range(rank, sizes.members, num_replicas))
    whole = [group for group in range(num_groups) if group not in spread]
    for position, group in enumerate(whole):
        give(position % num_replicas, group, range(sizes.members))
    return works
