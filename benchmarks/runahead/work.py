"""What replicas are given: prompts that any process can make, and who has which in a policy."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

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


class ReplicaWork(NamedTuple):
    """What one replica does in a run: first its share of the chains, then its members."""

    chained: list[tuple[int, Split]]
    """Groups, and the tokens of each replica's chunk; the same for all replicas."""
    members: list[tuple[int, int]]
    """(group, member), in order."""


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
    chained = [] if split is None else [(group, split) for group in spread]
    works = [ReplicaWork(chained, []) for _ in range(num_replicas)]
    for group in spread:
        for member in range(sizes.members):
            works[member % num_replicas].members.append((group, member))
    whole = [group for group in range(num_groups) if group not in spread]
    for position, group in enumerate(whole):
        members = [(group, member) for member in range(sizes.members)]
        works[position % num_replicas].members.extend(members)
    return works
