"""Searches settings on a device: tilings by halving, then the split rule, then the gate.

Timings are milliseconds by name of a workload.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import ceil, exp, log
from typing import Any, Final, TypeVar

import torch
from torch import Tensor
from triton.errors import TritonError
from triton.testing import do_bench

from batchllm_kernels.prefix_attention.api import StepPlanner, prefix_attention
from batchllm_kernels.prefix_attention.batch import AttentionShape, BatchLimits, PagedBatch
from batchllm_kernels.prefix_attention.config import ArchConfig, LaunchConfig, SplitRule
from batchllm_kernels.prefix_attention.grouping import Gate
from batchllm_kernels.prefix_attention.reference import prefix_shared_attention
from batchllm_kernels.tuning.workloads import (
    CHECKED,
    Workload,
    decoding,
    launch_workloads,
    lay_out,
    num_blocks,
    split_workloads,
)

Timings = Mapping[str, float]
Settings = TypeVar("Settings")
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
GATE_DEGREES: Final = (2, 4, 8, 16, 32)
GATE_PREFIXES: Final = (64, 128, 256, 512, 1024, 2048, 4096)
SPLITS: Final = tuple(SplitRule(least, pieces) for least in (128, 256, 512) for pieces in (2, 4, 8))


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

    def error(self, config: ArchConfig) -> float:
        """‖out - reference‖ / ‖reference‖ in bfloat16, on new data at each call.

        Unwritten places of the cache are NaN, and so is the output before the call.
        """
        size = self.shape.block_size
        made = lay_out(self.checked.groups, size, self._rng)
        q, caches = self._queries(self.checked), self._random_caches(len(made.written))
        empty = ~made.written.to(self.device)[..., None, None]
        for cache in caches:
            cache.copy_(cache.float().masked_fill(empty, float("nan")).to(cache.dtype))
        batch, scale = self._on_device(made.batch), self.shape.head_dim**-0.5
        out = torch.full_like(q, float("nan"))
        plan = self._planner(config, self.checked).plan(batch)
        prefix_attention(q, *caches, plan, scale=scale, out=out)
        want = prefix_shared_attention(q, *caches, batch, [], scale=scale)
        return float((out.float() - want).norm() / want.norm())

    def time(self, config: ArchConfig, workload: Workload, milliseconds: float) -> float:
        """Median milliseconds of one layer's attention."""
        caches, q = self._caches, self._queries(workload)
        if workload.name not in self._batches:
            made = lay_out(
                workload.groups, self.shape.block_size, self._rng, cache_blocks=len(caches[0])
            )
            self._batches[workload.name] = self._on_device(made.batch)
        out, scale = torch.empty_like(q), self.shape.head_dim**-0.5
        plan = self._planner(config, workload).plan(self._batches[workload.name])
        return self.timer(
            lambda: prefix_attention(q, *caches, plan, scale=scale, out=out), milliseconds
        )

    def times(self, config: ArchConfig, milliseconds: float) -> dict[str, float]:
        """Of all workloads."""
        return {load.name: self.time(config, load, milliseconds) for load in self.workloads}

    @cached_property
    def _caches(self) -> tuple[Tensor, Tensor]:
        size = self.shape.block_size
        return self._random_caches(max(num_blocks(load.groups, size) for load in self.workloads))

    def _planner(self, config: ArchConfig, workload: Workload) -> StepPlanner:
        limits = BatchLimits(workload.num_requests, workload.num_query_tokens)
        return StepPlanner(self.shape, limits, impl="triton", device=self.device, config=config)

    def _queries(self, workload: Workload) -> Tensor:
        shape = self.shape
        return self._random(workload.num_query_tokens, shape.num_q_heads, shape.head_dim)

    def _random_caches(self, blocks: int) -> tuple[Tensor, Tensor]:
        shape = self.shape
        size = (blocks, shape.block_size, shape.num_kv_heads, shape.head_dim)
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
    """The settings with the shortest time relative to the first, or those.

    Args:
        measured: settings with their timings, the current ones first.
        alone: names of workloads that share nothing; their time may grow by at most the factor
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


def tune_launch(
    config: ArchConfig,
    candidates: Sequence[LaunchConfig],
    bench: Bench,
    *,
    budget_s: float,
    raw: dict[str, Any],
    clock: Callable[[], float] = time.monotonic,
) -> ArchConfig:
    """The settings with the fastest candidate for one head size, if one is faster.

    Each round times the faster half of the one before for longer. After `budget_s` seconds nothing
    more is timed, and the timings so far decide. `raw` keeps them all.

    Raises:
        TuningError: the current settings fail or compute wrong results.
    """
    shape, deadline = bench.shape, clock() + budget_s
    current = config.launch_config(shape.head_dim, shape.kv_bits)
    name = f"{config.arch} {shape.head_dim}/{shape.kv_bits}"
    tried = [current, *(launch for launch in candidates if launch != current)]
    measured: list[tuple[LaunchConfig, Timings]] = []
    for milliseconds in ROUNDS_MS:
        timed: list[tuple[LaunchConfig, Timings]] = []
        for launch in tried:
            if timed and clock() > deadline:
                _say(f"{name}: out of time, the rest isn't tried")
                break
            wanted = config.with_launch(launch)
            timings = _measure(wanted, bench, milliseconds, check=not measured)
            if timings is not None:
                timed.append((launch, timings))
            elif not timed:
                raise TuningError(f"{name}: the settings in use ({current}) don't work")
        if len(timed) == 1 and measured:
            break  # only the current settings: the previous round says more
        measured = timed
        rows = [{"settings": str(launch), "ms": timings} for launch, timings in measured]
        raw.setdefault(name, []).append({"milliseconds": milliseconds, "measured": rows})
        (_, baseline), *others = measured
        others.sort(key=lambda pair: relative_time(pair[1], baseline))
        tried = [current, *(launch for launch, _ in others[: ceil(len(others) / 2)])]
        if clock() > deadline or len(tried) == 1:
            break
    alone = [workload.name for workload in bench.workloads if workload.shares_nothing]
    chosen = choose(measured, alone)
    _say(f"{name}: {chosen}")
    return config.with_launch(chosen)


def tune_split(config: ArchConfig, bench: Bench, raw: dict[str, Any]) -> ArchConfig:
    """The settings with the fastest split rule, if one is faster."""
    measured = [
        (rule, bench.times(replace(config, split=rule), ROUNDS_MS[-1]))
        for rule in (config.split, *SPLITS)
    ]
    raw["split"] = {str(rule): timings for rule, timings in measured}
    chosen = choose(measured, [])
    _say(f"{config.arch}: {chosen}")
    return replace(config, split=chosen)


def tune_gate(config: ArchConfig, bench: Bench, raw: dict[str, Any]) -> ArchConfig:
    """The settings with the gate's least lengths at which sharing is faster."""
    member_tokens = config.gate.max_member_tokens
    opened = replace(config, gate=Gate({2: 1}, member_tokens))
    closed = replace(config, gate=Gate({}, member_tokens))
    timings: dict[tuple[int, int], tuple[float, float]] = {}
    for (degree, tokens), workload in gate_workloads().items():
        shared, apart = (bench.time(gated, workload, ROUNDS_MS[-1]) for gated in (opened, closed))
        timings[degree, tokens] = shared, apart
    raw["gate"] = [
        {"degree": degree, "prefix": tokens, "shared_ms": shared, "apart_ms": apart}
        for (degree, tokens), (shared, apart) in timings.items()
    ]
    gate = Gate(gate_table(timings), member_tokens)
    _say(f"{config.arch}: {gate}")
    return replace(config, gate=gate)


