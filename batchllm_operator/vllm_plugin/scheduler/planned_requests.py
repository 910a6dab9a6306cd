"""The plan of each request, and the blocks that all of them will hold in later steps."""

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
class _Plan:
    """The plan of one request."""

    group: Group
    num_prefix_tokens: int
    estimate: int
    """Output tokens, as given or guessed."""
    estimates: OutputEstimates
    """Predicts this request's length, and learns from it."""
    share: Waiting
    """Its part of the waiting sums."""
    growth: Growth | None = None
    """Set while it runs."""
    begun: int = 0
    """Expected first decode step."""
    outgrown: int = 0
    """Its output's length when it last outgrew its estimate."""


class PlannedRequests:
    """All requests of a scheduler: which wait, which run, what they hold, when they end.

    The projection counts the steps. vLLM's `Request` isn't changed here.

    Args:
        kv_cache_manager: vLLM's.
        block_size: tokens of a block.
        shares: whether requests reuse the KV of others.
        delay: steps for which a request holds its blocks after its last one.
        has_drafts: whether a step may give a request more than one token.
    """

    def __init__(
        self, kv_cache_manager: Any, block_size: int, *, shares: bool, delay: int, has_drafts: bool
    ) -> None:
        self._block_size, self._shares = block_size, shares
        self._delay, self._has_drafts = delay, has_drafts
        self.projection = BlockProjection(block_size)
        self.groups = Groups(kv_cache_manager, self.projection, block_size)
        self._given = OutputEstimates()
        self._guessed = OutputEstimates(_GUESS_REQUESTS)
        self._plans: dict[str, _Plan] = {}
        self._running: dict[str, _Plan] = {}
        self._ends: defaultdict[int, list[str]] = defaultdict(list)
        self._waiting = Waiting()
        self._num_guessed = 0  # waiting requests without an estimate
        self._num_seen = 0
        self._num_steps, self._num_tokens = _SPEED_STEPS, _SPEED_STEPS

    @property
    def num_waiting(self) -> int:
        """Requests that wait."""
        return self._waiting.num_requests

    @property
    def num_seen(self) -> int:
        """Requests that have arrived so far."""
        return self._num_seen

    @property
    def is_empty(self) -> bool:
        """Whether no request is left, and nothing is held or counted."""
        return (
            not self._plans
            and not self._running
            and self.groups.is_empty
            and self.projection.num_blocks() == 0
            and self._waiting.num_requests == 0
        )

    def average_waiting(self) -> AverageRequest:
        """The average waiting request; there must be one."""
        share = self._num_guessed / self._waiting.num_requests
        scale = share * self._guessed.scale + (1 - share) * self._given.scale
        return self._waiting.average(scale, self._block_size, self._speed)

    # One request.

    def arrive(self, request: Request) -> None:
        """Plan a new request.

        Raises:
            SpecError: its hints aren't valid. Nothing has changed then.
        """
        hints = RequestHints.of(request)
        size = self._block_size
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
            num_prefill_tokens=num_blocks * size,
            num_output_tokens=estimate,
            num_prompt_blocks=num_blocks + 0.5,  # the last one isn't full
            num_prompt_block_steps=(num_blocks + 0.5) * estimate,
            num_output_block_steps=estimate**2 / (2 * size),
        )
        estimates = self._guessed if is_guess else self._given
        plan = _Plan(group, hints.num_prefix_tokens, estimate, estimates, share)
        self._plans[request.request_id] = plan
        self._num_seen += 1
        self._add_waiting(plan, 1)

    def has_prefix(self, request: Request) -> bool:
        """Whether a waiting request would find its group's prefix, or would compute it itself."""
        return self.groups.has_prefix_for(self._plans[request.request_id].group)

    def is_pinned_beside(self, request: Request) -> bool:
        """Whether the prefix of another group is pinned without a running member."""
        return self.groups.is_pinned_beside(self._plans[request.request_id].group)

    def unpin_beside(self, request: Request) -> None:
        """Unpin the prefixes of all other groups."""
        self.groups.unpin_all(but=self._plans[request.request_id].group)

    def num_to_prefill(self, request: Request) -> int:
        """Tokens of a waiting request without KV in the cache."""
        group = self._plans[request.request_id].group
        num_found = group.num_prefix_blocks - self.groups.num_new_blocks(group, request)
        return request.num_tokens - num_found * self._block_size

    def num_prefix_tokens(self, request: Request) -> int:
        """Tokens that it shares with its group; 0 if the request is unknown."""
        plan = self._plans.get(request.request_id)
        return plan.num_prefix_tokens if plan is not None else 0

    def peak_with(self, request: Request, start: int) -> int:
        """Peak of blocks in use from now on, if the request is prefilled by step `start`."""
        plan = self._plans[request.request_id]
        num_prefix_blocks = self.groups.num_new_blocks(plan.group, request)
        return self.projection.peak_with(self._growth(request, plan, start), num_prefix_blocks)

    def run(self, request: Request, start: int) -> None:
        """Note that a waiting request runs, and will be prefilled by step `start`."""
        plan = self._plans[request.request_id]
        growth = self._growth(request, plan, start)
        self._expect(request.request_id, plan, growth)
        self.groups.admitted(plan.group, request, growth.end)
        self._add_waiting(plan, -1)

    def runs(self, request: Request) -> bool:
        """Whether a request runs."""
        return request.request_id in self._running

    def renew(self, request: Request, start: int) -> None:
        """Update a running request: it will be prefilled by step `start`."""
        plan = self._running[request.request_id]
        if plan.growth is not None:
            self.projection.add(plan.growth, sign=-1)
        growth = self._growth(request, plan, start)
        self._expect(request.request_id, plan, growth)
        self.groups.ends_at(plan.group, growth.end)

    def put_back(self, request: Request, next_one: Request | None) -> None:
        """Note that a running request waits again; `next_one` is the first waiting request."""
        plan = self._plans[request.request_id]
        self._stop(request, plan, next_one, ended=False)
        self._add_waiting(plan, 1)

    def leave(self, request: Request, next_one: Request | None, *, aborted: bool) -> None:
        """Remove a request, waiting or running, that still holds its blocks.

        Args:
            next_one: the first waiting request.
            aborted: whether its output was cut short.
        """
        plan = self._plans.pop(request.request_id, None)
        if plan is None:
            return
        if plan.growth is None:
            self._add_waiting(plan, -1)
            self.groups.remove_waiting(plan.group)
        else:
            if not aborted:
                self._learn(request, plan)
            self._stop(request, plan, next_one, ended=True)
        if not self._plans:
            self.groups.forget_all()

    def computed_work(self, request: Request) -> int:
        """Tokens that a running request would have to compute again after a preemption."""
        group = self._running[request.request_id].group
        shared = group.num_prefix_blocks * self._block_size if group.num_running > 1 else 0
        return max(request.num_computed_tokens - shared, 0)

    # All requests.

    def extend_overdue(self, requests: dict[str, Request], prefilling: Iterable[str]) -> None:
        """Extend running requests that should have ended by now."""
        step = self.projection.now
        for request_id in self._ends.pop(step, ()):
            plan, request = self._running.get(request_id), requests.get(request_id)
            if plan is None or request is None or plan.growth is None or plan.growth.end > step:
                continue
            if request_id not in prefilling:
                plan.estimates.learn(plan.estimate, request.num_output_tokens, plan.outgrown)
                plan.outgrown = request.num_output_tokens
            self.renew(request, max(step, plan.growth.start))

    def recount(self, requests: dict[str, Request]) -> None:
        """Count everything again with the current estimates; steps may also have been missed."""
        step = self.projection.now
        self.projection.clear()
        self._ends.clear()
        for plan in self._running.values():
            plan.group.last_end = 0
        for request_id, plan in self._running.items():
            start = plan.growth.start if plan.growth is not None else step
            growth = self._growth(requests[request_id], plan, max(step, start))
            self._expect(request_id, plan, growth)
            plan.group.last_end = max(plan.group.last_end, growth.end)
        self.groups.recount()

    @property
    def _speed(self) -> float:
        """Tokens per step of a decoding request."""
        return self._num_tokens / self._num_steps if self._has_drafts else 1.0

    def _growth(self, request: Request, plan: _Plan, start: int) -> Growth:
        on_its_way = request.num_output_placeholders
        num_output = request.num_output_tokens + on_its_way
        longest = plan.estimates.rather_long(plan.estimate, request.max_tokens)
        if longest <= num_output:
            longest = plan.estimates.extended(num_output, request.max_tokens)
        num_steps = math.ceil((longest - num_output) / self._speed)
        shared = plan.group.num_prefix_blocks
        return Growth(
            start,
            start + num_steps + self._delay,
            request.num_tokens + on_its_way,
            shared,
            self._speed,
        )

    def _expect(self, request_id: str, plan: _Plan, growth: Growth) -> None:
        if plan.growth is None or plan.growth.start > self.projection.now:
            plan.begun = growth.start
        plan.growth = growth
        self._running[request_id] = plan
        self.projection.add(growth)
        self._ends[growth.end].append(request_id)

    def _stop(
        self, request: Request, plan: _Plan, next_one: Request | None, *, ended: bool
    ) -> None:
        if plan.growth is not None:
            self.projection.add(plan.growth, sign=-1)
            plan.growth = None
            del self._running[request.request_id]
            self.groups.remove_running(plan.group, request, next_one, ended=ended)

    def _learn(self, request: Request, plan: _Plan) -> None:
        plan.estimates.learn(plan.estimate, request.num_output_tokens, plan.outgrown)
        num_steps = self.projection.now - plan.begun
        if self._has_drafts and num_steps > 0:
            self._num_steps += num_steps
            self._num_tokens += max(num_steps, request.num_output_tokens)

    def _add_waiting(self, plan: _Plan, sign: int) -> None:
        self._waiting.add(plan.share, sign)
        self._num_guessed += sign * (plan.estimates is self._guessed)
