"""A scheduler driven step by step without a model, with its books checked after every step."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from typing import Any

from vllm.lora.request import LoRARequest
from vllm.sampling_params import SamplingParams, StructuredOutputsParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus
from vllm.v1.structured_output.backend_types import StructuredOutputGrammar

from batchllm_operator.cost import MODEL_SHAPES, find_gpu
from batchllm_operator.simulate.machine import POLICIES, Machine
from batchllm_operator.simulate.vllm_config import make_scheduler
from batchllm_operator.vllm_plugin.scheduler.hints import RequestHints, SchedulerSettings
from batchllm_operator.vllm_plugin.scheduler.scheduler import BatchLLMScheduler

BLOCK_SIZE = 16
STOP = 1


@dataclass
class EngineSteps:
    """An engine's loop around a scheduler.

    Args:
        num_blocks: of the KV cache, beside the one that vLLM keeps for itself.
        chunk: most tokens of a step.
        lag: steps that are scheduled before the output of one is known (1 in async scheduling).
        policy: whose scheduler it is.
        changes: to the policy.
    """

    num_blocks: int = 100
    chunk: int = 64
    lag: int = 0
    policy: str = "batchllm"
    settings: SchedulerSettings = field(default_factory=SchedulerSettings)
    changes: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        machine = Machine(
            MODEL_SHAPES["Mistral-7B"],
            find_gpu("H100"),
            self.num_blocks + 1,
            block_size=BLOCK_SIZE,
            max_num_batched_tokens=self.chunk,
        )
        self.scheduler: AsyncScheduler = make_scheduler(
            replace(POLICIES[self.policy], **self.changes),
            machine,
            4096,
            self.settings,
            async_scheduling=self.lag > 0,
        )
        init_none_hash(sha256)
        self._hasher = get_request_block_hasher(BLOCK_SIZE, sha256)
        self._lengths: dict[str, int] = {}
        self._pending: deque[tuple[SchedulerOutput, Any]] = deque()
        self.finished: dict[str, int] = {}
        """Output tokens of requests that have ended."""
        self.outputs: list[SchedulerOutput] = []
        self.preempted: list[str] = []
        """Requests that lost their blocks, in order."""

    @property
    def ours(self) -> BatchLLMScheduler:
        assert isinstance(self.scheduler, BatchLLMScheduler)
        return self.scheduler

    @property
    def pool(self) -> Any:
        return self.scheduler.kv_cache_manager.block_pool

    @property
    def num_steps(self) -> int:
        return len(self.outputs)

    def add(
        self,
        request_id: str,
        prompt: list[int],
        output: int,
        *,
        hints: RequestHints | None = None,
        max_tokens: int | None = None,
        adapter: LoRARequest | None = None,
        grammar: Future[StructuredOutputGrammar] | None = None,
    ) -> None:
        """A request that will generate `output` tokens, and may wait for a grammar."""
        params = SamplingParams(
            max_tokens=max_tokens or output,
            stop_token_ids=[STOP],
            extra_args=hints.to_extra_args() if hints else None,
        )
        if grammar is not None:
            params.structured_outputs = StructuredOutputsParams(choice=["any"])
        self._lengths[request_id] = output
        options: Any = {"lora_request": adapter, "block_hasher": self._hasher}
        request = Request(request_id, prompt, params, None, **options)
        if request.structured_output_request is not None:
            request.structured_output_request.grammar = grammar  # type: ignore[assignment]
        self.scheduler.add_request(request)

    def add_alone(self, num: int, distinct: int, output: int, **options: Any) -> None:
        """Requests that share nothing."""
        for group_id in range(num):
            self.add_group(group_id, 1, prefix=0, distinct=distinct, output=output, **options)

    def add_group(
        self,
        group_id: int,
        size: int,
        *,
        prefix: int,
        distinct: int,
        output: int,
        told_size: int | None = None,
        estimate: int | None = None,
        first: int = 0,
    ) -> list[str]:
        """Members `first` to `first + size` of a group; returns their ids."""
        shared = [1000 * (group_id + 1) + position % 1000 for position in range(prefix)]
        names = [f"{group_id}.{member}" for member in range(first, first + size)]
        for name in names:
            own = [500_000 + hash_of(name, position) for position in range(distinct)]
            hints = RequestHints(group_id, prefix, told_size or size, estimate or output)
            most = output if estimate is None else 4000
            self.add(name, shared + own, output, hints=hints, max_tokens=most)
        return names

    def step(self) -> SchedulerOutput:
        """Schedule a step, and give the scheduler the outputs that have come by then."""
        was_running = {request.request_id for request in self.scheduler.running}
        decoding = {each.request_id for each in self.scheduler.running if not each.is_prefill_chunk}
        num_free = self.num_blocks - self.num_used_blocks
        output = self.scheduler.schedule()
        self.outputs.append(output)
        self.preempted += [
            name
            for name in sorted(was_running)
            if self.scheduler.requests[name].status == RequestStatus.PREEMPTED
        ]
        if self.lag == 0 and len(decoding) <= self.chunk and num_free > len(was_running):
            # None waits for a prefill. (Where memory is short, the next victim may.)
            assert decoding - set(self.preempted) <= output.num_scheduled_tokens.keys()
        self._pending.append((output, self._sampled(output)))
        while len(self._pending) > self.lag or (self._pending and not output.num_scheduled_tokens):
            self._deliver()
        self.check()
        return output

    def run(self, most_steps: int = 5000) -> None:
        """Step until nothing is left."""
        while self.scheduler.has_requests() or self._pending:
            assert self.num_steps < most_steps, "it goes on and on"
            self.step()

    def run_while_unfinished(self, *names: str, beside: tuple[str, int] | None = None) -> None:
        """Step until these have ended; `beside` is a request (id, output) that keeps running."""
        if beside is not None:
            self.add(beside[0], [3] * 8, beside[1])
        while not set(names) <= self.finished.keys():
            assert self.num_steps < 5000, "it goes on and on"
            self.step()

    def abort(self, *names: str) -> None:
        """As a client that goes away."""
        self.scheduler.finish_requests(list(names), RequestStatus.FINISHED_ABORTED)
        self.check()

    @property
    def num_used_blocks(self) -> int:
        return self.num_blocks - int(self.pool.get_num_free_blocks())

    @property
    def num_planned_blocks(self) -> int:
        """Blocks that our scheduler counts in the step that was just put together."""
        return self.ours._reservations.projection.num_blocks()

    def is_cached(self, block_hash: Any) -> bool:
        """Whether a block with this hash could be found."""
        return bool(self.pool.get_cached_block(block_hash, [0]))

    def request(self, name: str) -> Request:
        found: Request = self.scheduler.requests[name]
        return found

    def blocks(self, name: str) -> list[Any]:
        return list(self.scheduler.kv_cache_manager.get_blocks(name).blocks[0])

    def check(self) -> None:
        """Every block is held by those that are known to hold it, and by no one else."""
        held = Counter(
            block.block_id
            for name, request in self.scheduler.requests.items()
            if request.status == RequestStatus.RUNNING
            for block in self.blocks(name)
        )
        if isinstance(self.scheduler, BatchLLMScheduler):
            groups = self.scheduler._reservations._pinned.values()
            pinned = [block for group in groups for block in group.pinned]
            assert len(pinned) == self.scheduler.num_held_blocks
            held.update(block.block_id for block in pinned)
        deferred = Counter(block.block_id for _, blocks in self._deferred() for block in blocks)
        counts = {block.block_id: block.ref_cnt for block in self.pool.blocks if block.ref_cnt}
        counts.pop(self.pool.null_block.block_id, None)
        assert counts == dict(held + deferred)
        assert self.pool.get_num_free_blocks() == self.num_blocks - len(counts)
        if not self.scheduler.has_unfinished_requests():
            self._check_empty()

    def _check_empty(self) -> None:
        if isinstance(self.scheduler, BatchLLMScheduler):
            self.check_idle()

    def check_idle(self) -> None:
        """No request is left in our scheduler's books, and nothing is held or counted for one."""
        reservations = self.ours._reservations
        assert not reservations._entries and not self.ours._prefilling
        assert reservations.num_left == reservations.projection.num_blocks() == 0
        assert not reservations._groups and not reservations._pinned

    def _deferred(self) -> list[Any]:
        return list(getattr(self.scheduler, "deferred_frees", ()))

    def _sampled(self, output: SchedulerOutput) -> list[bool]:
        """Whether each request of the step gets a token."""
        return [
            not self.scheduler.requests[name].is_prefill_chunk
            for name in output.num_scheduled_tokens
        ]

    def _deliver(self) -> None:
        output, is_sampled = self._pending.popleft()
        names = list(output.num_scheduled_tokens)
        sampled: list[list[int]] = []
        for name, is_made in zip(names, is_sampled, strict=True):
            request = self.scheduler.requests.get(name)
            sampled.append([])
            if is_made and request is not None:
                length = request.num_output_tokens + 1
                sampled[-1] = [STOP if length == self._lengths[name] else 7]
        model_output = ModelRunnerOutput(names, {n: i for i, n in enumerate(names)}, sampled)
        self.scheduler.update_from_output(output, model_output)
        for name in names:
            if name not in self.scheduler.requests and name not in self.finished:
                self.finished[name] = self._lengths[name]


def hash_of(name: str, position: int) -> int:
    """A token that hardly any other request has there."""
    group, member = name.split(".")
    return (int(group) * 7919 + int(member) * 104_729 + position * 31) % 400_000
