"""The requests of a scheduler, and the groups of those that share one prefix."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from batchllm_operator.vllm_plugin.scheduler.output_estimates import OutputEstimates
from batchllm_operator.vllm_plugin.scheduler.pacing import Waiting
from batchllm_operator.vllm_plugin.scheduler.projection import BlockProjection, Growth

if TYPE_CHECKING:
    from vllm.v1.request import Request


def num_common_blocks(one: Sequence[Any], other: Sequence[Any]) -> int:
    """Blocks that two requests begin with, by their hashes: each covers all before it."""
    num = min(len(one), len(other))
    return bisect_left(range(num), True, key=lambda place: one[place] != other[place])


@dataclass(slots=True, eq=False)
class Group:
    """The requests that share one prefix, as far as they have arrived (paper, Sec. 4.3.1).

    The blocks of the prefix are

    - being computed by `leader`, until `is_complete`: other members wait;
    - in use while a member runs (`num_running`);
    - `pinned` when the last running member has ended while others are to come (`num_left`), until
      the next one has taken them over or memory runs short;
    - reused first when no member is left to come, except those that the first waiting request
      begins with.
    """

    group_id: object
    block_hashes: Sequence[Any]
    """Hashes of the prefix's full blocks."""
    num_unseen: int
    """Members yet to arrive, by the group's announced size."""
    num_waiting: int = 0
    num_running: int = 0
    num_counted: int = 0
    """Blocks of the prefix that the projection counts; 0 if it isn't in memory."""
    counted_until: int | None = None
    """Step up to which they are counted; None, without end, while members are to come."""
    last_end: int = 0
    """Step in which the last admitted member is expected to end."""
    leader: Request | None = None
    is_complete: bool = False
    """Whether all blocks of the prefix have been computed, or are in this step."""
    pinned: list[Any] = field(default_factory=list)

    @property
    def num_blocks(self) -> int:
        """Full blocks of the prefix."""
        return len(self.block_hashes)

    @property
    def num_left(self) -> int:
        """Members yet to be admitted."""
        return self.num_unseen + self.num_waiting

    @property
    def is_over(self) -> bool:
        return self.num_left == self.num_running == 0

    def has_prefix_of(self, block_hashes: Sequence[Any]) -> bool:
        """Whether these blocks begin with the prefix; the last one's hash covers all before it."""
        num = self.num_blocks
        return block_hashes[num - 1 : num] == self.block_hashes[-1:]

    def is_ready(self, prefilled: Mapping[str, int], block_size: int) -> bool:
        """Whether a member would find the prefix in this step, or would compute it itself.

        Args:
            prefilled: tokens that requests have computed at the end of this step, by id.
        """
        leader = self.leader
        if leader is None:
            return True
        num_tokens = prefilled.get(leader.request_id, leader.num_computed_tokens)
        if num_tokens < self.num_blocks * block_size:
            return False
        self.leader, self.is_complete = None, True
        return True

    def bound_in(self, projection: BlockProjection) -> None:
        """Count the prefix up to the end of its last member only, once none is left to come."""
        if self.num_left > 0 or not self.num_counted:
            return
        begin = self.counted_until
        if begin is None:
            projection.hold(-self.num_counted, until=None)
            begin = projection.now
        projection.hold(self.num_counted, self.last_end, begin)
        self.counted_until = max(begin, self.last_end)

    def leave(self, projection: BlockProjection) -> None:
        """Count the prefix no more: no request holds it, and no pin."""
        if self.num_counted:
            projection.hold(-self.num_counted, self.counted_until)
            self.num_counted, self.counted_until, self.last_end = 0, None, 0
            self.is_complete = False


@dataclass(slots=True, eq=False)
class Member:
    """A request that waits or is admitted, and what is expected of it."""

    request: Request
    group: Group
    num_prefix_tokens: int
    estimate: int
    """Output tokens, as given or guessed."""
    estimates: OutputEstimates
    """Predicts this request's length, and learns from it."""
    share: Waiting
    """Its part of the waiting sums."""
    num_shared: int
    """Its first blocks, which are counted for its group, or for `after`."""
    growth: Growth | None = None
    """Its blocks in later steps; None while it waits."""
    begun: int = 0
    """Expected first decode step."""
    outgrown: int = 0
    """Its output's length when it last outgrew its estimate."""
    before: Member | None = None
    """The member admitted before it that it shares more than a group's prefix with, as a chat's
    turn does with the one before, while both run."""
    after: Member | None = None
    """The member whose `before` this is."""

    def growth_from(self, start: int, tokens_per_step: float, delay: int) -> Growth:
        """Its blocks if it is prefilled by step `start`, and holds them `delay` steps longer."""
        request, on_its_way = self.request, self.request.num_output_placeholders
        num_output = request.num_output_tokens + on_its_way
        longest = self.estimates.rather_long(self.estimate, request.max_tokens)
        if longest <= num_output:
            longest = self.estimates.extended(num_output, request.max_tokens)
        end = start + 1 + math.ceil((longest - num_output - 1) / tokens_per_step) + delay
        num_tokens = request.num_tokens + on_its_way
        return Growth(start, end, num_tokens, self.num_shared, tokens_per_step)

    def lend(self, num_blocks: int, projection: BlockProjection) -> None:
        """Count so many of its first blocks for others while it runs, who hold them longer."""
        assert self.growth is not None
        projection.hold(self.num_shared - num_blocks, self.growth.end)
        self.growth = self.growth._replace(num_shared_blocks=num_blocks)
        self.num_shared = num_blocks

    def unlink(self, projection: BlockProjection) -> None:
        """It runs no more: what it counted for `before` is counted there, or for its `after`."""
        before, after = self.before, self.after
        if before is not None:
            num_left = min(before.num_shared, self.num_shared) if after is not None else 0
            before.lend(max(num_left, before.group.num_blocks), projection)
            before.after = after
        if after is not None:
            after.before = before
        self.before, self.after, self.num_shared = None, None, self.group.num_blocks

    def learn(self) -> None:
        """Let the estimates learn from the output's length."""
        num_tokens = self.request.num_output_tokens
        self.estimates.learn(self.estimate, num_tokens, self.outgrown)
        self.outgrown = num_tokens