def gate_workloads() -> dict[tuple[int, int], Workload]:
    """By (degree, prefix tokens): 128 decoding requests in groups of that degree."""
    return {
        (degree, tokens): decoding(128, degree, tokens)
        for degree in GATE_DEGREES
        for tokens in GATE_PREFIXES
    }


def workloads_of(step: str) -> list[Workload]:
    """Those that a step of the search times."""
    if step == "gate":
        return list(gate_workloads().values())
    return launch_workloads() if step == "launch" else split_workloads()


def gate_table(timings: Mapping[tuple[int, int], tuple[float, float]]) -> dict[int, int]:
    """Least prefix in tokens by degree, for `Gate.min_prefix_tokens`.

    A degree gets the least prefix from which on sharing saves `LEAST_GAIN_SHARED` of the time at
    every timed length, but at most that of a smaller degree. Degrees without a change are left out.

    Args:
        timings: by (degree, prefix tokens): milliseconds with the gate open and closed.
    """
    table: dict[int, int] = {}
    least: int | None = None
    for degree in sorted({degree for degree, _ in timings}):
        from_here = None
        for tokens in sorted(
            (length for members, length in timings if members == degree), reverse=True
        ):
            shared, apart = timings[degree, tokens]
            if shared > apart * (1 - LEAST_GAIN_SHARED):
                break
            from_here = tokens
        if from_here is not None and (least is None or from_here < least):
            table[degree] = least = from_here
    return table


def _measure(
    config: ArchConfig, bench: Bench, milliseconds: float, *, check: bool
) -> dict[str, float] | None:
    """Timings; None for settings that fail or compute wrong results."""
    try:
        if check and not (error := bench.error(config)) < MAX_ERROR:
            _say(f"left out, the relative error is {error}")
            return None
        return bench.times(config, milliseconds)
    except TritonError as error:
        _say(f"left out, {type(error).__name__}: {error}")
        return None


def _say(line: str) -> None:
    print(line, file=sys.stderr)
