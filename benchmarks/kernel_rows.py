"""A row of the kernel's benchmark: what a step has to do, and how long everybody takes for it."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch

from batchllm_kernels.prefix_attention import AttentionShape, BatchLimits, find_shared_prefixes
from batchllm_operator.cost import GPU, find_gpu
from benchmarks import kernel_targets, kernel_timing
from benchmarks.kernel_contenders import Contender, Ours
from benchmarks.kernel_work import AttentionWork, count_work, kv_token_bytes
from benchmarks.kernel_workloads import (
    Family,
    Setting,
    Step,
    groups,
    make_layer,
    make_step,
)

SHAPE = AttentionShape(num_q_heads=32, num_kv_heads=8, head_dim=128, block_size=16)
DTYPE = torch.bfloat16
LIMITS = BatchLimits(max_num_requests=1024, max_num_tokens=8192)  # as an engine has them
MODELLED_CHIP = "H100"
OURS, FA3 = "ours", "fa3"


@dataclass(frozen=True, slots=True)
class Bench:
    """What all rows have in common."""

    device: torch.device
    chip: GPU | None
    """The device, if its rates are known."""
    seed: int
    repetitions: int
    warmup: int

    @property
    def model_chip(self) -> GPU:
        return self.chip or find_gpu(MODELLED_CHIP)

    def rng(self, setting: Setting) -> np.random.Generator:
        """Fresh for each setting, and the same whatever else is measured."""
        return np.random.default_rng([self.seed, 2, *setting.name.encode()])


def model_row(setting: Setting, work: AttentionWork, chip: GPU) -> dict[str, Any]:
    """What a step has to do, and how long that takes at best."""
    return {
        "setting": setting.name,
        "family": setting.family.name,
        "prefix": setting.prefix,
        "own": setting.own,
        "degree": setting.degree or "all",
        "num_requests": setting.family.num_requests,
        "members": "adjacent" if setting.adjacent else "anywhere",
        "unique_kv_bytes": work.unique_kv_bytes,
        "plain_kv_bytes": work.plain_kv_bytes,
        "q_out_bytes": work.q_out_bytes,
        "partials_bytes": work.partials_bytes,
        "flop": work.flop,
        "modelled_on": chip.name,
        "ideal_ms": round(work.ideal_s(chip) * 1e3, 6),
        "plain_ideal_ms": round(work.plain_s(chip) * 1e3, 6),
        "predicted_speedup": round(work.predicted_speedup(chip), 3),
    }


def modelled(bench: Bench, setting: Setting) -> dict[str, Any]:
    """A row without times."""
    rng = bench.rng(setting)
    return model_row(setting, count_work(groups(setting, rng), SHAPE), bench.model_chip)


def measured(
    bench: Bench, setting: Setting, ours: Ours, baselines: Sequence[Contender]
) -> dict[str, Any]:
    """A row with everybody's times."""
    rng = bench.rng(setting)
    torch.manual_seed(int(rng.integers(2**31)))
    step = make_step(setting, SHAPE, rng, bench.device)
    work = count_work(step.groups, SHAPE)
    planned = find_shared_prefixes(step.batch, SHAPE.block_size, ours.planner.config.gate)
    num_saved = sum((len(prefix.requests) - 1) * prefix.num_tokens for prefix in planned)
    count = kernel_timing.num_layers(work.unique_kv_bytes + work.q_out_bytes, bench.device)
    times, failures = time_all(bench, step, count, [ours, *baselines])
    plan = {"plan": lambda: ours.planner.plan(step.batch)}
    plan_ms = kernel_timing.time_in_turn(plan, warmup=2, repetitions=10)["plan"]
    return {
        **model_row(setting, work, bench.model_chip),
        "planned_kv_bytes": work.plain_kv_bytes - num_saved * kv_token_bytes(SHAPE),
        "num_layers": count,
        "repetitions": bench.repetitions,
        "times": times,
        "failures": failures,
        "plan_device": plan_ms.row("ms"),
        **compare(times, work, bench.chip),
    }


def time_all(
    bench: Bench, step: Step, num_layers: int, contenders: Sequence[Contender]
) -> tuple[dict[str, dict[str, Any]], dict[str, str]]:
    """The times of a layer of each contender, as calls and as a graph; why one has none."""
    layers = [make_layer(step, DTYPE, poisoned=False) for _ in range(num_layers)]
    runs: dict[str, Callable[[], object]] = {}
    failures: dict[str, str] = {}
    for contender in contenders:
        try:
            calls = contender.prepare(step, layers).calls
            graph = kernel_timing.capture(calls)
        # One that fails in this setting says so in its row, and the others are measured.
        except Exception as error:  # noqa: BLE001
            failures[contender.name] = f"{type(error).__name__}: {error}"
            torch.cuda.synchronize()
            continue
        runs[f"{contender.name}/eager"] = partial(_call_all, calls)
        runs[f"{contender.name}/graph"] = graph.replay
    spreads = kernel_timing.time_in_turn(runs, warmup=bench.warmup, repetitions=bench.repetitions)
    times: dict[str, dict[str, Any]] = {}
    for name, spread in spreads.items():
        contender_name, _, mode = name.partition("/")
        times.setdefault(contender_name, {})[mode] = spread.over(num_layers).row("ms")
    return times, failures


def _call_all(calls: Sequence[Callable[[], object]]) -> list[object]:
    return [call() for call in calls]


def compare(
    times: Mapping[str, Mapping[str, Any]], work: AttentionWork, chip: GPU | None
) -> dict[str, Any]:
    """Ours against the others, as graphs; FlashAttention 3 with the splits that suit it best."""
    graph_ms = {name: each["graph"]["median_ms"] for name, each in times.items()}
    fa3_ms = min((ms for name, ms in graph_ms.items() if name.startswith(FA3)), default=None)
    ours_ms = graph_ms.get(OURS)
    if ours_ms is None:
        return {"ours_ms": None, "fa3_ms": fa3_ms}
    bytes_per_s = work.unique_kv_bytes / (ours_ms / 1e3)
    best_others = min((ms for name, ms in graph_ms.items() if name != OURS), default=None)
    return {
        "ours_ms": ours_ms,
        "fa3_ms": fa3_ms,
        "speedup_vs_fa3": round(fa3_ms / ours_ms, 4) if fa3_ms else None,
        "speedup_vs_best": round(best_others / ours_ms, 4) if best_others else None,
        "unique_gb_per_s": round(bytes_per_s / 1e9, 1),
        "unique_bandwidth_share": round(bytes_per_s / chip.hbm_bytes_per_s, 4) if chip else None,
    }


def time_plan(bench: Bench, ours: Ours) -> dict[str, Any]:
    """Host and device time of planning a step of 512 requests."""
    family = Family(f"decode_{kernel_targets.PLAN_REQUESTS}", 0, kernel_targets.PLAN_REQUESTS)
    setting = Setting(family, 1024, 256, 16)
    step = make_step(setting, SHAPE, bench.rng(setting), bench.device)
    on_device = {"plan": lambda: ours.planner.plan(step.batch)}
    spread = kernel_timing.time_in_turn(on_device, warmup=10, repetitions=100)["plan"]
    host = kernel_timing.host_us(lambda: ours.planner.plan(step.batch), warmup=50, repetitions=500)
    return {"setting": setting.name, "host": host.row("us"), "device": spread.row("ms")}
