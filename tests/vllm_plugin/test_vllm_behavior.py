"""What vLLM's scheduler does that ours builds on, and that no signature shows."""

from __future__ import annotations

from typing import Any

import pytest
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.request_queue import FCFSRequestQueue
from vllm.v1.request import Request, RequestStatus

from batchllm_operator.cost import MODEL_SHAPES, find_gpu
from batchllm_operator.simulate.machine import POLICIES, Machine
from batchllm_operator.simulate.vllm_scheduling import make_scheduler
from batchllm_operator.vllm_plugin.compat import make_model_output, make_request
from batchllm_operator.vllm_plugin.scheduler.hints import KEY, RequestHints, SchedulerSettings

SIZE = 16  # tokens of a block
PROMPT = 3 * SIZE + 4


def scheduler_with(num_blocks: int = 64) -> AsyncScheduler:
    machine = Machine(MODEL_SHAPES["Mistral-7B"], find_gpu("H100"), num_blocks, SIZE)
    settings = SchedulerSettings(memory_threshold=0.5)
    scheduler = make_scheduler(POLICIES["stock_sorted"], machine, 512, settings)
    init_none_hash(sha256)  # hashes begin with something else after each call
    return scheduler


def add(scheduler: AsyncScheduler, name: str, first: int = 0) -> Request:
    params = SamplingParams(max_tokens=40, extra_args=RequestHints(group_id=7).to_extra_args())
    prompt = list(range(first, first + PROMPT))
    request = make_request(name, prompt, params, get_request_block_hasher(SIZE, sha256))
    scheduler.add_request(request)
    return request


def step(scheduler: AsyncScheduler) -> dict[str, int]:
    """Tokens by request; those that are through with their prompt get one more."""
    output = scheduler.schedule()
    names = list(output.num_scheduled_tokens)
    made = [[] if scheduler.requests[name].is_prefill_chunk else [5] for name in names]
    scheduler.update_from_output(output, make_model_output(names, made))
    tokens: dict[str, int] = output.num_scheduled_tokens
    return tokens


def blocks_of(scheduler: AsyncScheduler, name: str) -> list[Any]:
    return list(scheduler.kv_cache_manager.get_blocks(name).blocks[0])


def test_a_step_takes_requests_from_the_queue_that_the_scheduler_has_then() -> None:
    scheduler = scheduler_with()
    add(scheduler, "a")
    step(scheduler)
    add(scheduler, "b", 1000)
    queue, scheduler.waiting = scheduler.waiting, FCFSRequestQueue()
    assert step(scheduler) == {"a": 1}
    scheduler.waiting = queue
    assert step(scheduler) == {"a": 1, "b": PROMPT}


def test_the_token_limit_holds_from_the_next_step_and_decodes_come_first() -> None:
    scheduler = scheduler_with()
    first, second = add(scheduler, "a"), add(scheduler, "b", 1000)
    scheduler.max_num_scheduled_tokens = PROMPT + 10
    assert step(scheduler) == {"a": PROMPT, "b": 10}
    assert (first.is_prefill_chunk, second.is_prefill_chunk) == (False, True)
    scheduler.max_num_scheduled_tokens = 9
    assert step(scheduler) == {"a": 1, "b": 8}
    assert second.num_computed_tokens == 18


def test_running_requests_take_their_turn_in_the_order_of_the_list() -> None:
    scheduler = scheduler_with()
    for name, first in (("a", 0), ("b", 1000)):
        add(scheduler, name, first)
    step(scheduler)
    scheduler.running.sort(key=lambda request: request.request_id, reverse=True)
    assert list(step(scheduler)) == ["b", "a"]


def test_scheduling_counts_tokens_before_they_are_computed() -> None:
    scheduler = scheduler_with()
    request = add(scheduler, "a")
    output = scheduler.schedule()
    assert request.num_computed_tokens == PROMPT
    assert (request.num_output_tokens, request.num_output_placeholders) == (0, 1)
    scheduler.update_from_output(output, make_model_output(["a"], [[5]]))
    assert (request.num_output_tokens, request.num_output_placeholders) == (1, 0)


def test_the_last_running_one_is_preempted_and_put_back_in_front() -> None:
    scheduler = scheduler_with(num_blocks=9)  # eight, and one that is vLLM's own
    add(scheduler, "a"), add(scheduler, "b", 1000), add(scheduler, "c", 2000)
    step(scheduler)
    while "b" in {request.request_id for request in scheduler.running}:
        assert len(scheduler.running) == 2
        step(scheduler)
    assert [request.request_id for request in scheduler.waiting] == ["b", "c"]
    assert scheduler.requests["b"].status == RequestStatus.PREEMPTED
    assert blocks_of(scheduler, "b") == []


def test_an_ended_request_still_has_its_blocks_when_it_is_freed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    scheduler = scheduler_with()
    add(scheduler, "a")
    step(scheduler)
    seen = []
    free = scheduler._free_request

    def spy(request: Request, *args: Any, **kwargs: Any) -> Any:
        seen.append(len(blocks_of(scheduler, request.request_id)))
        return free(request, *args, **kwargs)

    monkeypatch.setattr(scheduler, "_free_request", spy)
    while scheduler.has_unfinished_requests():
        step(scheduler)
    assert seen == [-(-(PROMPT + 40 - 1) // SIZE)]


def test_a_touched_block_outlives_its_request_and_is_found_again() -> None:
    scheduler = scheduler_with()
    pool = scheduler.kv_cache_manager.block_pool
    add(scheduler, "a")
    step(scheduler)
    pinned = blocks_of(scheduler, "a")[:3]
    pool.touch(pinned)
    assert [block.ref_cnt for block in pinned] == [2, 2, 2]
    scheduler.finish_requests(["a"], RequestStatus.FINISHED_ABORTED)
    assert [block.ref_cnt for block in pinned] == [1, 1, 1]
    assert pool.get_num_free_blocks() == pool.num_gpu_blocks - 1 - 3
    add(scheduler, "b")
    assert step(scheduler) == {"b": PROMPT - 3 * SIZE}
    pool.free_blocks(reversed(pinned))
    assert [block.ref_cnt for block in pinned] == [1, 1, 1]


def test_blocks_taken_from_the_cache_are_not_found_and_are_reused_first() -> None:
    scheduler = scheduler_with()
    pool = scheduler.kv_cache_manager.block_pool
    add(scheduler, "a")
    step(scheduler)
    prefix = {block.block_id for block in blocks_of(scheduler, "a")[:3]}
    pool.evict_blocks(prefix)
    scheduler.finish_requests(["a"], RequestStatus.FINISHED_ABORTED)
    add(scheduler, "b")
    assert step(scheduler) == {"b": PROMPT}
    assert prefix < {block.block_id for block in blocks_of(scheduler, "b")}


def test_members_of_a_step_share_the_blocks_that_the_first_one_computes() -> None:
    scheduler = scheduler_with()
    add(scheduler, "a"), add(scheduler, "b")
    assert step(scheduler) == {"a": PROMPT, "b": PROMPT - 3 * SIZE}
    assert blocks_of(scheduler, "a")[:3] == blocks_of(scheduler, "b")[:3]


def test_hints_and_settings_come_through() -> None:
    scheduler = scheduler_with()
    request = add(scheduler, "a")
    assert request.sampling_params is not None
    assert RequestHints.of(request) == RequestHints(7)
    config: Any = scheduler.vllm_config.additional_config
    assert KEY in config
    assert SchedulerSettings.from_additional_config(config).memory_threshold == 0.5
