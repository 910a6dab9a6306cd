"""A scheduler for vLLM that follows the plan (paper, Sec. 4.3).

vLLM's own scheduler fills a step with running requests first, then with waiting ones, and frees,
preempts and caches blocks. This subclass adds, before and after that step:

- waiting requests are admitted by the KV blocks that all running ones will hold in later steps
  (`BlockProjection`; Algorithm 2), and vLLM's queue has only the admitted ones while it puts a step
  together; `max_num_seqs` is only the worker's number of slots;
- the blocks of a group's prefix are held until the last member has been admitted, unless memory
  runs short, and are reused first once no request needs them (`groups`);
- the tokens of a step are limited so that prefill is spread evenly (`Pace`).

Use it as vLLM's `scheduler_cls`; requests carry `RequestHints`, or are groups of their own.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.request_queue import FCFSRequestQueue, RequestQueue
from vllm.v1.request import Request, RequestStatus

from batchllm_operator.errors import SpecError
from batchllm_operator.vllm_plugin.compat import is_ready
from batchllm_operator.vllm_plugin.scheduler.held_slots import HeldSlots
from batchllm_operator.vllm_plugin.scheduler.hints import SchedulerSettings
from batchllm_operator.vllm_plugin.scheduler.pacing import Pace
from batchllm_operator.vllm_plugin.scheduler.projection import Growth
from batchllm_operator.vllm_plugin.scheduler.reservations import Reservations
from batchllm_operator.vllm_plugin.scheduler.step import StepState

if TYPE_CHECKING:
    from batchllm_operator.vllm_plugin.scheduler.trace import StepRow, StepTrace

_RESERVED_PART = 1000  # one block in so many, for a prefill that takes a step longer than planned


class BatchLLMScheduler(AsyncScheduler):
    """vLLM's scheduler with planned admission, prefix lifetimes and paced prefill.

    Raises:
        SpecError: `additional_config["batchllm"]` isn't `SchedulerSettings`, or the policy isn't
            first come, first served.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if self.scheduler_config.policy != "fcfs":
            raise SpecError("scheduling_policy must be fcfs: requests run in the plan's order")
        self.kv_cache_manager = HeldSlots.before(self.kv_cache_manager)
        self._pool = self.kv_cache_manager.block_pool
        # Each group of layers holds blocks of its own for the same tokens.
        self._num_kv_groups = len(self.kv_cache_config.kv_cache_groups)
        self._tokens_per_decode = 1 + self.num_spec_tokens
        self._limit = self.max_num_scheduled_tokens
        self._trace: StepTrace | None = None
        self.begin(SchedulerSettings.from_additional_config(self.vllm_config.additional_config))

    def begin(self, settings: SchedulerSettings) -> None:
        """Restart with other settings, without learned estimates and with a new trace.

        Raises:
            RuntimeError: requests are still waiting or running.
        """
        if self.has_unfinished_requests():
            raise RuntimeError("the scheduler still has requests")
        if self._trace is not None:
            self._trace.close()
        is_chunked = self.scheduler_config.enable_chunked_prefill
        self._paces = settings.pace and is_chunked  # a whole prompt may exceed a step's limit
        num_blocks = self.num_plannable_tokens // self.block_size
        num_planned = num_blocks - max(2, num_blocks // _RESERVED_PART)
        if settings.memory_threshold is not None:
            num_planned = int(num_blocks * settings.memory_threshold)
        self._num_blocks = max(1, num_planned)
        chunk_size = settings.chunk_size if is_chunked else None
        self.chunk_size = min(self._limit, chunk_size or self._limit)
        """Most tokens of a step."""
        self._step = 0
        self._reservations = Reservations(self, settings.num_requests)
        self._pace = Pace(self._num_blocks, self.chunk_size, settings.step_cost)
        self._prefilling: dict[str, Request] = {}
        self._now = StepState(self.chunk_size, self.chunk_size)
        self._num_unplanned = 0  # blocks in use that aren't in the projection
        self._did_nothing = False
        self._started_at: float | None = None
        self._trace = None
        if settings.trace_path is not None:
            from batchllm_operator.vllm_plugin.scheduler.trace import StepTrace

            self._trace = StepTrace(Path(settings.trace_path), self.chunk_size)

    # What vLLM calls.

    def add_request(self, request: Request) -> None:
        if request.request_id not in self.requests:
            self._reservations.add(request)
        super().add_request(request)

    def schedule(self, *args: Any, **kwargs: Any) -> SchedulerOutput:
        begun_at = time.perf_counter()
        self._begin_step()
        waiting, self.waiting = self.waiting, self._admit()
        try:
            output = super().schedule(*args, **kwargs)
        finally:
            self._requeue(waiting)
            self.max_num_scheduled_tokens = self._limit
        self._did_nothing = not output.num_scheduled_tokens
        self._end_step(output)
        if self._trace is not None:
            self._trace.add(self._row(output, begun_at))
        return output

    def reset_prefix_cache(self, *args: Any, **kwargs: Any) -> bool:
        self._reservations.unpin_all()  # vLLM refuses while blocks are held
        is_reset = bool(super().reset_prefix_cache(*args, **kwargs))
        for request in self.waiting:
            self._note_preempted(request)  # vLLM does that, if it is asked to
        return is_reset

    def shutdown(self) -> None:
        if self._trace is not None:
            self._trace.close()
        super().shutdown()

    def _enqueue_waiting_request(self, request: Request) -> None:
        # vLLM 0.27 has a second queue for these, from which it would run them unplanned.
        if request.status == RequestStatus.WAITING_FOR_STRUCTURED_OUTPUT_GRAMMAR:
            self.waiting.add_request(request)
        else:
            super()._enqueue_waiting_request(request)

    def _free_request(self, request: Request, *args: Any, **kwargs: Any) -> Any:
        aborted = request.status == RequestStatus.FINISHED_ABORTED
        self._reservations.finish(request, next(iter(self.waiting), None), aborted=aborted)
        self._prefilling.pop(request.request_id, None)
        return super()._free_request(request, *args, **kwargs)

    # What other modules use.

    @property
    def num_plannable_tokens(self) -> int:
        """Tokens whose KV fits in all blocks together."""
        return (self._pool.num_gpu_blocks - 1) // self._num_kv_groups * self.block_size

    @property
    def num_held_blocks(self) -> int:
        """Blocks held for future members of groups without a running one."""
        return self._reservations.num_pinned_blocks

    # Admission.

    def _admit(self) -> FCFSRequestQueue:
        """Take the requests out of the queue that may begin in this step, and reserve blocks.

        Requests keep their order, but those whose grammar isn't compiled yet hold no other up.
        """
        now, admitted, not_ready = self._now, FCFSRequestQueue(), list[Request]()
        now.budget, most = now.prefill_budget, self.scheduler_config.long_prefill_token_threshold
        for request in self._prefilling.values():
            now.prefill(request, request.num_tokens - request.num_computed_tokens, most)
        running = self.running if self.lora_config is not None else ()
        adapters = {other.lora_request.lora_int_id for other in running if other.lora_request}
        num_slots = self.max_num_running_reqs - len(self.running)
        while self.waiting and len(admitted) < num_slots and now.budget > 0:
            request = self.waiting.peek_request()
            if not is_ready(request):
                not_ready.append(self.waiting.pop_request())
                continue
            if (self.running or admitted) and not self._may_begin(request, adapters):
                break
            num_tokens = self._reservations.num_to_prefill(request)
            growth = self._growth_of(request, num_tokens)
            if (self.running or admitted) and not self._has_room_for(request, growth):
                break
            admitted.add_request(self.waiting.pop_request())
            if request.lora_request is not None:
                adapters.add(request.lora_request.lora_int_id)
            self._reservations.admit(request, growth)
            now.num_prefill_ahead += num_tokens
            now.prefill(request, num_tokens, most)
        for request in reversed(not_ready):
            self.waiting.prepend_request(request)
        now.admitted = list(admitted)
        return admitted

    def _may_begin(self, request: Request, adapters: set[int]) -> bool:
        """Whether a request may begin beside others, which have these LoRA adapters."""
        if self.lora_config is not None and request.lora_request is not None:
            wanted = adapters | {request.lora_request.lora_int_id}
            if len(wanted) > self.lora_config.max_loras:
                return False  # vLLM would let later ones pass it
        return self._reservations.may_begin(request, self._now.prefilled)

    def _requeue(self, waiting: RequestQueue) -> None:
        """Put what didn't get into the step back in front of the waiting requests."""
        now, left, self.waiting = self._now, self.waiting, waiting
        for request in now.admitted:
            if request.status != RequestStatus.RUNNING:
                self._reservations.requeue(request)
        now.admitted = [each for each in now.admitted if each.status == RequestStatus.RUNNING]
        for request in reversed(list(left)):
            now.num_preempted += self._note_preempted(request)
            self.waiting.prepend_request(request)

    def _note_preempted(self, request: Request) -> bool:
        """Give a waiting request's blocks back if it was running; returns whether it was."""
        self._prefilling.pop(request.request_id, None)
        return self._reservations.requeue(request)

    def _has_room_for(self, request: Request, growth: Growth) -> bool:
        peak = self._reservations.peak_with(request, growth)
        return peak + self._num_unplanned <= self._num_blocks

    def _growth_of(self, request: Request, num_tokens: int) -> Growth:
        """The blocks of a request whose `num_tokens` are prefilled after all that are ahead."""
        ahead = max(0, self._now.num_prefill_ahead + num_tokens - self._now.prefill_budget)
        return self._reservations.growth_of(request, self._step_after(ahead))

    # Before vLLM's own step.

    def _begin_step(self) -> None:
        self._step += 1
        ahead = self._now.num_prefill_ahead
        self._now = StepState(self.chunk_size, self.chunk_size, num_prefill_ahead=ahead)
        self._reservations.advance(self._step, self._prefilling)
        # vLLM schedules them in order: no decode waits for a prefill.
        last = self.running[len(self.running) - len(self._prefilling) :]
        if any(request.request_id not in self._prefilling for request in last):
            self.running.sort(key=lambda request: request.request_id in self._prefilling)
        self._limit_tokens()
        self._make_room_for_first()
        self._put_victims_last()

    def _put_victims_last(self) -> None:
        """If the step would run out of blocks, choose which requests vLLM preempts: the last ones.

        They have the fewest tokens to compute again. Prefixes are unpinned before any preemption.
        """
        size, num_blocks, num_tokens = self.block_size, 0, self._now.prefill_budget
        most = (len(self.running) + num_tokens // size) * self._num_kv_groups
        if most <= self._pool.get_num_free_blocks():  # without a look at each request
            return
        for request in self._prefilling.values():
            begin = request.num_computed_tokens
            end = min(request.num_tokens, begin + num_tokens)
            num_blocks += -(-end // size) - -(-begin // size)
            num_tokens -= end - begin
        decoding = self.running[: len(self.running) - len(self._prefilling)]
        num_blocks += sum(not request.num_computed_tokens % size for request in decoding)
        num_needed = num_blocks * self._num_kv_groups
        if num_needed <= self._pool.get_num_free_blocks():
            return
        self._reservations.unpin_all()
        missing, victims = num_needed - self._pool.get_num_free_blocks(), list[Request]()
        for request in sorted(self.running, key=self._reservations.computed_work)[:-1]:
            if missing <= 0:
                break
            victims.insert(0, request)
            missing -= max(1, self._reservations.computed_work(request) // size)
        self.running[:] = [request for request in self.running if request not in victims] + victims

    def _make_room_for_first(self) -> None:
        """Unpin unused prefixes that block the first waiting request."""
        first = next(iter(self.waiting), None)
        if first is None or not self.num_held_blocks:
            return
        if not self.running and self._did_nothing:  # its own group's prefix blocks it
            self._reservations.unpin_all()
            return
        size = self.block_size
        num_missing = -(-first.num_tokens // size) - first.num_computed_tokens // size
        free = self._pool.get_num_free_blocks()
        growth = self._growth_of(first, self._reservations.num_to_prefill(first))
        if num_missing * self._num_kv_groups > free or not self._has_room_for(first, growth):
            self._reservations.unpin_all(but=first)

    def _limit_tokens(self) -> None:
        """Set how many tokens the step may have."""
        num_decode = (len(self.running) - len(self._prefilling)) * self._tokens_per_decode
        num_prefill = later = self.chunk_size
        # Spreading prefill pays only if its steps decode too.
        average = self._reservations.average_waiting() if self._paces else None
        if average is not None and (num_decode or not self._prefilling):
            num_prefill, later = self._pace.tokens(
                average,
                self._reservations.num_left,
                self._reservations.projection.num_blocks(),
                is_running=bool(self.running),
                is_prefilling=bool(self._prefilling),
            )
        self._now.prefill_budget = max(1, min(self.chunk_size - num_decode, num_prefill))
        self._now.later_prefill_budget = max(1, min(self._now.prefill_budget, later))
        self.max_num_scheduled_tokens = max(1, min(self.chunk_size, num_decode + num_prefill))

    # After vLLM's own step.

    def _end_step(self, output: SchedulerOutput) -> None:
        now, scheduled = self._now, output.num_scheduled_tokens
        now.num_cached_tokens = sum(
            request.num_computed_tokens - scheduled.get(request.request_id, 0)
            for request in now.admitted
        )
        now.num_prefill_ahead = 0
        for request in (*self._prefilling.values(), *now.admitted):
            num_tokens = scheduled.get(request.request_id, 0)
            prefix = self._reservations.num_prefix_tokens(request)
            now.count_prefill(request.num_computed_tokens - num_tokens, num_tokens, prefix)
            self._prefilling.pop(request.request_id, None)
            start = self._step + 1  # this step gives it a token
            if request.is_prefill_chunk:
                self._prefilling[request.request_id] = request
                now.num_prefill_ahead += request.num_tokens - request.num_computed_tokens
                start = self._step_after(now.num_prefill_ahead)
            self._reservations.move(request, start)
        self._pace.used(now.num_prefill_tokens)
        self._reservations.unpin_taken_over()
        now.num_used_blocks = self._pool.num_gpu_blocks - 1 - self._pool.get_num_free_blocks()
        num_planned = self._reservations.projection.num_blocks()
        self._num_unplanned = max(0, now.num_used_blocks // self._num_kv_groups - num_planned)

    def _step_after(self, num_tokens: int) -> int:
        """Step by which so many tokens are prefilled that this one doesn't prefill."""
        return self._step - -num_tokens // self._now.later_prefill_budget

    def _row(self, output: SchedulerOutput, begun_at: float) -> StepRow:
        now, self._started_at = self._now, self._started_at or begun_at
        from batchllm_operator.vllm_plugin.scheduler.trace import StepRow  # needs pyarrow

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
            num_used_blocks=now.num_used_blocks,
            num_held_blocks=self.num_held_blocks,
            num_blocks=self._pool.num_gpu_blocks - 1,
        )
