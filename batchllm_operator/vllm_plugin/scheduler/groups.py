"""Groups of requests with a common prefix, and how long its blocks live (paper, Sec. 4.3.1).

The blocks of a group's prefix are

- being computed by `leader`, until `is_complete`: other members wait;
- in use while a member runs (`num_running`);
- `pinned` when the last running member has ended while others are to come (`num_left`), until
  the next one has taken them over or memory runs short;
- reused first when no member is left to come, except those that the first waiting request begins
  with.

In the projection they are `num_counted` blocks until they are given up: without end while members
are to come, then up to `counted_until`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from batchllm_operator.vllm_plugin.scheduler.projection import BlockProjection

if TYPE_CHECKING:
    from vllm.v1.request import Request


@dataclass(slots=True, eq=False)
class Group:
    """The requests that share one prefix, as far as they have arrived."""

    group_id: object
    num_prefix_blocks: int
    """Full blocks of the prefix."""
    num_unseen: int
    """Members yet to arrive, by the group's announced size."""
    num_waiting: int = 0
    num_running: int = 0
    num_counted: int = 0
    """Blocks of the prefix that the projection counts; 0 if it isn't in memory."""
    counted_until: int | None = None
    """Step up to which they are counted; None while members are to come."""
    last_end: int = 0
    """Step in which the last admitted member is expected to end."""
    leader: Request | None = None
    """The member that computes the prefix."""
    is_complete: bool = False
    """Whether all blocks of the prefix have been computed, or are in this step."""
    block_hashes: Sequence[Any] = ()
    """Hashes of the prefix's blocks."""
    pinned: list[Any] = field(default_factory=list)

    @property
    def num_left(self) -> int:
        """Members yet to be admitted."""
        return self.num_unseen + self.num_waiting


