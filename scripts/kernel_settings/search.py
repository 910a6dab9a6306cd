"""Searches settings on a device: the fastest of some by halving, and the gate's table.

Timings are milliseconds by name of a workload.
"""

import sys
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from itertools import takewhile
from math import ceil, exp, inf, log
from typing import Any, Final, TypeVar

import torch
from torch import Tensor
from triton.errors import TritonError
from triton.testing import do_bench

from batchllm_kernels.prefix_attention.api import StepPlanner, prefix_attention
from batchllm_kernels.prefix_attention.batch import AttentionShape, BatchLimits, PagedBatch
from batchllm_kernels.prefix_attention.config import ArchConfig
from batchllm_kernels.prefix_attention.grouping import Gate
from batchllm_kernels.prefix_attention.reference import prefix_shared_attention
from kernel_settings.workloads import (
    CHECKED,
    Workload,
    gate_workloads,
    lay_out,
    num_blocks,
)

Timings = Mapping[str, float]
Settings = TypeVar("Settings")
_KV = tuple[Tensor, Tensor]
Timer = Callable[[Callable[[], object], float], float]
"""(function, milliseconds to time it for) -> median milliseconds."""

MAX_ERROR: Final = 1e-2
"""Relative to float32 attention, in bfloat16."""
LEAST_GAIN: Final = 0.01
"""Least part of the time that a change must save."""
MOST_LOSS_ALONE: Final = 1.02
"""Largest factor by which settings may slow down requests that share nothing."""
LEAST_GAIN_SHARED: Final = 0.03
"""Least part of the time that sharing a prefix must save to open the gate."""
ROUNDS_MS: Final = (2.0, 5.0, 20.0, 50.0)
"""Time for each workload in the rounds of halving."""


class TuningError(RuntimeError):
    """The current settings fail or compute wrong results."""


def median_ms(run: Callable[[], object], milliseconds: float) -> float:
    """The default timer: Triton's, which flushes the L2 cache before each call."""
    return float(do_bench(run, warmup=milliseconds / 4, rep=milliseconds, return_mode="median"))


@dataclass
class Bench:
    """Checks and times settings on a device; one cache of random data serves all workloads."""

    shape: AttentionShape
    workloads: Sequence[Workload]
    device: torch.device
    """A GPU; the CPU with Triton's interpreter, in tests."""
    kv_dtype: torch.dtype = torch.bfloat16
    timer: Timer = median_ms
    checked: Workload = CHECKED
    _rng: torch.Generator = field(default_factory=lambda: torch.Generator().manual_seed(0))
    _batches: dict[str, PagedBatch] = field(default_factory=dict)
    first_failure: str | None = None  # of `times`

    def error(self, config: ArchConfig) -> float:
        """‖out - reference‖ / ‖reference‖ in bfloat16, on new data at each call.

        Unwritten places of the cache are NaN, and so is the output before the call.
        """
        made = lay_out(self.checked.groups, self.shape.block_size, self._rng)
        batch, caches = self._on_device(made.batch), self._random_caches(len(made.written))
        empty = ~made.written.to(self.device)[..., None, None]
        for cache in caches:
            cache.copy_(cache.float().masked_fill(empty, float("nan")).to(cache.dtype))
        q, attend = self._prepared(config, self.checked, batch, caches)
        out, scale = attend().float(), self.shape.head_dim**-0.5
        want = prefix_shared_attention(q, *caches, batch, [], scale=scale)
        return float((out - want).norm() / want.norm())

    def time(self, config: ArchConfig, workload: Workload, milliseconds: float) -> float:
        """Median milliseconds of one layer's attention."""
        if workload.name not in self._batches:
            size, blocks = self.shape.block_size, len(self._caches[0])
            made = lay_out(workload.groups, size, self._rng, cache_blocks=blocks)
            self._batches[workload.name] = self._on_device(made.batch)
        batch = self._batches[workload.name]
        _, attend = self._prepared(config, workload, batch, self._caches)
        return self.timer(attend, milliseconds)

    def times(
        self,
        config: ArchConfig,
        milliseconds: float,
        workloads: Sequence[Workload],
        *,
        check: bool = False,
    ) -> dict[str, float] | None:
        """Of some workloads. None for settings that fail or, if that is checked, compute wrong
        results; stderr gets the reason."""
        try:
            if check and not (error := self.error(config)) < MAX_ERROR:
                _say(f"left out, the relative error is {error}")
                return None
            return {load.name: self.time(config, load, milliseconds) for load in workloads}
        except TritonError as error:
            reason = f"{type(error).__name__}: {error}"
            self.first_failure = self.first_failure or reason
            _say(f"left out, {reason}")
            return None

    def _prepared(
        self,
        config: ArchConfig,
        workload: Workload,
        batch: PagedBatch,
        caches: _KV,
    ) -> tuple[Tensor, Callable[[], Tensor]]:
        """Queries, and their attention."""
        shape = self.shape
        q = self._random(workload.num_query_tokens, shape.num_q_heads, shape.head_dim)
        limits = BatchLimits(workload.num_requests, workload.num_query_tokens)
        planner = StepPlanner(shape, limits, impl="triton", device=self.device, config=config)
        plan, out = planner.plan(batch), torch.full_like(q, float("nan"))
        scale = shape.head_dim**-0.5
        return q, partial(prefix_attention, q, *caches, plan, scale=scale, out=out)

    @cached_property
    def _caches(self) -> _KV:
        size = self.shape.block_size
        return self._random_caches(max(num_blocks(load.groups, size) for load in self.workloads))

    def _random_caches(self, blocks: int) -> _KV:
        size = (blocks, self.shape.block_size, self.shape.num_kv_heads, self.shape.head_dim)
        return self._random(*size).to(self.kv_dtype), self._random(*size).to(self.kv_dtype)

    def _random(self, *size: int) -> Tensor:
        seed = int(torch.randint(2**31, (1,), generator=self._rng))
        rng = torch.Generator(self.device).manual_seed(seed)
        return torch.randn(size, generator=rng, device=self.device, dtype=torch.bfloat16)

    def _on_device(self, batch: PagedBatch) -> PagedBatch:
        tensors = (batch.query_start_loc, batch.seq_lens, batch.block_table)
        return PagedBatch(*(tensor.to(self.device) for tensor in tensors))


