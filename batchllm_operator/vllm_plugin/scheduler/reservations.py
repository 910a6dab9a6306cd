"""KV blocks reserved for each request, in all steps until it ends."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final

from batchllm_operator.vllm_plugin.compat import reads_prefix_cache
from batchllm_operator.vllm_plugin.scheduler.groups import Group, Groups
from batchllm_operator.vllm_plugin.scheduler.hints import RequestHints
from batchllm_operator.vllm_plugin.scheduler.output_estimates import OutputEstimates
from batchllm_operator.vllm_plugin.scheduler.pacing import AverageRequest, Waiting
from batchllm_operator.vllm_plugin.scheduler.projection import BlockProjection, Growth

if TYPE_CHECKING:
    from vllm.v1.request import Request

_GUESSED_OUTPUT: Final = 256  # tokens, without an estimate
_GUESS_REQUESTS: Final = 2  # weight of the guess, in finished requests
_SPEED_STEPS: Final = 8  # weight of the first guess of speed, in steps of one token each


@dataclass(slots=True, eq=False)
class _Entry:
    """One request, waiting or admitted."""

    request: Request
    group: Group
    num_prefix_tokens: int
    estimate: int
    """Output tokens, as given or guessed."""
    estimates: OutputEstimates
    """Predicts this request's length, and learns from it."""
    share: Waiting
    """Its part of the waiting sums."""
    growth: Growth | None = None
    """Its blocks in later steps; None while it waits."""
    begun: int = 0
    """Expected first decode step."""
    outgrown: int = 0
    """Its output's length when it last outgrew its estimate."""

    def learn(self) -> None:
        """Let the estimates learn from the output's length."""
        num_tokens = self.request.num_output_tokens
        self.estimates.learn(self.estimate, num_tokens, self.outgrown)
        self.outgrown = num_tokens


