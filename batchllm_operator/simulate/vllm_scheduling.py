"""Drives vLLM's scheduler and KV cache manager, or ours on top of them, without a model.

The scheduler is real, so steps, blocks and preemptions are exact. Tokens are made up, output
lengths are given, and `cost.step_seconds` predicts the time of steps.
"""

import time
from dataclasses import fields, replace
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

# First, because it sets vLLM's environment.
from batchllm_operator.simulate.vllm_config import make_scheduler  # isort: split

from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request

from batchllm_operator.cost import StepWork, matrix_seconds, step_seconds
from batchllm_operator.errors import EngineError, PlanError
from batchllm_operator.progress import Progress
from batchllm_operator.simulate.machine import ARRIVALS_PER_S, Machine, Policy
from batchllm_operator.simulate.run import Run, Timeline
from batchllm_operator.simulate.workload import Workload
from batchllm_operator.vllm_plugin.scheduler.hints import RequestHints, SchedulerSettings, StepCost
from batchllm_operator.vllm_plugin.scheduler.pacing import num_to_feed

_ANY_TOKEN, _STOP_TOKEN = 5, 6
_SPARE: Final = 4
"""A KV cache of so many times the blocks that all requests fill is as good as an endless one."""
_NO_LIMIT: Final = 1 << 20  # output tokens, if a stop token ends them


def simulate(
    workload: Workload,
    policy: Policy,
    machine: Machine,
    *,
    settings: SchedulerSettings | None = None,
    arrivals_per_s: float = ARRIVALS_PER_S,
    seed: int = 0,
) -> Run:
    """Run a workload to its end.

    Args:
        settings: of our scheduler.
        arrivals_per_s: for policies with arrivals by time.
        seed: for shuffled orders.

    Raises:
        PlanError: a request doesn't fit into the KV cache.
        EngineError: the scheduler doesn't finish the requests.
    """
    return _Simulation(workload, policy, machine, settings, arrivals_per_s, seed).run()


