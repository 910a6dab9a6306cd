"""KV-Runahead in vLLM's scheduler: decides what each step loads and sends."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorMetadata

from batchllm_operator.errors import SpecError
from batchllm_operator.vllm_plugin.runahead.chain import Way
from batchllm_operator.vllm_plugin.runahead.links import Extent
from batchllm_operator.vllm_plugin.runahead.plan import (
    ChainLimits,
    ChainSettings,
    Part,
    RunaheadShare,
    ShareBounds,
)


@dataclass(frozen=True, slots=True)
class StepLoad:
    """A load that begins in a step."""

    request_id: str
    way: Way
    extent: Extent
    num_blocks: int
    """Blocks of a message."""
    block_ids: Sequence[int]
    """Blocks to write: those for the last of `num_blocks`."""
    is_waited_for: bool
    """Whether the step's attention waits for it, layer by layer."""
    is_reported: bool
    """Whether the scheduler holds the request back until the worker reports it as done."""
    passed_on: StepSend | None = None
    """Sent on up the chain with each layer that arrives."""


@dataclass(frozen=True, slots=True)
class StepSend:
    """KV of a group, sent layer by layer."""

    request_id: str
    way: Way
    extent: Extent
    block_ids: Sequence[int]


@dataclass
class RunaheadMetadata(KVConnectorMetadata):
    """The worker's transfers of a step."""

    loads: list[StepLoad] = field(default_factory=list)
    sends: list[StepSend] = field(default_factory=list)
    failure: str | None = None
    """Why the chain must end."""


@dataclass(slots=True)
class _Tracked:
    """A request of ours between its admission and its end."""

    share: RunaheadShare
    bounds: ShareBounds
    block_ids: list[int] = field(default_factory=list)
    is_loading: bool = False
    sends: bool = False
    is_through: bool = False
    """Whether the worker has been given all of its sends."""