class Groups:
    """All groups with requests that wait or run.

    Args:
        kv_cache_manager: vLLM's; blocks are pinned in its pool.
        projection: counts the blocks of prefixes.
        block_size: tokens of a block.
    """

    def __init__(self, kv_cache_manager: Any, projection: BlockProjection, block_size: int) -> None:
        self._block_size = block_size
        self._manager = kv_cache_manager
        self._pool = kv_cache_manager.block_pool
        self._projection = projection
        self._groups: dict[object, Group] = {}
        self._pinned: dict[object, Group] = {}
        self._latest: Group | None = None

    def is_pinned_beside(self, group: Group) -> bool:
        """Whether the prefix of another group is held by nothing but a pin."""
        return any(pinned is not group for pinned in self._pinned.values())

    @property
    def num_pinned_blocks(self) -> int:
        """Blocks that nothing but a pin holds."""
        return sum(len(group.pinned) for group in self._pinned.values())

    def join(self, group_id: object, prefix: Sequence[Any], size: int) -> Group | None:
        """Returns the group of a request that has arrived.

        Args:
            group_id: the request's hint.
            prefix: hashes of the blocks that it shares with its group.
            size: the group's announced size.

        Returns:
            None if the group has another prefix: the request's hint is wrong.
        """
        group = self._groups.get(group_id)
        if group is None:
            group = Group(group_id, len(prefix), num_unseen=size, block_hashes=list(prefix))
            self._groups[group_id] = group
        elif len(prefix) < group.num_prefix_blocks or (
            group.num_prefix_blocks
            and prefix[group.num_prefix_blocks - 1] != group.block_hashes[-1]
        ):
            return None
        group.num_unseen = max(group.num_unseen - 1, 0)  # there may be more than announced
        group.num_waiting += 1
        return group

    def has_prefix_for(self, group: Group, prefilled: Mapping[str, int]) -> bool:
        """Whether a member would find the prefix in this step, or would compute it itself.

        Args:
            prefilled: tokens that requests have computed at the end of this step, by id.
        """
        leader = group.leader
        if leader is None:
            return True
        num_tokens = prefilled.get(leader.request_id, leader.num_computed_tokens)
        if num_tokens < group.num_prefix_blocks * self._block_size:
            return False
        group.leader, group.is_complete = None, True
        return True

    def num_new_blocks(self, group: Group, request: Request) -> int:
        """Blocks of the prefix that a member would bring into memory."""
        if group.num_counted or not group.num_prefix_blocks:
            return 0
        if self._latest is None or not self._latest.num_counted:
            return group.num_prefix_blocks
        prefix = request.block_hashes[: group.num_prefix_blocks]
        return group.num_prefix_blocks - _num_common(self._latest.block_hashes, prefix)

    def admitted(self, group: Group, request: Request, end: int) -> None:
        """Note that a member begins to run, and is expected to end in step `end`."""
        if not group.num_counted and group.num_prefix_blocks:
            group.num_counted = self.num_new_blocks(group, request)
            group.counted_until = None
            self._projection.hold(group.num_counted, until=None)
            self._latest = group
        if group.num_prefix_blocks and not group.is_complete:
            group.leader = request
        group.num_running += 1
        group.num_waiting -= 1
        self.ends_at(group, end)

    def ends_at(self, group: Group, end: int) -> None:
        """Note that a running member is expected to end in step `end`."""
        group.last_end = max(group.last_end, end)
        if group.num_left > 0 or not group.num_counted:
            return
        begin = group.counted_until
        if begin is None:
            self._projection.hold(-group.num_counted, until=None)
            begin = self._projection.now
        self._projection.hold(group.num_counted, group.last_end, begin)
        group.counted_until = max(begin, group.last_end)

    def preempted(self, group: Group, request: Request) -> None:
        """Note that a running member has given its blocks back, and waits again."""
        group.num_waiting += 1
        self._remove_running(group, request)
        if group.num_running == 0 and not group.pinned:
            self._uncount(group)

    def finished(self, group: Group, request: Request, next_one: Request | None) -> None:
        """Remove a running member that is about to give its blocks back.

        Args:
            next_one: the first request in the queue.
        """
        self._remove_running(group, request)
        if group.num_running == 0:
            if group.num_left > 0:
                self._pin(group, request)
            if not group.pinned:
                self._uncount(group)
                self._reuse_first(group, request, next_one)
        self._drop_if_over(group)

    def _remove_running(self, group: Group, request: Request) -> None:
        group.num_running -= 1
        if group.leader is request:
            group.leader = None

    def remove_waiting(self, group: Group) -> None:
        """Remove a waiting member."""
        group.num_waiting -= 1
        if group.num_left == 0 and group.num_running == 0:
            self.unpin(group)
        elif group.num_left == 0:
            self.ends_at(group, group.last_end)
        self._drop_if_over(group)

    def unpin_taken_over(self) -> None:
        """Unpin the prefixes of groups in which a member runs again."""
        for group in [pinned for pinned in self._pinned.values() if pinned.num_running > 0]:
            self._free_pins(group)

    def unpin(self, group: Group) -> None:
        """Unpin a group's prefix."""
        self._free_pins(group)
        if group.num_running == 0:
            self._uncount(group)

    def unpin_all(self, but: Group | None = None) -> None:
        """Unpin all prefixes, or all but that of one group."""
        for group in [pinned for pinned in self._pinned.values() if pinned is not but]:
            self.unpin(group)

    def forget_all(self) -> None:
        """Drop all groups once no request waits or runs."""
        self.unpin_all()
        self._groups.clear()
        self._latest = None

    def recount(self) -> None:
        """Count all prefixes again in the cleared projection."""
        for group in self._groups.values():
            if group.num_counted and group.counted_until is not None:
                group.counted_until = group.last_end
            self._projection.hold(group.num_counted, group.counted_until)

    def _pin(self, group: Group, request: Request) -> None:
        num_computed = request.num_computed_tokens // self._block_size
        blocks = self._prefix_blocks(request, 0, min(group.num_prefix_blocks, num_computed))
        if blocks:
            self._pool.touch(blocks)
            group.pinned = blocks
            self._pinned[group.group_id] = group

    def _free_pins(self, group: Group) -> None:
        if group.pinned:
            self._pool.free_blocks(reversed(group.pinned))
            group.pinned = []
            del self._pinned[group.group_id]

    def _reuse_first(self, group: Group, request: Request, next_one: Request | None) -> None:
        """Evict the prefix from the cache: vLLM reuses blocks that aren't cached first."""
        kept = 0
        if next_one is not None:
            kept = _num_common(group.block_hashes, next_one.block_hashes)
        blocks = self._prefix_blocks(request, kept, group.num_prefix_blocks)
        self._pool.evict_blocks({block.block_id for block in blocks if block.ref_cnt == 1})

    def _uncount(self, group: Group) -> None:
        if group.num_counted:
            self._projection.hold(-group.num_counted, group.counted_until)
            group.num_counted, group.counted_until, group.last_end = 0, None, 0
            group.is_complete = False

    def _drop_if_over(self, group: Group) -> None:
        if group.num_left == 0 and group.num_running == 0:
            self._groups.pop(group.group_id, None)

    def _prefix_blocks(self, request: Request, begin: int, end: int) -> list[Any]:
        """A request's blocks [begin, end) in all KV cache groups."""
        by_kv_group = self._manager.get_blocks(request.request_id).blocks
        return [block for blocks in by_kv_group for block in blocks[begin:end] if not block.is_null]


def _num_common(one: Sequence[Any], other: Sequence[Any]) -> int:
    """Length of the common prefix of two sequences."""
    for count, (left, right) in enumerate(zip(one, other, strict=False)):
        if left != right:
            return count
    return min(len(one), len(other))
