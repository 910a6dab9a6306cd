"""Times on a GPU, all contenders in turn, so that a drift of the clocks meets everybody."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass

import numpy as np
import torch
from torch import Tensor

Call = Callable[[], object]
_CACHE_FACTOR = 4
_MAX_LAYERS = 32
_COPY_BYTES = 1 << 30


@dataclass(frozen=True, slots=True)
class Spread:
    """Of repeated measurements: the median, and what a fifth of them are below and above."""

    median: float
    p20: float
    p80: float

    @classmethod
    def of(cls, samples: Sequence[float]) -> Spread:
        low, middle, high = np.percentile(samples, [20, 50, 80])
        return cls(float(middle), float(low), float(high))

    def over(self, count: int) -> Spread:
        """Of one in `count` that were measured together."""
        return Spread(self.median / count, self.p20 / count, self.p80 / count)

    def row(self, unit: str) -> dict[str, float]:
        """For JSON."""
        return {f"{name}_{unit}": round(value, 6) for name, value in asdict(self).items()}


def num_layers(layer_bytes: int, device: torch.device) -> int:
    """Layers to go through, each with a cache of its own, so that none finds its keys in the L2
    cache from the time before; at least two, and no more than fit half of the free memory."""
    cache_bytes = int(getattr(torch.cuda.get_device_properties(device), "L2_cache_size", 64 << 20))
    free_bytes, _ = torch.cuda.mem_get_info(device)
    wanted = math.ceil(_CACHE_FACTOR * cache_bytes / layer_bytes)
    room = int(free_bytes * 0.5 / layer_bytes)
    return max(1, min(max(wanted, 2), room, _MAX_LAYERS))


def capture(calls: Sequence[Call]) -> torch.cuda.CUDAGraph:
    """A CUDA graph of the calls, one after the other.

    Raises:
        RuntimeError: one of them can't be captured.
    """
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for call in calls:
            call()
    torch.cuda.current_stream().wait_stream(side)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    return graph


def time_in_turn(runs: Mapping[str, Call], *, warmup: int, repetitions: int) -> dict[str, Spread]:
    """Milliseconds of each run on the device, by CUDA events."""
    for run in runs.values():
        for _ in range(warmup):
            run()
    samples: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(repetitions):
        for name, run in runs.items():
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            torch.cuda.synchronize()
            start.record()
            run()
            end.record()
            end.synchronize()
            samples[name].append(start.elapsed_time(end))
    return {name: Spread.of(each) for name, each in samples.items()}


def host_us(call: Call, *, warmup: int, repetitions: int) -> Spread:
    """Microseconds until a call returns, which waits for nothing on the device."""
    samples = []
    for at in range(warmup + repetitions):
        torch.cuda.synchronize()
        started_at = time.perf_counter()
        call()
        if at >= warmup:
            samples.append((time.perf_counter() - started_at) * 1e6)
    torch.cuda.synchronize()
    return Spread.of(samples)


def copy_bytes_per_s(device: torch.device) -> float:
    """Bandwidth that a large copy on the device reaches, reads and writes counted."""
    source = torch.randint(256, (_COPY_BYTES,), dtype=torch.uint8, device=device)
    target: Tensor = torch.empty_like(source)
    spread = time_in_turn({"copy": lambda: target.copy_(source)}, warmup=3, repetitions=20)
    return 2 * _COPY_BYTES / (spread["copy"].median / 1e3)
