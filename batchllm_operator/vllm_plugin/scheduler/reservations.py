"""Who waits, who runs, and the KV blocks that each request and each prefix holds in later steps."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

from batchllm_operator.vllm_plugin.scheduler.groups import Group, Member, num_common_blocks
from batchllm_operator.vllm_plugin.scheduler.hints import RequestHints
from batchllm_operator.vllm_plugin.scheduler.output_estimates import OutputEstimates
from batchllm_operator.vllm_plugin.scheduler.pacing import AverageRequest, Waiting
from batchllm_operator.vllm_plugin.scheduler.projection import BlockProjection, Growth

if TYPE_CHECKING:
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.request import Request

_GUESSED_OUTPUT: Final = 256  # tokens, without an estimate
_GUESS_REQUESTS: Final = 2  # weight of the guess, in finished requests
_RECOUNT_STEPS: Final = 64
_SPEED_STEPS: Final = 8  # weight of the first guess of speed, in steps of one token each


class Reservations:
    """All requests of a scheduler, and blocks that are reserved for those that are admitted.

    The projection counts the steps. vLLM's `Request` isn't changed here; prefixes are pinned in
    its block pool.

    Args:
        scheduler: vLLM's, with its KV cache.
        num_requests: requests that will come in all; None if unknown.
    """

    def __init__(self, scheduler: Scheduler, num_requests: int | None) -> None:
        self._manager, self._size = scheduler.kv_cache_manager, scheduler.block_size
        self._pool = self._manager.block_pool
        # After its last step, a request holds its blocks for another one.
        self._delay = 1 if scheduler.scheduler_config.async_scheduling else 0
        self._has_drafts = scheduler.num_spec_tokens > 0
        self.projection = BlockProjection(self._size)
        self._given = OutputEstimates()
        self._guessed = OutputEstimates(_GUESS_REQUESTS)
        self._entries: dict[str, Member] = {}
        self._groups: dict[object, Group] = {}
        self._pinned: dict[object, Group] = {}
        self._latest: Group | None = None
        self._last: Member | None = None  # admitted, of those that run
        self._newest: Request | None = None  # of those added
        self._ends: defaultdict[int, list[Member]] = defaultdict(list)
        self._waiting = Waiting()
        self._num_to_come = num_requests or 0
        self._num_steps, self._num_tokens = _SPEED_STEPS, _SPEED_STEPS

    @property
    def num_left(self) -> int:
        """Requests that wait or are still to come."""
        return self._waiting.num_requests + self._num_to_come

    @property
    def num_pinned_blocks(self) -> int:
        """Blocks that nothing but a pin holds."""
        return sum(len(group.pinned) for group in self._pinned.values())

    def average_waiting(self) -> AverageRequest | None:
        """The average of the requests that wait; None if none does."""
        if not self._waiting.num_requests:
            return None
        share = self._waiting.num_guessed / self._waiting.num_requests
        scale = share * self._guessed.scale + (1 - share) * self._given.scale
        return self._waiting.average(scale, self._size, self._speed)

    # One request.

    def add(self, request: Request) -> None:
        """Add a request that waits.

        Raises:
            SpecError: its hints aren't valid. Nothing has changed then.
        """
        hints = RequestHints.of(request)
        group = self._join(request, hints) if hints is not None else None
        if hints is None or group is None:  # it shares nothing, despite its hints
            hints = replace(hints or RequestHints(0), num_prefix_tokens=0, group_size=1)
            group = Group(("alone", request.request_id), (), num_unseen=1)
            self._groups[group.group_id] = group
        group.num_unseen = max(group.num_unseen - 1, 0)  # there may be more than announced
        group.num_waiting += 1
        is_guess = hints.num_output_tokens is None
        estimate = min(hints.num_output_tokens or _GUESSED_OUTPUT, request.max_tokens)
        newest, self._newest, num_shared = self._newest, request, group.num_blocks
        if num_shared and newest is not None:
            num_common = num_common_blocks(newest.block_hashes, request.block_hashes)
            num_shared = max(num_shared, num_common)
        part = group.num_blocks / hints.group_size
        num_blocks = request.num_prompt_tokens / self._size - num_shared + part
        share = Waiting.of_request(num_blocks, estimate, self._size, is_guess=is_guess)
        estimates = self._guessed if is_guess else self._given
        self._entries[request.request_id] = Member(
            *(request, group, hints.num_prefix_tokens, estimate, estimates, share),
            num_shared=group.num_blocks,
        )
        self._num_to_come = max(0, self._num_to_come - 1)
        self._waiting = self._waiting.plus(share)

    def _join(self, request: Request, hints: RequestHints) -> Group | None:
        """The group that the hints name; None if the request can't share its prefix."""
        if not self._manager.enable_caching or request.skip_reading_prefix_cache:
            return None
        num_shared = min(hints.num_prefix_tokens, request.num_prompt_tokens - 1) // self._size
        prefix = request.block_hashes[: max(num_shared, 0)]
        group = self._groups.get(hints.group_id)
        if group is None:
            group = Group(hints.group_id, list(prefix), num_unseen=hints.group_size)
            self._groups[hints.group_id] = group
        return group if group.has_prefix_of(prefix) else None

    def may_begin(self, request: Request, prefilled: Mapping[str, int]) -> bool:
        """Whether its group's prefix holds a request up in this step; see `Group.is_ready`."""
        return self._entries[request.request_id].group.is_ready(prefilled, self._size)

    def num_to_prefill(self, request: Request) -> int:
        """Tokens of a waiting request without KV in the cache."""
        entry = self._entries[request.request_id]
        group, (before, num_common) = entry.group, self._before(entry)
        num_found = group.num_blocks - self._num_new_blocks(group)
        if group.num_counted and not group.is_complete:
            num_found = 0  # its leader went before the end of the prefix
        if before is not None:
            num_computed = before.request.num_computed_tokens // self._size
            num_found = max(num_found, min(num_common, num_computed))
        return request.num_tokens - num_found * self._size

    def num_prefix_tokens(self, request: Request) -> int:
        """Tokens that it shares with its group."""
        return self._entries[request.request_id].num_prefix_tokens

    def computed_work(self, request: Request) -> int:
        """Tokens that a running request would have to compute again after a preemption."""
        group = self._entries[request.request_id].group
        shared = group.num_blocks * self._size if group.num_running > 1 else 0
        return max(request.num_computed_tokens - shared, 0)

    def growth_of(self, request: Request, start: int) -> Growth:
        """Its blocks if it is prefilled by step `start`."""
        return self._entries[request.request_id].growth_from(start, self._speed, self._delay)

    def peak_with(self, request: Request, growth: Growth) -> int:
        """Peak of blocks in use from now on, if a waiting request has this growth."""
        entry = self._entries[request.request_id]
        before, num_common = self._before(entry)
        if before is None:
            return self.projection.peak_with(growth, self._num_new_blocks(entry.group))
        num_counted = before.num_shared
        before.lend(num_common, self.projection)
        peak = self.projection.peak_with(growth, self._num_new_blocks(entry.group))
        before.lend(num_counted, self.projection)
        return peak

    def admit(self, request: Request, growth: Growth) -> None:
        """Reserve blocks for a waiting request."""
        entry = self._entries[request.request_id]
        group, (before, num_common) = entry.group, self._before(entry)
        if before is not None:
            before.lend(num_common, self.projection)
            before.after, entry.before = entry, before
        self._last = entry
        if not group.num_counted and group.num_blocks:
            group.num_counted = self._num_new_blocks(group)
            self.projection.hold(group.num_counted, until=None)
            self._latest = group
        if group.num_blocks and not group.is_complete:
            group.leader = entry.request
        group.num_running += 1
        group.num_waiting -= 1
        self._waiting = self._waiting.plus(entry.share, -1)
        self._count(entry, growth)
        group.bound_in(self.projection)

    def move(self, request: Request, start: int) -> None:
        """Reserve an admitted request's blocks afresh: it will be prefilled by step `start`."""
        entry = self._entries[request.request_id]
        assert entry.growth is not None
        if entry.growth.start == self.projection.now and not request.is_prefill_chunk:
            return  # this step prefills it, as expected
        self.projection.add(entry.growth, sign=-1)
        self._count(entry, self.growth_of(request, start))
        entry.group.bound_in(self.projection)

    def requeue(self, request: Request) -> bool:
        """Give an admitted request's blocks back: it waits again. False if it has waited before."""
        entry = self._entries[request.request_id]
        if entry.growth is None:
            return False
        self._release(entry)
        entry.group.num_waiting += 1
        self._waiting = self._waiting.plus(entry.share)
        if entry.group.num_running == 0 and not entry.group.pinned:
            entry.group.leave(self.projection)
        return True

    def finish(self, request: Request, next_one: Request | None, *, aborted: bool) -> None:
        """Remove a request, waiting or admitted, that still holds its blocks.

        What the first waiting one (`next_one`) begins with stays cached. An `aborted` output
        teaches nothing.
        """
        entry = self._entries.pop(request.request_id)
        group = entry.group
        if entry.growth is None:
            self._waiting = self._waiting.plus(entry.share, -1)
            group.num_waiting -= 1
            if group.is_over:
                self._unpin(group)
            else:
                group.bound_in(self.projection)
        else:
            if not aborted:
                entry.learn()
                num_steps = self.projection.now - entry.begun
                if self._has_drafts and num_steps > 0:
                    self._num_steps += num_steps
                    self._num_tokens += max(num_steps, request.num_output_tokens)
            self._release(entry)
            if group.num_running == 0:
                if group.num_left > 0:
                    self._pin(group, request)
                if not group.pinned:
                    group.leave(self.projection)
                    self._reuse_first(group, request, next_one)
        if group.is_over:
            del self._groups[group.group_id]
        if not self._entries:
            self.unpin_all()
            self._groups.clear()
            self._latest = self._newest = None

    # All requests.

    def advance(self, step: int, prefilling: Mapping[str, Request]) -> None:
        """Move to a step, and extend running requests that should have ended by now."""
        self.projection.now = step
        for entry in self._ends.pop(step, ()):
            if entry.growth is not None and entry.growth.end <= step:
                if entry.request.request_id not in prefilling:
                    entry.learn()
                self.move(entry.request, max(step, entry.growth.start))
        if step % _RECOUNT_STEPS == 0:
            self._recount()

    def _recount(self) -> None:
        """Count everything again with the current estimates; steps may also have been missed."""
        self.projection.clear()
        self._ends.clear()
        starts = [(each, each.growth.start) for each in self._entries.values() if each.growth]
        for entry, _ in starts:
            entry.group.last_end = 0
        for entry, start in starts:
            self._count(entry, self.growth_of(entry.request, max(self.projection.now, start)))
        for group in self._groups.values():
            if group.num_counted and group.counted_until is not None:
                group.counted_until = group.last_end
            self.projection.hold(group.num_counted, group.counted_until)

    def unpin_taken_over(self) -> None:
        """Unpin the prefixes of groups in which a member runs again."""
        for group in [pinned for pinned in self._pinned.values() if pinned.num_running > 0]:
            self._unpin(group)

    def unpin_all(self, but: Request | None = None) -> None:
        """Unpin all prefixes, or all but that of one request."""
        kept = self._entries[but.request_id].group if but is not None else None
        for group in [pinned for pinned in self._pinned.values() if pinned is not kept]:
            self._unpin(group)

    # Blocks of a request.

    @property
    def _speed(self) -> float:
        """Tokens per step of a decoding request."""
        return self._num_tokens / self._num_steps if self._has_drafts else 1.0

    def _count(self, entry: Member, growth: Growth) -> None:
        """Count a request's blocks in the projection, which doesn't have them."""
        if entry.growth is None or entry.growth.start > self.projection.now:
            entry.begun = growth.start
        entry.growth = growth
        self.projection.add(growth)
        self._ends[growth.end].append(entry)
        entry.group.last_end = max(entry.group.last_end, growth.end)

    def _release(self, entry: Member) -> None:
        """Count an admitted request's blocks no more; it doesn't run."""
        assert entry.growth is not None
        self.projection.add(entry.growth, sign=-1)
        entry.growth = None
        entry.group.num_running -= 1
        if entry.group.leader is entry.request:
            entry.group.leader = None
        if self._last is entry:
            self._last = entry.before
        entry.unlink(self.projection)

    # Blocks that a request shares with the one before.

    def _before(self, entry: Member) -> tuple[Member | None, int]:
        """The member admitted last, and the blocks in common, if others don't count them all."""
        last = self._last
        if last is None or not entry.group.num_blocks:
            return None, 0
        num_common = num_common_blocks(last.request.block_hashes, entry.request.block_hashes)
        return (last, num_common) if num_common > last.num_shared else (None, 0)

    # Blocks of a prefix.

    def _num_new_blocks(self, group: Group) -> int:
        """Blocks of the prefix that a member would bring into memory."""
        if group.num_counted:
            return 0
        latest = self._latest.block_hashes if self._latest and self._latest.num_counted else ()
        return group.num_blocks - num_common_blocks(latest, group.block_hashes)

    def _pin(self, group: Group, request: Request) -> None:
        num_computed = request.num_computed_tokens // self._size
        blocks = self._blocks(request, 0, min(group.num_blocks, num_computed))
        if blocks:
            self._pool.touch(blocks)
            group.pinned = blocks
            self._pinned[group.group_id] = group

    def _unpin(self, group: Group) -> None:
        if group.pinned:
            self._pool.free_blocks(reversed(group.pinned))
            group.pinned = []
            del self._pinned[group.group_id]
        if group.num_running == 0:
            group.leave(self.projection)

    def _reuse_first(self, group: Group, request: Request, next_one: Request | None) -> None:
        """Evict the prefix from the cache: vLLM reuses blocks that aren't cached first."""
        kept = num_common_blocks(group.block_hashes, next_one.block_hashes) if next_one else 0
        blocks = self._blocks(request, kept, group.num_blocks)
        self._pool.evict_blocks({block.block_id for block in blocks if block.ref_cnt == 1})

    def _blocks(self, request: Request, begin: int, end: int) -> list[Any]:
        """A request's blocks [begin, end) in all KV cache groups."""
        by_kv_group = self._manager.get_blocks(request.request_id).blocks
        return [block for blocks in by_kv_group for block in blocks[begin:end] if not block.is_null]
