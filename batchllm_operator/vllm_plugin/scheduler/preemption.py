"""The order of running requests: vLLM schedules them from the front, and preempts from the end."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from batchllm_operator.vllm_plugin.scheduler.reservations import Reservations

if TYPE_CHECKING:
    from vllm.v1.request import Request


def choose_victims(
    running: list[Request],
    prefilling: Mapping[str, Request],
    num_prefill_tokens: int,
    reservations: Reservations,
    num_kv_groups: int,
) -> None:
    """Move victims to the end of `running` if the step would run out of blocks.

    They have the fewest tokens to compute again, and are no more than needed. Prefixes are
    unpinned before any preemption.

    Args:
        running: vLLM's list; changed in place.
        prefilling: those of them that aren't prefilled yet, by id.
        num_prefill_tokens: prompt tokens that the step may compute.
        reservations: of the scheduler.
        num_kv_groups: vLLM's KV cache groups; each holds blocks of its own for the same tokens.
    """
    size, pool = reservations.block_size, reservations.pool
    num_free = pool.get_num_free_blocks()
    num_needed = num_kv_groups * _num_blocks_to_prefill(prefilling, num_prefill_tokens, size)
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


def _num_blocks_to_prefill(
    prefilling: Mapping[str, Request], num_tokens: int, block_size: int
) -> int:
    num_blocks = 0
    for request in prefilling.values():
        begin = request.num_computed_tokens
        end = min(request.num_tokens, begin + num_tokens)
        num_blocks += -(-end // block_size) - -(-begin // block_size)
        num_tokens -= end - begin
    return num_blocks


def put_decodes_first(running: list[Request], prefilling: Mapping[str, Request]) -> None:
    """Sort running requests in place, so that no decode waits for a prefill."""
    tail = running[len(running) - len(prefilling) :]
    if any(request.request_id not in prefilling for request in tail):
        running.sort(key=lambda request: request.request_id in prefilling)