class _Simulation:
    def __init__(
        self,
        workload: Workload,
        policy: Policy,
        machine: Machine,
        settings: SchedulerSettings | None,
        arrivals_per_s: float,
        seed: int,
    ) -> None:
        self._workload, self._policy, self._machine = workload, policy, machine
        self._works: list[StepWork] = []
        self._arrivals_per_s = arrivals_per_s
        self._lengths = workload.tokens.lengths
        self._final_lengths = self._lengths + workload.output_tokens
        size = machine.block_size
        self._shared = workload.num_prefix_tokens // size * size  # tokens that attention can share
        self._sizes = workload.group_sizes
        self._order = np.arange(len(workload))
        if policy.order == "shuffled":
            self._order = np.random.default_rng(seed).permutation(self._order)
        self._scheduler = self._make_scheduler(settings)
        init_none_hash(sha256)
        self._hasher = get_request_block_hasher(size, sha256)
        self._generated = np.zeros(len(workload), dtype=np.int64)
        self._highest = np.zeros(len(workload), dtype=np.int64)  # tokens ever computed
        self._columns: dict[str, list[float]] = {field.name: [] for field in fields(Timeline)}
        self._clock_s = self._idle_s = 0.0
        self._num_arrived = self._num_finished = 0  # in all, and in the last step

    def run(self) -> Run:
        label = f"{self._workload.name}, {self._policy.name}"
        with Progress(label, len(self._workload), unit="requests", announce=False) as progress:
            while (
                self._num_arrived < len(self._workload) or self._scheduler.has_unfinished_requests()
            ):
                self._arrive()
                self._num_finished = self._step()
                progress.advance(self._num_finished)
        if not np.array_equal(self._generated, self._workload.output_tokens):
            raise EngineError(f"{label}: requests ended with too few tokens, or too many")
        columns: dict[str, Any] = {
            name: np.array(column, dtype=np.float64 if name.endswith("_s") else np.int64)
            for name, column in self._columns.items()
        }
        return Run(
            workload=self._workload.name,
            policy=self._policy.name,
            num_prompt_tokens=self._workload.tokens.num_tokens,
            chunk_size=getattr(
                self._scheduler, "chunk_size", self._scheduler.max_num_scheduled_tokens
            ),
            optimal_saving_ratio=self._workload.optimal_saving_ratio(self._machine.block_size),
            timeline=Timeline(**columns),
            works=self._works,
        )

    def _make_scheduler(self, settings: SchedulerSettings | None) -> Any:
        """The policy's scheduler for requests of this length.

        Raises `PlanError`: a request doesn't fit into the KV cache.
        """
        workload, machine = self._workload, self._machine
        room = (machine.num_blocks - 1) * machine.block_size
        most_tokens = int(self._final_lengths.max(initial=0))
        if most_tokens > room:
            idx = int(self._final_lengths.argmax())
            raise PlanError(
                f"request {idx} has {most_tokens:,} tokens with its output; the KV cache has room"
                f" for {room:,}"
            )
        # vLLM makes an object for each block, which takes ten seconds for those of a tiny model.
        num_used = int((-(-self._final_lengths // machine.block_size)).sum())
        fitting = replace(machine, num_blocks=min(machine.num_blocks, _SPARE * num_used + 1))
        if settings is None:
            token_s, weights_s = matrix_seconds(machine.model, machine.gpu, machine.num_gpus)
            cost = StepCost(token_s, weights_s, machine.gpu.step_overhead_s)
            settings = SchedulerSettings(num_requests=len(workload), step_cost=cost)
        return make_scheduler(self._policy, fitting, max(most_tokens, 1) + 1, settings)

    def _arrive(self) -> None:
        """Add the requests that have arrived by now to the scheduler."""
        if self._num_arrived == len(self._workload):
            return
        end = len(self._workload)
        if self._policy.arrival == "as_fed":
            end = min(end, self._num_arrived + self._num_to_feed())
        elif self._policy.arrival != "at_once":
            if self._scheduler.has_unfinished_requests():
                return
            if self._policy.arrival == "by_time":
                first_s = (self._num_arrived + 1) / self._arrivals_per_s
                self._idle_s = max(first_s - self._clock_s, 0.0)
                self._clock_s += self._idle_s
            end = min(self._batch_end(), max(self._num_there(), self._num_arrived + 1))
        for idx in self._order[self._num_arrived : end].tolist():
            self._scheduler.add_request(self._request(idx))
        self._num_arrived = end

    def _num_to_feed(self) -> int:
        num_in_flight = self._scheduler.get_num_unfinished_requests()
        max_num_seqs = self._scheduler.max_num_running_reqs
        return num_to_feed(num_in_flight, self._num_finished, max_num_seqs)

    def _num_there(self) -> int:
        """Requests that have arrived by now, even if the scheduler hasn't got them yet."""
        if self._policy.arrival != "by_time":
            return len(self._workload)
        return min(int(self._clock_s * self._arrivals_per_s), len(self._workload))

    def _batch_end(self) -> int:
        """The end of the next batch: as many requests as memory holds at their longest."""
        idxs = self._order[self._num_arrived :]
        blocks = np.cumsum(-(-self._final_lengths[idxs] // self._machine.block_size))
        fitting = int(np.searchsorted(blocks, self._machine.num_blocks - 1, side="right"))
        return self._num_arrived + max(1, min(fitting, self._policy.max_num_seqs))

    def _request(self, idx: int) -> Any:
        workload = self._workload
        output, estimated = int(workload.output_tokens[idx]), int(workload.estimated_tokens[idx])
        hints = RequestHints(
            group_id=int(workload.group_ids[idx]),
            num_prefix_tokens=int(workload.num_prefix_tokens[idx]) if self._sizes[idx] > 1 else 0,
            group_size=int(self._sizes[idx]),
            num_output_tokens=estimated,
        )
        params = SamplingParams(
            max_tokens=workload.max_output_tokens
            # A correct estimate is also the limit, as in jobs that always reach theirs.
            or (output if output == estimated else _NO_LIMIT),
            stop_token_ids=[_STOP_TOKEN],
            extra_args=hints.to_extra_args(),
        )
        prompt = workload.tokens.prompt(idx).tolist()
        return Request(str(idx), prompt, params, None, block_hasher=self._hasher)

    def _step(self) -> int:
        """One step of the engine; returns how many requests it ended."""
        start_s = time.thread_time()
        output = self._scheduler.schedule()
        scheduling_s = time.thread_time() - start_s
        request_ids = list(output.num_scheduled_tokens)
        idxs = np.array(list(map(int, request_ids)), dtype=np.int64)
        num_tokens = np.array(list(output.num_scheduled_tokens.values()), dtype=np.int64)
        num_preempted = len(output.preempted_req_ids or ())
        if not request_ids and not num_preempted:
            raise EngineError(f"{self._policy.name}: requests wait, and none can be scheduled")
        begins = _begins(output)
        ends = begins + num_tokens
        is_sampled = ends == self._lengths[idxs] + self._generated[idxs]
        is_decode = is_sampled & (begins >= self._lengths[idxs]) & (num_tokens == 1)
        sampled = idxs[is_sampled]
        self._generated[sampled] += 1
        has_ended = is_sampled & (self._generated[idxs] == self._workload.output_tokens[idxs])
        prefix_ends = np.minimum(ends, self._workload.num_prefix_tokens[idxs])
        num_prefix = np.maximum(prefix_ends - begins, 0)[~is_decode].sum()
        num_prefill = num_tokens[~is_decode].sum()
        recomputed = np.maximum(np.minimum(self._highest[idxs], ends) - begins, 0)
        self._highest[idxs] = np.maximum(self._highest[idxs], ends)
        work = self._work(idxs, begins, num_tokens, is_decode, len(sampled))
        self._works.append(work)
        machine = self._machine
        step_s = step_seconds(work, machine.model, machine.gpu, machine.num_gpus)
        self._clock_s += step_s
        self._note(
            num_decode_tokens=int(is_decode.sum()),
            num_distinct_tokens=int(num_prefill - num_prefix),
            num_prefix_tokens=int(num_prefix),
            num_recomputed_tokens=int(recomputed.sum()),
            num_running=len(idxs),
            num_preempted=num_preempted,
            scheduling_s=scheduling_s,
            step_s=step_s,
        )
        tokens = np.where(has_ended, _STOP_TOKEN, _ANY_TOKEN).tolist()
        made_up = [
            [token] if is_made else []
            for token, is_made in zip(tokens, is_sampled.tolist(), strict=True)
        ]
        req_idxs = {request_id: idx for idx, request_id in enumerate(request_ids)}
        made = ModelRunnerOutput(request_ids, req_idxs, made_up)
        self._scheduler.update_from_output(output, made)
        return int(has_ended.sum())

    def _note(self, **values: float) -> None:
        """Add a row to the timeline, with the requests still waiting and the blocks in use."""
        num_outside = max(self._num_there() - self._num_arrived, 0)
        pool = self._scheduler.kv_cache_manager.block_pool
        values["num_waiting"] = len(self._scheduler.waiting) + num_outside
        values["num_used_blocks"] = pool.num_gpu_blocks - 1 - pool.get_num_free_blocks()
        values["idle_s"], self._idle_s = self._idle_s, 0.0
        for name, value in values.items():
            self._columns[name].append(value)

    def _work(
        self,
        idxs: NDArray[np.int64],
        begins: NDArray[np.int64],
        num_tokens: NDArray[np.int64],
        is_decode: NDArray[np.bool_],
        num_sampled: int,
    ) -> StepWork:
        prefill, decode = ~is_decode, idxs[is_decode]
        pairs = num_tokens * begins + num_tokens * (num_tokens + 1) // 2
        contexts = begins[is_decode] + 1
        num_read = int(contexts.sum())
        if self._policy.shared_attention:
            _, firsts = np.unique(self._workload.group_ids[decode], return_index=True)
            shared = np.where(self._sizes[decode] > 1, self._shared[decode], 0)
            num_read += int(shared[firsts].sum() - shared.sum())
        return StepWork(
            num_tokens=int(num_tokens.sum()),
            num_sampled=num_sampled,
            num_prefill_pairs=int(pairs[prefill].sum()),
            num_decode_pairs=int(contexts.sum()),
            num_read_tokens=num_read,
        )


def _begins(output: SchedulerOutput) -> NDArray[np.int64]:
    """Tokens that each request of a step has computed before, some of them by others."""
    cached = output.scheduled_cached_reqs
    computed = dict(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
    computed |= {new.req_id: new.num_computed_tokens for new in output.scheduled_new_reqs}
    return np.array([computed[name] for name in output.num_scheduled_tokens], dtype=np.int64)
