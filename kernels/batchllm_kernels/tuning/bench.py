"""Checks and times settings on the device."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from statistics import median
from typing import Protocol

import torch
from torch import Tensor

from batchllm_kernels.prefix_attention.api import StepPlanner, prefix_attention
from batchllm_kernels.prefix_attention.batch import AttentionShape, BatchLimits, PagedBatch
from batchllm_kernels.prefix_attention.config import ArchConfig
from batchllm_kernels.prefix_attention.reference import prefix_shared_attention
from batchllm_kernels.tuning.workloads import (
    Workload,
    check_workload,
    lay_out,
    table_blocks_for,
    unwritten,
)

Timer = Callable[[Callable[[], object], int], float]
"""(function, repetitions) -> median milliseconds."""


class Bench(Protocol):
    """Checks and times settings."""

    def error(self, config: ArchConfig) -> float:
        """Relative error against attention in float32; NaN if the output has NaN."""

    def time(self, config: ArchConfig, workload: Workload, repetitions: int) -> float:
        """Median milliseconds of attention in one layer."""


class DeviceBench:
    """Runs the kernel on a device, on given workloads.

    One cache of random data serves all workloads.

    Args:
        shape: heads, head size and blocks.
        device: a GPU; the CPU with Triton's interpreter, in tests.
        timer: times a function.
        kv_dtype: dtype of the cache.
        check: the workload of `error`.
    """

    def __init__(
        self,
        shape: AttentionShape,
        workloads: Sequence[Workload],
        device: torch.device,
        timer: Timer,
        *,
        kv_dtype: torch.dtype = torch.bfloat16,
        check: Workload | None = None,
    ) -> None:
        self._shape, self._device, self._timer = shape, device, timer
        self._kv_dtype = kv_dtype
        self._check = check or check_workload()
        self._rng = torch.Generator().manual_seed(0)
        self._table_blocks = table_blocks_for([*workloads, self._check])
        self._num_blocks = max((each.num_blocks for each in workloads), default=0)
        self._caches: tuple[Tensor, Tensor] | None = None
        self._batches: dict[Workload, PagedBatch] = {}

    def error(self, config: ArchConfig) -> float:
        """‖out - reference‖ / ‖reference‖ in bfloat16, on new data at each call.

        Unwritten places of the cache are NaN, and so is the output before the call.
        """
        num_blocks = self._check.num_blocks + 5
        batch = lay_out(self._check, num_blocks, self._table_blocks, self._rng)
        q, caches = self._queries(self._check), self._random_caches(num_blocks)
        empty = unwritten(batch, num_blocks).to(self._device)
        for cache in caches:
            values = cache.float().masked_fill(empty[..., None, None], float("nan"))
            cache.copy_(values.to(cache.dtype))
        batch = self._on_device(batch)
        out = torch.full_like(q, float("nan"))
        scale = self._shape.head_dim**-0.5
        plan = self._planner(config, self._check).plan(batch)
        prefix_attention(q, *caches, plan, scale=scale, out=out)
        want = prefix_shared_attention(q, *caches, batch, [], scale=scale)
        return float((out.float() - want).norm() / want.norm())

    def time(self, config: ArchConfig, workload: Workload, repetitions: int) -> float:
        """Median milliseconds of one layer's attention, by the timer."""
        caches = self._caches = self._caches or self._random_caches(self._num_blocks)
        if workload not in self._batches:
            batch = lay_out(workload, self._num_blocks, self._table_blocks, self._rng)
            self._batches[workload] = self._on_device(batch)
        q = self._queries(workload)
        out = torch.empty_like(q)
        plan = self._planner(config, workload).plan(self._batches[workload])
        scale = self._shape.head_dim**-0.5
        return self._timer(
            lambda: prefix_attention(q, *caches, plan, scale=scale, out=out), repetitions
        )

    def _planner(self, config: ArchConfig, workload: Workload) -> StepPlanner:
        limits = BatchLimits(workload.num_requests, workload.num_query_tokens)
        return StepPlanner(self._shape, limits, impl="triton", device=self._device, config=config)

    def _queries(self, workload: Workload) -> Tensor:
        return self._random(
            workload.num_query_tokens, self._shape.num_q_heads, self._shape.head_dim
        )

    def _random_caches(self, num_blocks: int) -> tuple[Tensor, Tensor]:
        """Keys and values."""
        shape = self._shape
        size = (num_blocks, shape.block_size, shape.num_kv_heads, shape.head_dim)
        keys, values = (self._random(*size).to(self._kv_dtype) for _ in range(2))
        return keys, values

    def _random(self, *size: int) -> Tensor:
        seed = int(torch.randint(2**31, (1,), generator=self._rng))
        rng = torch.Generator(self._device).manual_seed(seed)
        return torch.randn(size, generator=rng, device=self._device, dtype=torch.bfloat16)

    def _on_device(self, batch: PagedBatch) -> PagedBatch:
        return PagedBatch(
            batch.query_start_loc.to(self._device),
            batch.seq_lens.to(self._device),
            batch.block_table.to(self._device),
        )


class GraphTimer:
    """Times replays of a captured graph by events, and flushes the L2 cache before each."""

    def __init__(self, device: torch.device) -> None:
        # Twice the largest cache of any chip with settings.
        self._flush = torch.ones(512 * 2**20 // 4, dtype=torch.int32, device=device)

    def __call__(self, run: Callable[[], object], repetitions: int) -> float:
        """Median milliseconds of `run`, captured once.

        A call before the capture compiles its kernels.
        """
        stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream())
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.stream(stream):
            run()
            stream.synchronize()
            with torch.cuda.graph(graph, stream=stream):
                run()
            events = []
            for _ in range(2 + repetitions):
                begin, end = (
                    torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
                    for _ in range(2)
                )
                self._flush.add_(1)
                begin.record(stream)
                graph.replay()
                end.record(stream)
                events.append((begin, end))
            stream.synchronize()
        return float(median(begin.elapsed_time(end) for begin, end in events[2:]))
