"""A scheduler for vLLM that knows the plan (paper, Sec. 4.3).

It is vLLM's own, which fills a step with running requests first, then with waiting ones, and
frees, preempts and caches blocks. What is added, from outside:

- waiting requests are admitted by the KV blocks that all running ones will hold in the steps to
  come (`BlockProjection`; Algorithm 2), not by a count of requests;
- the blocks of a group's prefix are held until the last member has been admitted, and are the
  first to be reused when no one needs them (`groups`);
- the tokens of a step are limited so that prefill is spread evenly (`Pace`).

Use it with `LLM(scheduler_cls="batchllm_operator.vllm_plugin.scheduler.BatchLLMScheduler")`;
requests carry `RequestHints`. A request without them is a group of its own.
"""

from __future__ import annotations

import time
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.request import Request, RequestStatus

from batchllm_operator.vllm_plugin.groups import Group, Groups
from batchllm_operator.vllm_plugin.hints import RequestHints, SchedulerSettings
from batchllm_operator.vllm_plugin.output_estimates import OutputEstimates
from batchllm_operator.vllm_plugin.pacing import Pace, Waiting, fill_share
from batchllm_operator.vllm_plugin.projection import BlockProjection, Growth
from batchllm_operator.vllm_plugin.trace import StepRow, StepTrace
from batchllm_operator.vllm_plugin.waiting_queue import GatedQueue

_REBUILD_STEPS = 64
_RESERVED_PART = 1000  # of the blocks, for a prefill that takes a step longer than planned


@dataclass(slots=True, eq=False)
class _Plan:
    """What is planned for one request."""

    group: Group
    num_prefix_tokens: int
    estimate: int
    """Output tokens, as given."""
    share: Waiting
    """Its part of what waits."""
    growth: Growth | None = None
    """Set while it runs."""
    outgrown: int = 0
    """Its output's length when it last outgrew its estimate."""


@dataclass(slots=True)
class _Prefill:
    """Prompt tokens of a step, by kind."""

    num_distinct_tokens: int = 0
    num_prefix_tokens: int = 0
    num_cached_tokens: int = 0

    @property
    def num_tokens(self) -> int:
        """That are computed."""
        return self.num_distinct_tokens + self.num_prefix_tokens