class RunaheadConnectorScheduler:
    """The half in the scheduler: decides what each step loads and sends."""

    def __init__(self, settings: ChainSettings, limits: ChainLimits) -> None:
        self._settings, self.limits = settings, limits
        self._num_local: dict[str, int] = {}
        self._tracked: dict[str, _Tracked] = {}
        self._next = RunaheadMetadata()
        self._allocated: set[str] = set()
        self._fills_due: deque[int] = deque()
        self.num_computed: dict[tuple[int, Part], int] = {}
        """Tokens scheduled for computation, by group and part. The reader removes them."""
        self.num_received: dict[tuple[int, Part], int] = {}
        """Tokens whose KV was to be received, likewise."""
        self.num_step_tokens = 0
        """Tokens that the latest step computes, of all requests."""

    def match(self, request: Any, num_local_tokens: int) -> tuple[int | None, bool]:
        """Match a request with KV from other replicas.

        A link carries one group after the other. So a step has at most one chunk, and fills begin
        in the order of their chunks. Where vLLM schedules ahead, a chunk also waits for the end of
        the previous one: its blocks in the prefix cache may turn out to be empty, and what another
        request computes from them would stay in the cache.

        Returns:
            Tokens to receive beyond those cached here, None if that isn't known yet; and whether
            the request waits for them outside of steps.

        Raises:
            SpecError: this replica can't take the request's share.
        """
        share = RunaheadShare.from_params(request.kv_transfer_params)
        if share is None or request.request_id in self._tracked:
            return 0, False  # after a preemption: the received KV is gone
        bounds = self._check(request, share)
        if share.part == "chunk":
            if any(tracked.share.part == "chunk" for tracked in self._tracked.values()):
                return None, False
            self._num_local[request.request_id] = num_local_tokens
            return max(bounds.begin - num_local_tokens, 0), False
        if not self._may_fill(share, num_local_tokens):
            return None, False
        self._num_local[request.request_id] = num_local_tokens
        begin, end = bounds.received
        if begin <= num_local_tokens < end:
            return end - num_local_tokens, True
        return 0, False

    def on_blocks(self, request: Any, block_ids: Sequence[int], num_external_tokens: int) -> None:
        """Note all blocks that a request has so far."""
        request_id = request.request_id
        tracked = self._tracked.get(request_id)
        if tracked is not None:
            tracked.block_ids = list(block_ids)
            self._allocated.add(request_id)
            return
        num_local = self._num_local.pop(request_id, None)
        share = RunaheadShare.from_params(request.kv_transfer_params)
        if share is None or num_local is None:
            return
        bounds = share.bounds(self._settings.rank, self.limits.block_size)
        tracked = _Tracked(share, bounds, list(block_ids))
        self._tracked[request_id] = tracked
        self._allocated.add(request_id)
        self.num_computed[share.group_id, share.part] = 0
        self.num_received[share.group_id, share.part] = num_external_tokens
        if share.part == "chunk":
            self._begin_chunk(request_id, tracked, num_external_tokens)
        else:
            self._begin_fill(request_id, tracked, num_local, num_external_tokens)

    def next_step(self, scheduler_output: Any) -> RunaheadMetadata:
        """The worker's transfers for the step that has just been scheduled."""
        scheduled = scheduler_output.num_scheduled_tokens
        self.num_step_tokens = scheduler_output.total_num_scheduled_tokens
        for new in scheduler_output.scheduled_new_reqs:
            self._on_scheduled(new.req_id, new.num_computed_tokens, scheduled, None)
        cached = scheduler_output.scheduled_cached_reqs
        for request_id, num_computed, new_block_ids in zip(
            cached.req_ids, cached.num_computed_tokens, cached.new_block_ids, strict=True
        ):
            self._on_scheduled(request_id, num_computed, scheduled, new_block_ids)
        self._allocated.clear()
        step, self._next = self._next, RunaheadMetadata()
        return step

    def on_loaded(self, request_ids: set[str] | tuple[()]) -> None:
        """Note loads that the worker has reported as done."""
        for request_id in request_ids:
            if request_id in self._tracked:
                self._tracked[request_id].is_loading = False

    def on_finished(self, request: Any) -> bool:
        """Note that a request has ended. Returns whether its blocks are still needed."""
        request_id = request.request_id
        tracked = self._tracked.pop(request_id, None)
        self._num_local.pop(request_id, None)
        if tracked is None:
            share = RunaheadShare.from_params(request.kv_transfer_params)
            if share is not None and share.part == "fill" and share.group_id in self._fills_due:
                self._fills_due.remove(share.group_id)
                self._next.failure = f"request {request_id} ended before it was begun"
            return False
        if tracked.sends and not tracked.is_through:
            self._next.failure = f"request {request_id} ended before its KV was there to be sent"
        return tracked.is_loading or (tracked.sends and tracked.is_through)

    def _may_fill(self, share: RunaheadShare, num_local_tokens: int) -> bool:
        """Whether the group is next, and its chunk is computed by the end of this step."""
        if not self._fills_due or self._fills_due[0] != share.group_id:
            return False
        chunks = (each for each in self._tracked.values() if each.share.part == "chunk")
        chunk = next((each for each in chunks if each.share.group_id == share.group_id), None)
        if chunk is None:  # it has ended: its blocks are in the cache, or lost
            return True
        return num_local_tokens >= chunk.bounds.end

    def _check(self, request: Any, share: RunaheadShare) -> ShareBounds:
        where = f"runahead group {share.group_id}"
        if len(share.split) != self._settings.world_size:
            raise SpecError(
                f"{where}: split in {len(share.split)} chunks for {self._settings.world_size}"
                " replicas"
            )
        bounds = share.bounds(self._settings.rank, self.limits.block_size)
        expected = bounds.end if share.part == "chunk" else bounds.whole + 1
        if request.num_prompt_tokens != expected:
            raise SpecError(
                f"{where}: the prompt of its {share.part} must have {expected} tokens on replica"
                f" {self._settings.rank}, not {request.num_prompt_tokens}"
            )
        return bounds

    def _begin_chunk(self, request_id: str, tracked: _Tracked, num_external: int) -> None:
        bounds = tracked.bounds
        tracked.sends = True
        if not bounds.is_last:
            self._fills_due.append(tracked.share.group_id)
        if bounds.begin == 0:
            return
        # Messages must be received even if all of their KV is cached here.
        end = bounds.begin // self.limits.block_size
        num_written = num_external // self.limits.block_size
        self._next.loads.append(
            StepLoad(
                request_id,
                "down",
                self._extent(tracked.share, 0, bounds.begin),
                end,
                tracked.block_ids[end - num_written : end],
                is_waited_for=num_external > 0,
                is_reported=False,
            )
        )

    def _begin_fill(
        self, request_id: str, tracked: _Tracked, num_local: int, num_external: int
    ) -> None:
        bounds, block_size = tracked.bounds, self.limits.block_size
        begin, end = bounds.received
        tracked.is_through = True
        self._fills_due.popleft()
        if num_local < begin:
            self._next.failure = (
                f"of group {tracked.share.group_id} only {num_local} of {begin} tokens are left"
                " in the prefix cache"
            )
            return
        passed_on = None
        if bounds.begin > 0:
            first, last = bounds.returned
            passed_on = StepSend(
                request_id,
                "up",
                self._extent(tracked.share, first, last),
                tracked.block_ids[first // block_size : last // block_size],
            )
        num_written = num_external // block_size
        tracked.is_loading = num_external > 0
        tracked.sends = passed_on is not None
        self._next.loads.append(
            StepLoad(
                request_id,
                "up",
                self._extent(tracked.share, begin, end),
                (end - begin) // block_size,
                tracked.block_ids[end // block_size - num_written : end // block_size],
                is_waited_for=False,
                is_reported=num_external > 0,
                passed_on=passed_on,
            )
        )

    def _on_scheduled(
        self,
        request_id: str,
        num_computed: int,
        scheduled: dict[str, int],
        new_block_ids: Sequence[Sequence[int]] | None,
    ) -> None:
        tracked = self._tracked.get(request_id)
        if tracked is None:
            return
        if new_block_ids is not None and request_id not in self._allocated:
            tracked.block_ids.extend(new_block_ids[0])
        num_scheduled = scheduled[request_id]
        share = tracked.share
        self.num_computed[share.group_id, share.part] += num_scheduled
        bounds, block_size = tracked.bounds, self.limits.block_size
        if tracked.is_through:
            return
        if num_computed + num_scheduled < bounds.end:
            return  # the chunk's last step sends
        tracked.is_through = True
        way: Way = "up" if bounds.is_last else "down"
        begin, end = bounds.returned if bounds.is_last else (0, bounds.end)
        block_ids = tracked.block_ids[begin // block_size : end // block_size]
        extent = self._extent(share, begin, end)
        self._next.sends.append(StepSend(request_id, way, extent, block_ids))

    @staticmethod
    def _extent(share: RunaheadShare, begin: int, end: int) -> Extent:
        return Extent(share.group_id, share.digest, begin, end)