def relative_time(timings: Timings, baseline: Timings) -> float:
    """Geometric mean over the workloads of time / baseline time."""
    return exp(sum(log(timings[name] / baseline[name]) for name in timings) / len(timings))


def choose(measured: Sequence[tuple[Settings, Timings]], alone: Collection[str]) -> Settings:
    """The settings with the shortest time relative to the first, which are in use, or those.

    `alone` names workloads that share nothing; their time may grow by at most the factor
    `MOST_LOSS_ALONE`, by geometric mean.
    """
    (best, baseline), least = measured[0], 1 - LEAST_GAIN
    for settings, timings in measured:
        time = relative_time(timings, baseline)
        own = {name: timings[name] for name in alone}
        slows_alone = bool(own) and relative_time(own, baseline) > MOST_LOSS_ALONE
        if time <= least and not slows_alone:
            best, least = settings, time
    return best


def fastest(
    name: str,
    candidates: Mapping[str, ArchConfig],
    bench: Bench,
    *,
    budget_s: float,
    raw: dict[str, Any],
    clock: Callable[[], float] = time.monotonic,
) -> ArchConfig:
    """The first of the candidates, which is in use, or the fastest if that is faster.

    Each round times the faster half of the one before for longer. Candidates that fail or compute
    wrong results are left out. After `budget_s` seconds nothing more is timed, and the timings so
    far decide. `raw` keeps them all, by `name`.

    Raises:
        TuningError: the current settings fail or compute wrong results.
    """
    deadline, (current, *_) = clock() + budget_s, candidates
    tried, measured = list(candidates), list[tuple[str, Timings]]()
    for milliseconds in ROUNDS_MS:
        timed: list[tuple[str, Timings]] = []
        for settings in tried:
            if timed and clock() > deadline:
                _say(f"{name}: out of time, the rest isn't tried")
                break
            timings = bench.times(
                candidates[settings], milliseconds, bench.workloads, check=not measured
            )
            if timings is not None:
                timed.append((settings, timings))
            elif not timed:
                raise TuningError(f"{name}: the settings in use ({current}) don't work")
        if len(timed) == 1 and measured:
            break  # only the current settings: the previous round says more
        measured = timed
        rows = [{"settings": settings, "ms": timings} for settings, timings in measured]
        raw.setdefault(name, []).append({"milliseconds": milliseconds, "measured": rows})
        (_, baseline), *others = measured
        others.sort(key=lambda pair: relative_time(pair[1], baseline))
        tried = [current, *(settings for settings, _ in others[: ceil(len(others) / 2)])]
        if clock() > deadline or len(tried) == 1:
            break
    alone = [workload.name for workload in bench.workloads if workload.shares_nothing]
    chosen = choose(measured, alone)
    _say(f"{name}: {chosen}")
    return candidates[chosen]


def tune_gate(config: ArchConfig, bench: Bench, raw: dict[str, Any]) -> ArchConfig:
    """The settings with the gate's least lengths at which sharing is faster and doesn't fail.

    Raises:
        TuningError: nothing could be timed with and without sharing.
    """
    member_tokens = config.gate.max_member_tokens
    gates = (Gate({2: 1}, member_tokens), Gate({}, member_tokens))
    timings: dict[tuple[int, int], tuple[float, float]] = {}
    raw["gate"] = []
    for (degree, prefix), workload in gate_workloads().items():
        both = [
            bench.times(replace(config, gate=gate), ROUNDS_MS[-1], [workload]) for gate in gates
        ]
        shared_ms, apart_ms = (each[workload.name] if each else inf for each in both)
        timings[degree, prefix] = shared_ms, apart_ms
        if all(both):
            pair = {"shared_ms": shared_ms, "apart_ms": apart_ms}
            raw["gate"].append({"degree": degree, "prefix": prefix, **pair})
    if not raw["gate"]:
        raise TuningError(f"gate: no timing worked; the first failed with {bench.first_failure}")
    gate = Gate(gate_table(timings), member_tokens)
    _say(f"{config.arch}: {gate}")
    return replace(config, gate=gate)


def gate_table(timings: Mapping[tuple[int, int], tuple[float, float]]) -> dict[int, int]:
    """`Gate.min_prefix_tokens` from timings by (degree, prefix tokens): milliseconds with the gate
    open and closed, infinite where that fails.

    A degree gets the least prefix from which on sharing saves `LEAST_GAIN_SHARED` of the time at
    every timed length, but at most that of a smaller degree. Degrees without a change are left out.
    """
    table: dict[int, int] = {}
    least = inf
    for degree in sorted({degree for degree, _ in timings}):
        pays = {
            prefix: shared < inf and shared <= apart * (1 - LEAST_GAIN_SHARED)
            for (members, prefix), (shared, apart) in timings.items()
            if members == degree
        }
        shortest = min(takewhile(pays.__getitem__, sorted(pays, reverse=True)), default=inf)
        if shortest < least:
            table[degree] = least = int(shortest)
    return table


def _say(line: str) -> None:
    print(line, file=sys.stderr)