class Reservations:
    """All requests of a scheduler: those that wait, and the blocks of those that are admitted.

    The projection counts the steps. vLLM's `Request` isn't changed here.

    Args:
        kv_cache_manager: vLLM's.
        block_size: tokens of a block.
        shares: whether requests reuse the KV of others.
        delay: steps for which a request holds its blocks after its last one.
        has_drafts: whether a step may give a request more than one token.
        num_requests: requests that will come in all; None if unknown.
    """

    def __init__(
        self,
        kv_cache_manager: Any,
        block_size: int,
        *,
        shares: bool,
        delay: int,
        has_drafts: bool,
        num_requests: int | None,
    ) -> None:
        self.block_size, self.pool = block_size, kv_cache_manager.block_pool
        self._shares = shares
        self._delay, self._has_drafts = delay, has_drafts
        self.projection = BlockProjection(block_size)
        self.groups = Groups(kv_cache_manager, self.projection, block_size)
        self._given = OutputEstimates()
        self._guessed = OutputEstimates(_GUESS_REQUESTS)
        self._entries: dict[str, _Entry] = {}
        self._ends: defaultdict[int, list[_Entry]] = defaultdict(list)
        self._waiting = Waiting()
        self._num_to_come = num_requests or 0
        self._num_steps, self._num_tokens = _SPEED_STEPS, _SPEED_STEPS

    @property
    def num_waiting(self) -> int:
        """Requests that wait."""
        return self._waiting.num_requests

    @property
    def num_left(self) -> int:
        """Requests that wait or are still to come."""
        return self._waiting.num_requests + self._num_to_come

    def average_waiting(self) -> AverageRequest:
        """The average waiting request; there must be one."""
        share = self._waiting.num_guessed / self._waiting.num_requests
        scale = share * self._guessed.scale + (1 - share) * self._given.scale
        return self._waiting.average(scale, self.block_size, self._speed)

    # One request.

    def add(self, request: Request) -> None:
        """Add a request that waits.

        Raises:
            SpecError: its hints aren't valid. Nothing has changed then.
        """
        hints = RequestHints.of(request)
        size = self.block_size
        group = None
        if hints is not None and self._shares and reads_prefix_cache(request):
            num_shared = min(hints.num_prefix_tokens, request.num_prompt_tokens - 1) // size
            hashes = request.block_hashes[: max(num_shared, 0)]
            group = self.groups.join(hints.group_id, hashes, hints.group_size)
        hints = hints or RequestHints(group_id=0)
        if group is None:  # it shares nothing, despite its hints
            hints = replace(hints, num_prefix_tokens=0, group_size=1)
            group = self.groups.join(("alone", request.request_id), (), 1)
            assert group is not None, "a request's id isn't taken"
        is_guess = hints.num_output_tokens is None
        estimate = min(hints.num_output_tokens or _GUESSED_OUTPUT, request.max_tokens)
        part = group.num_prefix_blocks / hints.group_size
        num_blocks = request.num_prompt_tokens / size - group.num_prefix_blocks + part
        share = Waiting(
            num_requests=1,
            num_guessed=int(is_guess),
            num_prefill_tokens=num_blocks * size,
            num_output_tokens=estimate,
            num_prompt_blocks=num_blocks + 0.5,  # the last one isn't full
            num_prompt_block_steps=(num_blocks + 0.5) * estimate,
            num_output_block_steps=estimate**2 / (2 * size),
        )
        estimates = self._guessed if is_guess else self._given
        self._entries[request.request_id] = _Entry(
            request, group, hints.num_prefix_tokens, estimate, estimates, share
        )
        self._num_to_come = max(0, self._num_to_come - 1)
        self._waiting = self._waiting.plus(share)

    def group_of(self, request: Request) -> Group:
        """The group of a request."""
        return self._entries[request.request_id].group

    def num_to_prefill(self, request: Request) -> int:
        """Tokens of a waiting request without KV in the cache."""
        group = self.group_of(request)
        num_found = group.num_prefix_blocks - self.groups.num_new_blocks(group, request)
        if group.num_counted and not group.is_complete:
            num_found = 0  # its leader went before the end of the prefix
        return request.num_tokens - num_found * self.block_size

    def num_prefix_tokens(self, request: Request) -> int:
        """Tokens that it shares with its group; 0 if the request is unknown."""
        entry = self._entries.get(request.request_id)
        return entry.num_prefix_tokens if entry is not None else 0

    def computed_work(self, request: Request) -> int:
        """Tokens that a running request would have to compute again after a preemption."""
        group = self.group_of(request)
        shared = group.num_prefix_blocks * self.block_size if group.num_running > 1 else 0
        return max(request.num_computed_tokens - shared, 0)

    def peak_with(self, request: Request, start: int) -> int:
        """Peak of blocks in use from now on, if the request is prefilled by step `start`."""
        entry = self._entries[request.request_id]
        num_prefix_blocks = self.groups.num_new_blocks(entry.group, request)
        return self.projection.peak_with(self._growth(entry, start), num_prefix_blocks)

    def is_admitted(self, request: Request) -> bool:
        """Whether blocks are reserved for a request."""
        entry = self._entries.get(request.request_id)
        return entry is not None and entry.growth is not None

    def admit(self, request: Request, start: int) -> None:
        """Reserve the blocks of a waiting request that will be prefilled by step `start`."""
        entry = self._entries[request.request_id]
        end = self._reserve(entry, start)
        self.groups.admitted(entry.group, request, end)
        self._waiting = self._waiting.plus(entry.share, -1)

    def reschedule(self, request: Request, start: int) -> None:
        """Reserve again: an admitted request will be prefilled by step `start`."""
        entry = self._entries[request.request_id]
        if entry.growth is not None:
            self.projection.add(entry.growth, sign=-1)
        self.groups.ends_at(entry.group, self._reserve(entry, start))

    def requeue(self, request: Request) -> None:
        """Give an admitted request's blocks back: it waits again."""
        entry = self._entries[request.request_id]
        self._release(entry)
        self.groups.preempted(entry.group, request)
        self._waiting = self._waiting.plus(entry.share)

    def finish(self, request: Request, next_one: Request | None, *, aborted: bool) -> None:
        """Remove a request, waiting or admitted, that still holds its blocks.

        Args:
            next_one: the first waiting request.
            aborted: whether its output was cut short.
        """
        entry = self._entries.pop(request.request_id, None)
        if entry is None:
            return
        if entry.growth is None:
            self._waiting = self._waiting.plus(entry.share, -1)
            self.groups.remove_waiting(entry.group)
        else:
            if not aborted:
                self._learn(entry)
            self._release(entry)
            self.groups.finished(entry.group, request, next_one)
        if not self._entries:
            self.groups.forget_all()

    # All requests.

    def extend_overdue(self, prefilling: Iterable[str]) -> None:
        """Extend running requests that should have ended by now."""
        step = self.projection.now
        for entry in self._ends.pop(step, ()):
            if entry.growth is None or entry.growth.end > step:
                continue
            if entry.request.request_id not in prefilling:
                entry.learn()
            self.reschedule(entry.request, max(step, entry.growth.start))

    def recount(self) -> None:
        """Count everything again with the current estimates; steps may also have been missed."""
        self.projection.clear()
        self._ends.clear()
        admitted = [
            (entry, entry.growth.start)
            for entry in self._entries.values()
            if entry.growth is not None
        ]
        for entry, _ in admitted:
            entry.group.last_end = 0
        for entry, start in admitted:
            end = self._reserve(entry, max(self.projection.now, start))
            entry.group.last_end = max(entry.group.last_end, end)
        self.groups.recount()

    @property
    def _speed(self) -> float:
        """Tokens per step of a decoding request."""
        return self._num_tokens / self._num_steps if self._has_drafts else 1.0

    def _growth(self, entry: _Entry, start: int) -> Growth:
        request, on_its_way = entry.request, entry.request.num_output_placeholders
        num_output = request.num_output_tokens + on_its_way
        longest = entry.estimates.rather_long(entry.estimate, request.max_tokens)
        if longest <= num_output:
            longest = entry.estimates.extended(num_output, request.max_tokens)
        end = start + math.ceil((longest - num_output) / self._speed) + self._delay
        num_tokens = request.num_tokens + on_its_way
        return Growth(start, end, num_tokens, entry.group.num_prefix_blocks, self._speed)

    def _reserve(self, entry: _Entry, start: int) -> int:
        """Count a request's blocks in the projection, which doesn't have them; returns its end."""
        if entry.growth is None or entry.growth.start > self.projection.now:
            entry.begun = start
        entry.growth = self._growth(entry, start)
        self.projection.add(entry.growth)
        self._ends[entry.growth.end].append(entry)
        return entry.growth.end

    def _release(self, entry: _Entry) -> None:
        if entry.growth is not None:
            self.projection.add(entry.growth, sign=-1)
        entry.growth = None

    def _learn(self, entry: _Entry) -> None:
        """Learn from an output that has ended."""
        entry.learn()
        num_steps = self.projection.now - entry.begun
        if self._has_drafts and num_steps > 0:
            self._num_steps += num_steps
            self._num_tokens += max(num_steps, entry.request.num_output_tokens)
