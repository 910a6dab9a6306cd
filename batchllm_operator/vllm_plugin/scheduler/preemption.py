"""The order of running requests: vLLM schedules them from the front, and preempts from the end."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from batchllm_operator.vllm_plugin.scheduler.reservations import Reservations

if TYPE_CHECKING:
    from vllm.v1.request import Request


class Preemption:
    """Chooses the requests with the fewest tokens to compute again, and no more than needed.

    Args:
        pool: vLLM's block pool.
        requests: all requests of the scheduler; its prefixes are unpinned before any preemption.
        block_size: tokens of a block.
        num_kv_groups: vLLM's KV cache groups; each holds blocks of its own for the same tokens.
    """

    def __init__(
        self, pool: Any, requests: Reservations, block_size: int, num_kv_groups: int
    ) -> None:
        self._pool, self._reservations = pool, requests
        self._block_size, self._num_kv_groups = block_size, num_kv_groups

    def choose_victims(
        self, running: list[Request], prefilling: Mapping[str, Request], num_prefill_tokens: int
    ) -> None:
        """Move victims to the end of `running` if the step would run out of blocks.

        vLLM preempts from the end.

        Args:
            running: vLLM's list; changed in place.
            prefilling: those of them that aren't prefilled yet, by id.
            num_prefill_tokens: prompt tokens that the step may compute.
        """
        num_free = self._pool.get_num_free_blocks()
        num_needed = self._num_blocks_to_prefill(prefilling, num_prefill_tokens)
        if num_free >= num_needed + len(running) * self._num_kv_groups:
            return
        num_needed += self._num_kv_groups * sum(
            not request.num_computed_tokens % self._block_size
            for request in running
            if request.request_id not in prefilling
        )
        if num_needed <= num_free:
            return
        self._reservations.groups.unpin_all()
        missing = num_needed - self._pool.get_num_free_blocks()
        if missing > 0:
            self._put_victims_last(running, missing)

    def _put_victims_last(self, running: list[Request], num_blocks: int) -> None:
        by_work = sorted(running, key=self._reservations.computed_work)
        victims: list[Request] = []
        while num_blocks > 0 and len(victims) < len(by_work) - 1:
            victim = by_work[len(victims)]
            victims.append(victim)
            num_blocks -= max(1, self._reservations.computed_work(victim) // self._block_size)
        chosen = {request.request_id for request in victims}
        others = [request for request in running if request.request_id not in chosen]
        running[:] = [*others, *reversed(victims)]

    def _num_blocks_to_prefill(
        self, prefilling: Mapping[str, Request], num_prefill_tokens: int
    ) -> int:
        """Blocks that prefill will take in the step."""
        num_blocks, num_tokens = 0, num_prefill_tokens
        for request in prefilling.values():
            begin = request.num_computed_tokens
            end = min(request.num_tokens, begin + num_tokens)
            num_blocks += -(-end // self._block_size) - -(-begin // self._block_size)
            num_tokens -= end - begin
        return num_blocks * self._num_kv_groups


def put_decodes_first(running: list[Request], prefilling: Mapping[str, Request]) -> None:
    """Sort running requests in place, so that no decode waits for a prefill."""
    tail = running[len(running) - len(prefilling) :]
    if any(request.request_id not in prefilling for request in tail):
        running.sort(key=lambda request: request.request_id in prefilling)
