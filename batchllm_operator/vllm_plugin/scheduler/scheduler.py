"""A scheduler for vLLM that follows the plan (paper, Sec. 4.3).

vLLM's own scheduler fills a step with running requests first, then with waiting ones, and frees,
preempts and caches blocks. This subclass adds, before and after that step:

- waiting requests are admitted by the KV blocks that all running ones will hold in later steps
  (`BlockProjection`; Algorithm 2); `max_num_seqs` is only the worker's number of slots;
- the blocks of a group's prefix are held until the last member has been admitted, unless memory
  runs short, and are reused first once no request needs them (`groups`);
- the tokens of a step are limited so that prefill is spread evenly (`Pace`).

Use it with `LLM(scheduler_cls="batchllm_operator.vllm_plugin.scheduler.BatchLLMScheduler")`;
requests carry `RequestHints`. A request without them is a group of its own.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.request import Request, RequestStatus

from batchllm_operator.errors import SpecError
from batchllm_operator.vllm_plugin.scheduler.adapter_slots import has_adapter_slot
from batchllm_operator.vllm_plugin.scheduler.hints import SchedulerSettings
from batchllm_operator.vllm_plugin.scheduler.one_queue import OneQueueScheduler
from batchllm_operator.vllm_plugin.scheduler.pacing import Pace, fill_share
from batchllm_operator.vllm_plugin.scheduler.planned_requests import PlannedRequests
from batchllm_operator.vllm_plugin.scheduler.preemption import Preemption
from batchllm_operator.vllm_plugin.scheduler.step_row import StepRow, StepState
from batchllm_operator.vllm_plugin.scheduler.waiting_queue import GatedQueue

if TYPE_CHECKING:
    from batchllm_operator.vllm_plugin.scheduler.trace import OptionalTrace

_RECOUNT_STEPS = 64
_RESERVED_PART = 1000  # one block in so many, for a prefill that takes a step longer than planned


class BatchLLMScheduler(OneQueueScheduler):
    """vLLM's scheduler with planned admission, prefix lifetimes and paced prefill.

    Raises:
        SpecError: `additional_config["batchllm"]` isn't `SchedulerSettings`, or the policy isn't
            first come, first served.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if self.scheduler_config.policy != "fcfs":
            raise SpecError("scheduling_policy must be fcfs: requests run in the plan's order")
        self._pool = self.kv_cache_manager.block_pool
        # Each group of layers holds blocks of its own for the same tokens.
        self._num_kv_groups = len(self.kv_cache_config.kv_cache_groups)
        self._tokens_per_decode = 1 + self.num_spec_tokens
        self._limit = self.max_num_scheduled_tokens
        self._trace: OptionalTrace | None = None
        self._begin(SchedulerSettings.from_additional_config(self.vllm_config.additional_config))
        self.waiting = GatedQueue(self)

    def begin(self, settings: SchedulerSettings) -> None:
        """Restart with other settings, without learned estimates and with a new trace.

        Raises:
            RuntimeError: requests are still waiting or running.
        """
        if not self.is_idle():
            raise RuntimeError("the scheduler still has requests")
        self._close_trace()
        self._begin(settings)

    def _begin(self, settings: SchedulerSettings) -> None:
        is_chunked = self.scheduler_config.enable_chunked_prefill
        self._settings = settings
        self._paces = settings.pace and is_chunked  # a whole prompt may exceed a step's limit
        self._num_blocks = self._num_blocks_to_plan(settings.memory_threshold)
        self._most_tokens = self._limit
        if settings.chunk_size is not None and is_chunked:
            self._most_tokens = min(self._limit, settings.chunk_size)
        self._step = 0
        self._requests = PlannedRequests(
            self.kv_cache_manager,
            self.block_size,
            shares=self.kv_cache_manager.enable_caching,
            delay=1 if self.scheduler_config.async_scheduling else 0,
            has_drafts=self.num_spec_tokens > 0,
        )
        self._preemption = Preemption(
            self._pool, self._requests, self.block_size, self._num_kv_groups
        )
        self._pace = Pace(self._num_blocks)
        self._prefilling: dict[str, Request] = {}
        self._taken_out: Request | None = None  # left the queue last; vLLM may put it back
        self._now = StepState(self._most_tokens, self._most_tokens)
        self._num_unplanned = 0  # blocks in use that aren't in the projection
        self._is_scheduling = False
        self._did_nothing = False
        self._started_at: float | None = None
        if settings.trace_path is not None:
            # Only a trace needs pyarrow.
            from batchllm_operator.vllm_plugin.scheduler.trace import OptionalTrace

            self._trace = OptionalTrace(Path(settings.trace_path), self._most_tokens)

    def _num_blocks_to_plan(self, threshold: float | None) -> int:
        num_blocks = self.num_plannable_tokens // self.block_size
        if threshold is not None:
            return max(1, int(num_blocks * threshold))
        return max(1, num_blocks - max(2, num_blocks // _RESERVED_PART))

    # What vLLM calls.

    def add_request(self, request: Request) -> None:
        if request.request_id not in self.requests:
            self._requests.arrive(request)
        super().add_request(request)

    def schedule(self, *args: Any, **kwargs: Any) -> SchedulerOutput:
        begun_at = time.perf_counter()
        self._begin_step()
        try:
            self._is_scheduling = True
            output = super().schedule(*args, **kwargs)
        finally:
            self._is_scheduling = False
            self.max_num_scheduled_tokens = self._limit
        self._did_nothing = not output.num_scheduled_tokens
        self._end_step(output)
        if self._trace is not None:
            self._trace.add(self._row(output, begun_at))
        return output

    def reset_prefix_cache(self, *args: Any, **kwargs: Any) -> bool:
        self._requests.groups.unpin_all()  # vLLM refuses while blocks are held
        return bool(super().reset_prefix_cache(*args, **kwargs))

    def shutdown(self) -> None:
        self._close_trace()
        super().shutdown()

    def _free_request(self, request: Request, *args: Any, **kwargs: Any) -> Any:
        aborted = request.status == RequestStatus.FINISHED_ABORTED
        self._requests.leave(request, self._next_waiting(), aborted=aborted)
        self._prefilling.pop(request.request_id, None)
        return super()._free_request(request, *args, **kwargs)

    # What other modules use.

    @property
    def chunk_size(self) -> int:
        """Most tokens of a step."""
        return self._most_tokens

    @property
    def num_plannable_tokens(self) -> int:
        """Tokens whose KV fits in all blocks together."""
        return (self._pool.num_gpu_blocks - 1) // self._num_kv_groups * self.block_size

    @property
    def num_held_blocks(self) -> int:
        """Blocks held for future members of groups without a running one."""
        return self._requests.groups.num_pinned_blocks

    def is_idle(self) -> bool:
        """Whether no request is left, and nothing is held or counted for one."""
        return self._requests.is_empty and not self._prefilling

    # What the queue calls.

    def is_closed_for(self, request: Request) -> bool:
        """Whether a waiting request must stay in the queue; see `Gate`."""
        if not self._is_scheduling:
            return False
        self._count_admitted()
        if not self.running:
            return False
        has_slot = has_adapter_slot(request, self.running, self.lora_config)
        return not (has_slot and self._requests.has_prefix(request) and self._has_room_for(request))

    def taken_out(self, request: Request) -> None:
        """Note that a waiting request left the queue."""
        self._count_admitted()
        self._taken_out = request

    def put_back(self, request: Request) -> None:
        """Note that a request is in the queue: it is new, was preempted, or can't run yet."""
        if request is self._taken_out:
            self._taken_out = None
        if self._requests.runs(request):
            self._now.num_preempted += request.status == RequestStatus.PREEMPTED
            self._requests.put_back(request, self._next_waiting())
            self._prefilling.pop(request.request_id, None)

    def _count_admitted(self) -> None:
        """Count the request that left the queue last, if it runs.

        vLLM sets its status only after it has left the queue, so it is counted at the next call.
        """
        request, self._taken_out = self._taken_out, None
        if request is not None and request.status == RequestStatus.RUNNING:
            num_tokens = self._requests.num_to_prefill(request)
            self._requests.run(request, self._start_of(num_tokens))
            self._now.num_prefill_ahead += num_tokens
            self._now.admitted.append(request)

    def _has_room_for(self, request: Request) -> bool:
        start = self._start_of(self._requests.num_to_prefill(request))
        peak = self._requests.peak_with(request, start)
        return peak + self._num_unplanned <= self._num_blocks

    def _start_of(self, num_tokens: int) -> int:
        """Step by which so many tokens are prefilled, after all prefill ahead of them."""
        ahead = self._now.num_prefill_ahead + num_tokens - self._now.prefill_limit
        return self._step + self._num_steps(max(0, ahead))

    def _next_waiting(self) -> Request | None:
        return self.waiting.peek_request() if len(self.waiting) else None

    def _close_trace(self) -> None:
        if self._trace is not None:
            self._trace.close()
        self._trace = None

    # Before vLLM's own step.

    def _begin_step(self) -> None:
        self._step += 1
        self._now = StepState(self._most_tokens, self._most_tokens, self._now.num_prefill_ahead)
        self._requests.projection.advance(self._step)
        self._requests.extend_overdue(self.requests, self._prefilling)
        if self._step % _RECOUNT_STEPS == 0:
            self._requests.recount(self.requests)
        if self._prefilling:
            self._put_decodes_first()
        self._limit_tokens()
        self._make_room_for_first()
        self._preemption.choose_victims(self.running, self._prefilling, self._now.prefill_limit)

    def _put_decodes_first(self) -> None:
        """Sort running requests so that no decode waits for a prefill."""
        tail = self.running[-len(self._prefilling) :]
        if any(request.request_id not in self._prefilling for request in tail):
            self.running.sort(key=lambda request: request.request_id in self._prefilling)

    def _make_room_for_first(self) -> None:
        """Unpin unused prefixes that block the first waiting request."""
        first = self._next_waiting()
        if first is None or not self.num_held_blocks:
            return
        if not self.running and self._did_nothing:  # its own group's prefix blocks it
            self._requests.groups.unpin_all()
        elif self._requests.is_pinned_beside(first):
            missing = self._num_missing_blocks(first) > self._pool.get_num_free_blocks()
            if missing or not self._has_room_for(first):
                self._requests.unpin_beside(first)

    def _num_missing_blocks(self, request: Request) -> int:
        """Blocks of a request's tokens that it doesn't hold yet."""
        num_blocks = -(-request.num_tokens // self.block_size)
        return (num_blocks - request.num_computed_tokens // self.block_size) * self._num_kv_groups

    def _limit_tokens(self) -> None:
        """Set how many tokens the step may have."""
        num_decode = (len(self.running) - len(self._prefilling)) * self._tokens_per_decode
        num_prefill = later = self._most_tokens
        # Spreading prefill pays only if its steps decode too.
        if self._paces and self._requests.num_waiting and (num_decode or not self._prefilling):
            num_prefill, later = self._paced_tokens()
        self._now.prefill_limit = max(1, min(self._most_tokens - num_decode, num_prefill))
        self._now.later_prefill_limit = max(1, min(self._now.prefill_limit, later))
        limit = num_decode + num_prefill
        self.max_num_scheduled_tokens = max(1, min(self._most_tokens, limit))

    def _paced_tokens(self) -> tuple[int, int]:
        """Prompt tokens for this step, and for each later one."""
        request = self._requests.average_waiting()
        to_come = max(0, (self._settings.num_requests or 0) - self._requests.num_seen)
        num_requests = self._requests.num_waiting + to_come
        num_now = self._requests.projection.num_blocks()
        if num_requests * request.final_blocks + num_now <= self._num_blocks:
            return self._most_tokens, self._most_tokens  # all remaining requests fit
        if not self.running:
            self._pace.fill_share = fill_share(
                request, num_requests, self._num_blocks, self._most_tokens, self._settings.step_cost
            )
        now = self._pace.next_step(request, is_prefilling=bool(self._prefilling))
        later = max(self._pace.rate(request), self._pace.least(request))
        return int(now), int(later)

    # After vLLM's own step.

    def _end_step(self, output: SchedulerOutput) -> None:
        self._count_admitted()
        now, scheduled = self._now, output.num_scheduled_tokens
        now.num_cached_tokens = sum(
            request.num_computed_tokens - scheduled.get(request.request_id, 0)
            for request in now.admitted
        )
        now.num_prefill_ahead = 0
        for request in (*self._prefilling.values(), *now.admitted):
            num_tokens = scheduled.get(request.request_id, 0)
            prefix = self._requests.num_prefix_tokens(request)
            now.count_prefill(request.num_computed_tokens - num_tokens, num_tokens, prefix)
            self._follow_prefill(request)
        self._pace.used(now.num_prefill_tokens)
        self._requests.groups.unpin_taken_over()
        num_used = self._num_used_blocks() // self._num_kv_groups
        self._num_unplanned = max(0, num_used - self._requests.projection.num_blocks())

    def _follow_prefill(self, request: Request) -> None:
        self._prefilling.pop(request.request_id, None)
        if not self._requests.runs(request):
            return
        if request.is_prefill_chunk:
            self._prefilling[request.request_id] = request
            self._now.num_prefill_ahead += request.num_tokens - request.num_computed_tokens
            num_steps = self._num_steps(self._now.num_prefill_ahead)
            self._requests.renew(request, self._step + num_steps)
        else:
            self._requests.renew(request, self._step + 1)  # this step gives it a token

    def _num_steps(self, num_tokens: int) -> int:
        """Steps after this one that so many tokens of prefill take."""
        return -(-num_tokens // self._now.later_prefill_limit)

    def _num_used_blocks(self) -> int:
        return int(self._pool.num_gpu_blocks - 1 - self._pool.get_num_free_blocks())

    def _row(self, output: SchedulerOutput, begun_at: float) -> StepRow:
        now = self._now
        if self._started_at is None:
            self._started_at = begun_at
        return StepRow(
            step=self._step,
            start_s=begun_at - self._started_at,
            scheduling_s=time.perf_counter() - begun_at,
            num_decode_tokens=output.total_num_scheduled_tokens - now.num_prefill_tokens,
            num_distinct_tokens=now.num_distinct_tokens,
            num_prefix_tokens=now.num_prefix_tokens,
            num_cached_tokens=now.num_cached_tokens,
            num_scheduled=len(output.num_scheduled_tokens),
            num_running=len(self.running),
            num_waiting=len(self.waiting),
            num_preempted=now.num_preempted,
            num_used_blocks=self._num_used_blocks(),
            num_held_blocks=self.num_held_blocks,
            num_blocks=self._pool.num_gpu_blocks - 1,
        )
