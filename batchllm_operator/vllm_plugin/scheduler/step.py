"""One step: what its prefill may take and took, and the order of running requests.

vLLM schedules running requests from the front, and preempts them from the end.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from batchllm_operator.vllm_plugin.scheduler.reservations import Reservations

if TYPE_CHECKING:
    from vllm.v1.request import Request


@dataclass(slots=True)
class StepState:
    """The prefill, admissions and preemptions of one step."""

    prefill_budget: int
    """Prompt tokens that the step may compute."""
    later_prefill_budget: int
    """Prompt tokens that each later step may compute."""
    budget: int = 0
    """What of `prefill_budget` no request has yet."""
    prefilled: dict[str, int] = field(default_factory=dict)
    """Tokens that each prefilling request will have computed after the step, by id."""
    num_prefill_ahead: int = 0
    """Tokens that running requests, and those admitted so far, have yet to prefill."""
    admitted: list[Request] = field(default_factory=list)
    num_preempted: int = 0
    num_distinct_tokens: int = 0
    """Prompt tokens computed after their group's prefix."""
    num_prefix_tokens: int = 0
    """Prompt tokens computed of prefixes."""
    num_cached_tokens: int = 0
    """Tokens of admitted requests that were in the cache."""

    @property
    def num_prefill_tokens(self) -> int:
        """Prompt tokens that the step computes."""
        return self.num_distinct_tokens + self.num_prefix_tokens

    def prefill(self, request: Request, num_tokens: int, most: int) -> None:
        """Give a request what is left of the budget for `num_tokens` of its prompt.

        Args:
            most: most tokens of a prompt in a step; 0 for no limit.
        """
        given = min(num_tokens, most or num_tokens, self.budget)
        self.budget -= given
        self.prefilled[request.request_id] = request.num_tokens - num_tokens + given

    def count_prefill(self, begin: int, num_tokens: int, num_prefix_tokens: int) -> None:
        """Count `num_tokens` of a prompt, from token `begin`."""
        num_prefix = max(0, min(begin + num_tokens, num_prefix_tokens) - begin)
        self.num_prefix_tokens += num_prefix
        self.num_distinct_tokens += num_tokens - num_prefix


def choose_victims(
    running: list[Request],
    prefilling: Mapping[str, Request],
    num_prefill_tokens: int,
    reservations: Reservations,
    num_kv_groups: int,
) -> None:
    """Move victims to the end of `running`, in place, if the step would run out of blocks.

    They have the fewest tokens to compute again, and are no more than needed. Prefixes are
    unpinned before any preemption.

    Args:
        prefilling: running requests that aren't prefilled yet, by id.
        num_prefill_tokens: prompt tokens that the step may compute.
        num_kv_groups: vLLM's KV cache groups; each holds blocks of its own for the same tokens.
    """
    size, pool = reservations.block_size, reservations.pool
    num_free = pool.get_num_free_blocks()
    num_needed, num_tokens = 0, num_prefill_tokens
    for request in prefilling.values():
        begin = request.num_computed_tokens
        end = min(request.num_tokens, begin + num_tokens)
        num_needed += num_kv_groups * (-(-end // size) - -(-begin // size))
        num_tokens -= end - begin
    if num_free >= num_needed + len(running) * num_kv_groups:
        return
    num_needed += num_kv_groups * sum(
        not request.num_computed_tokens % size
        for request in running
        if request.request_id not in prefilling
    )
    if num_needed <= num_free:
        return
    reservations.groups.unpin_all()
    missing = num_needed - pool.get_num_free_blocks()
    victims: list[Request] = []
    for request in sorted(running, key=reservations.computed_work)[:-1]:
        if missing <= 0:
            break
        victims.append(request)
        missing -= max(1, reservations.computed_work(request) // size)
    chosen = {request.request_id for request in victims}
    others = [request for request in running if request.request_id not in chosen]
    running[:] = [*others, *reversed(victims)]


def put_decodes_first(running: list[Request], prefilling: Mapping[str, Request]) -> None:
    """Sort running requests in place, so that no decode waits for a prefill."""
    tail = running[len(running) - len(prefilling) :]
    if any(request.request_id not in prefilling for request in tail):
        running.sort(key=lambda request: request.request_id in prefilling)