class BatchLLMScheduler(AsyncScheduler):
    """vLLM's scheduler with planned admission, prefix lifetimes and paced prefill.

    Raises:
        SpecError: `additional_config["batchllm"]` isn't `SchedulerSettings`.
        OSError: the trace can't be written.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._pool = self.kv_cache_manager.block_pool
        self._tokens_per_decode = 1 + self.num_spec_tokens
        self._delay = 1 if self.scheduler_config.async_scheduling else 0
        self._limit = self.max_num_scheduled_tokens
        self._is_scheduling = False
        self._did_nothing = False
        self._trace: StepTrace | None = None
        self._begin(SchedulerSettings.from_additional_config(self.vllm_config.additional_config))
        self.waiting = GatedQueue(self)

    def begin(self, settings: SchedulerSettings) -> None:
        """Start afresh with other settings, and with nothing learned or traced.

        Raises:
            RuntimeError: requests are still waiting or running.
            OSError: the trace can't be written.
        """
        if not self.is_idle():
            raise RuntimeError("the scheduler still has requests")
        self._close_trace()
        self._begin(settings)

    def _begin(self, settings: SchedulerSettings) -> None:
        self._settings = settings
        self._num_blocks = self._num_blocks_to_plan(settings.memory_threshold)
        self._most_tokens = min(self._limit, settings.chunk_size or self._limit)
        self._step = 0
        self._plans: dict[str, _Plan] = {}
        self._projection = BlockProjection(self.block_size)
        self._groups = Groups(self.kv_cache_manager, self._projection)
        self._estimates = OutputEstimates()
        self._pace = Pace(self._num_blocks)
        self._sums = Waiting()
        self._ends: defaultdict[int, list[str]] = defaultdict(list)
        self._prefilling: dict[str, Request] = {}
        self._admitted: list[Request] = []  # in this step
        self._num_prefill_ahead = 0  # tokens of running requests, and of those admitted so far
        self._num_prefill_tokens = self._most_tokens  # that this step may compute
        self._num_prefill_tokens_later = self._most_tokens  # and those that follow
        self._num_unplanned = 0  # blocks in use that aren't in the projection
        self._num_seen = 0
        self._num_preempted = 0  # in this step
        self._started_at: float | None = None
        if settings.trace_path is not None:
            self._trace = StepTrace(Path(settings.trace_path))

    def _num_blocks_to_plan(self, threshold: float | None) -> int:
        num_blocks = self.num_plannable_tokens // self.block_size
        if threshold is not None:
            return int(num_blocks * threshold)
        return num_blocks - max(2, num_blocks // _RESERVED_PART)

    # What vLLM calls.

    def add_request(self, request: Request) -> None:
        if request.request_id not in self.requests:
            self._plan(request)
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
        prefill = self._end_step(output)
        if self._trace is not None:
            self._trace.add(self._row(output, prefill, begun_at))
        return output

    def reset_prefix_cache(self, *args: Any, **kwargs: Any) -> bool:
        self._groups.unpin_all()  # vLLM refuses while blocks are held
        done: bool = super().reset_prefix_cache(*args, **kwargs)
        return done

    def shutdown(self) -> None:
        self._close_trace()
        super().shutdown()

    def _free_request(self, request: Request, *args: Any, **kwargs: Any) -> Any:
        self._forget(request)
        return super()._free_request(request, *args, **kwargs)

    @property
    def num_plannable_tokens(self) -> int:
        """Tokens whose KV all blocks together have room for."""
        # Layers of different kinds hold blocks of their own for the same tokens.
        num_groups = len(self.kv_cache_config.kv_cache_groups)
        return (self._pool.num_gpu_blocks - 1) // num_groups * self.block_size

    @property
    def num_held_blocks(self) -> int:
        """Blocks held for members to come of groups in which nobody runs."""
        return self._groups.num_pinned_blocks

    def is_idle(self) -> bool:
        """Whether no request is left, nor anything that was held or counted for one."""
        return (
            not self._plans
            and self._groups.is_empty
            and not self._prefilling
            and self._projection.num_blocks() == 0
            and self._sums.num_requests == 0
        )

    # What the queue asks and tells.

    def is_closed_for(self, request: Request) -> bool:
        """Whether a waiting request has to wait on: see `Gate`."""
        if not self._is_scheduling or not self.running:
            return False
        plan = self._plans[request.request_id]
        if not self._groups.has_prefix_for(plan.group):
            return True
        num_prefix_blocks = self._groups.num_new_blocks(plan.group, request)
        growth = self._growth_if_admitted(request, plan)
        peak = self._projection.peak_with(growth, num_prefix_blocks)
        return peak + self._num_unplanned > self._num_blocks

    def admitted(self, request: Request) -> None:
        """A waiting request was taken from the queue to run."""
        plan = self._plans[request.request_id]
        growth = self._growth_if_admitted(request, plan)
        self._num_prefill_ahead += self._num_to_prefill(request, plan)
        self._expect(request, plan, growth)
        self._groups.admitted(plan.group, request, growth.end)
        self._sums.add(plan.share, -1)
        self._admitted.append(request)

    def put_back(self, request: Request) -> None:
        """A request is in the queue again: it was preempted, or can't be scheduled yet."""
        plan = self._plans[request.request_id]
        if plan.growth is not None:
            self._num_preempted += request.status == RequestStatus.PREEMPTED
            self._stop(request, plan, ended=False)
            self._sums.add(plan.share)

    def _close_trace(self) -> None:
        if self._trace is not None:
            self._trace.close()
            self._trace = None

    # Before and after vLLM's own step.

    def _begin_step(self) -> None:
        self._step += 1
        self._num_preempted = 0
        self._projection.advance(self._step)
        if self._step % _REBUILD_STEPS == 0:
            self._rebuild()
        else:
            for request_id in self._ends.pop(self._step, ()):
                self._extend_overdue(request_id)
        if self._prefilling:
            self._put_decodes_first()
        self._relieve()
        self._limit_tokens()

    def _end_step(self, output: SchedulerOutput) -> _Prefill:
        prefill = _Prefill()
        for request in self._admitted:
            begin = request.num_computed_tokens - output.num_scheduled_tokens.get(
                request.request_id, 0
            )
            prefill.num_cached_tokens += begin
        self._num_prefill_ahead = 0
        for request in (*self._prefilling.values(), *self._admitted):
            self._count_prefill(request, output, prefill)
            self._follow_prefill(request)
        self._admitted.clear()
        self._pace.used(prefill.num_tokens)
        self._groups.unpin_taken_over()
        self._num_unplanned = max(0, self._num_used_blocks() - self._projection.num_blocks())
        return prefill

    def _count_prefill(self, request: Request, output: SchedulerOutput, into: _Prefill) -> None:
        num_tokens = output.num_scheduled_tokens.get(request.request_id, 0)
        plan = self._plans.get(request.request_id)
        if num_tokens == 0 or plan is None:
            return
        end = request.num_computed_tokens
        num_prefix = max(0, min(end, plan.num_prefix_tokens) - (end - num_tokens))
        into.num_prefix_tokens += num_prefix
        into.num_distinct_tokens += num_tokens - num_prefix

    def _num_used_blocks(self) -> int:
        return int(self._pool.num_gpu_blocks - 1 - self._pool.get_num_free_blocks())

    def _row(self, output: SchedulerOutput, prefill: _Prefill, begun_at: float) -> StepRow:
        if self._started_at is None:
            self._started_at = begun_at
        return StepRow(
            step=self._step,
            start_s=begun_at - self._started_at,
            scheduling_s=time.perf_counter() - begun_at,
            num_decode_tokens=output.total_num_scheduled_tokens - prefill.num_tokens,
            num_distinct_tokens=prefill.num_distinct_tokens,
            num_prefix_tokens=prefill.num_prefix_tokens,
            num_cached_tokens=prefill.num_cached_tokens,
            num_scheduled=len(output.num_scheduled_tokens),
            num_running=len(self.running),
            num_waiting=len(self.waiting),
            num_preempted=self._num_preempted,
            num_used_blocks=self._num_used_blocks(),
            num_held_blocks=self.num_held_blocks,
            num_blocks=self._pool.num_gpu_blocks - 1,
        )

    def _follow_prefill(self, request: Request) -> None:
        plan = self._plans.get(request.request_id)
        self._prefilling.pop(request.request_id, None)
        if plan is None or plan.growth is None:
            return
        if request.is_prefill_chunk:
            self._prefilling[request.request_id] = request
            self._num_prefill_ahead += request.num_tokens - request.num_computed_tokens
            self._renew(request, plan, self._step + self._num_steps(self._num_prefill_ahead))
        elif plan.growth.start != self._step:
            self._renew(request, plan, self._step + 1)  # with the token that it gets in this step

    def _num_steps(self, num_tokens: int) -> int:
        """Steps after this one that so many tokens of prefill take."""
        return -(-num_tokens // self._num_prefill_tokens_later)

    def _put_decodes_first(self) -> None:
        """So that no decode waits for a prefill; among prefills, the order stays."""
        tail = self.running[-len(self._prefilling) :]
        if any(request.request_id not in self._prefilling for request in tail):
            self.running.sort(key=lambda request: request.request_id in self._prefilling)

    def _relieve(self) -> None:
        """Where requests are about to find no block, see to who has to go."""
        if not self.running:
            self._make_room_for_first()
            return
        num_free = self._pool.get_num_free_blocks()
        num_needed = sum(self._num_missing_blocks(each) for each in self._prefilling.values())
        if num_free >= num_needed + len(self.running):
            return
        size = self.block_size
        num_needed += sum(
            not request.num_computed_tokens % size
            for request in self.running
            if request.request_id not in self._prefilling
        )
        if num_needed <= num_free:
            return
        self._groups.unpin_all()
        if num_needed > self._pool.get_num_free_blocks():  # vLLM preempts the last one
            self.running.sort(key=self._computed_work, reverse=True)

    def _make_room_for_first(self) -> None:
        """So that held prefixes don't keep the first request out for ever."""
        first = self._next_waiting()
        if first is None or not self.num_held_blocks:
            return
        if self._did_nothing:  # though its own group's prefix was all that was held
            self._groups.unpin_all()
        elif self._num_missing_blocks(first) > self._pool.get_num_free_blocks():
            self._groups.unpin_all(but=self._plans[first.request_id].group)

    def _num_missing_blocks(self, request: Request) -> int:
        """Blocks of a request's tokens that it doesn't hold yet."""
        num_blocks = -(-request.num_tokens // self.block_size)
        return num_blocks - request.num_computed_tokens // self.block_size

    def _computed_work(self, request: Request) -> int:
        """Tokens that would have to be computed again."""
        group = self._plans[request.request_id].group
        shared = group.num_prefix_blocks * self.block_size if group.num_running > 1 else 0
        return max(request.num_computed_tokens - shared, 0)

    def _limit_tokens(self) -> None:
        """Set how many tokens the step may have."""
        num_decoding = len(self.running) - len(self._prefilling)
        num_prefill = later = self._most_tokens
        if self._settings.pace and self._sums.num_requests:
            num_prefill, later = self._paced_tokens()
        num_decode = num_decoding * self._tokens_per_decode
        self._num_prefill_tokens = max(1, min(self._most_tokens - num_decode, num_prefill))
        self._num_prefill_tokens_later = max(1, min(self._num_prefill_tokens, later))
        limit = num_decode + num_prefill
        self.max_num_scheduled_tokens = max(1, min(self._most_tokens, limit))

    def _paced_tokens(self) -> tuple[int, int]:
        """Prompt tokens for this step, and for those that follow."""
        request = self._sums.average(self._estimates.scale, self.block_size)
        to_come = max(0, (self._settings.num_requests or 0) - self._num_seen)
        num_requests = self._sums.num_requests + to_come
        if num_requests * request.final_blocks + self._projection.num_blocks() <= self._num_blocks:
            return self._most_tokens, self._most_tokens  # all that is left has room
        if not self.running:
            self._pace.fill_share = fill_share(
                request,
                num_requests,
                self._num_blocks,
                self._most_tokens,
                self._settings.step_cost,
            )
        return int(self._pace.next_step(request)), int(self._pace.rate(request))

    # Plans of requests.

    def _plan(self, request: Request) -> None:
        params = request.sampling_params
        hints = RequestHints.from_extra_args(params.extra_args if params else None)
        if hints is None:
            hints = RequestHints(group_id=-1)
            group_id: object = request.request_id
        else:
            group_id = hints.group_id
        size = self.block_size
        num_prefix_blocks = min(hints.num_prefix_tokens, request.num_prompt_tokens - 1) // size
        group = self._groups.join(group_id, num_prefix_blocks, hints.group_size)
        estimate = min(hints.num_output_tokens or request.max_tokens, request.max_tokens)
        num_prompt_blocks = request.num_prompt_tokens / size - num_prefix_blocks
        part = num_prefix_blocks / max(hints.group_size, 1)
        waiting = Waiting(
            num_requests=1,
            num_prefill_tokens=(num_prompt_blocks + part) * size,
            num_output_tokens=estimate,
            num_prompt_blocks=num_prompt_blocks + part + 0.5,  # the last one isn't full
            num_prompt_block_steps=(num_prompt_blocks + part + 0.5) * estimate,
            num_output_block_steps=estimate**2 / (2 * size),
        )
        self._plans[request.request_id] = _Plan(group, hints.num_prefix_tokens, estimate, waiting)
        self._sums.add(waiting)
        self._num_seen += 1

    def _growth(self, request: Request, plan: _Plan, start: int) -> Growth:
        """Of a request whose known tokens are all computed in a step."""
        on_its_way = request.num_output_placeholders
        num_output = request.num_output_tokens + on_its_way
        longest = self._estimates.rather_long(plan.estimate, request.max_tokens)
        if longest <= num_output:
            longest = self._estimates.extended(num_output, request.max_tokens)
        end = start + longest - num_output + self._delay
        shared = plan.group.num_prefix_blocks
        return Growth(start, end, request.num_tokens + on_its_way, shared)

    def _growth_if_admitted(self, request: Request, plan: _Plan) -> Growth:
        """Of a waiting request, behind all prefill that is to be done before it."""
        ahead = self._num_prefill_ahead + self._num_to_prefill(request, plan)
        num_steps = self._num_steps(max(0, ahead - self._num_prefill_tokens))
        return self._growth(request, plan, self._step + num_steps)

    def _num_to_prefill(self, request: Request, plan: _Plan) -> int:
        """Tokens that a waiting request will find no KV for."""
        group = plan.group
        num_found = group.num_prefix_blocks - self._groups.num_new_blocks(group, request)
        return request.num_tokens - num_found * self.block_size

    def _expect(self, request: Request, plan: _Plan, growth: Growth) -> None:
        plan.growth = growth
        self._projection.add(growth)
        self._ends[growth.end].append(request.request_id)

    def _renew(self, request: Request, plan: _Plan, start: int) -> None:
        """Count a running request anew, as one that grows from a step on."""
        if plan.growth is not None:
            self._projection.add(plan.growth, sign=-1)
        growth = self._growth(request, plan, start)
        self._expect(request, plan, growth)
        self._groups.ends_at(plan.group, growth.end)

    def _extend_overdue(self, request_id: str) -> None:
        """A request was to have ended by now."""
        plan, request = self._plans.get(request_id), self.requests.get(request_id)
        if plan is None or request is None or plan.growth is None or plan.growth.end > self._step:
            return
        if request_id not in self._prefilling:
            self._estimates.learn(plan.estimate, request.num_output_tokens, plan.outgrown)
            plan.outgrown = request.num_output_tokens
        self._renew(request, plan, max(self._step, plan.growth.start))

    def _rebuild(self) -> None:
        """Count everything again: estimates have changed, and steps may have been missed."""
        for request_id in self._ends.pop(self._step, ()):
            self._extend_overdue(request_id)
        self._projection.clear()
        self._ends.clear()
        for request in self.running:
            plan = self._plans[request.request_id]
            start = self._step
            if request.request_id in self._prefilling and plan.growth is not None:
                start = max(start, plan.growth.start)
            self._expect(request, plan, self._growth(request, plan, start))
            plan.group.last_end = 0
        for request in self.running:
            plan = self._plans[request.request_id]
            if plan.growth is not None:
                plan.group.last_end = max(plan.group.last_end, plan.growth.end)
        self._groups.recount()

    def _stop(self, request: Request, plan: _Plan, *, ended: bool) -> None:
        """A request no longer runs."""
        if plan.growth is not None:
            self._projection.add(plan.growth, sign=-1)
            plan.growth = None
            self._groups.left(plan.group, request, self._next_waiting(), ended=ended)
        self._prefilling.pop(request.request_id, None)

    def _forget(self, request: Request) -> None:
        """A request is at its end, whether it ran or not. Its blocks are still its own."""
        plan = self._plans.pop(request.request_id, None)
        if plan is None:
            return
        if plan.growth is not None:
            self._estimates.learn(plan.estimate, request.num_output_tokens, plan.outgrown)
            self._stop(request, plan, ended=True)
        else:
            self._sums.add(plan.share, -1)
            self._groups.never_ran(plan.group)
        if not self._plans:
            self._groups.forget_all()

    def _next_waiting(self) -> Request | None:
        return self.waiting.peek_request() if len(self.waiting) else None
