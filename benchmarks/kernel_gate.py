"""Checks every contender against the reference in float32 before it is timed.

Inputs are fresh and random, outputs hold NaN before, and so does every cache slot that belongs to
no request. Baselines get finite numbers there instead, and valid blocks behind a request's own in
its block table: FlashAttention multiplies what it masks with zero.
"""

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from batchllm_kernels.prefix_attention import AttentionShape, prefix_shared_attention
from benchmarks.kernel_contenders import Contender, Ours
from benchmarks.kernel_workloads import (
    DECODE_32,
    DECODE_256,
    FAMILIES,
    MIXED,
    Family,
    Layer,
    Setting,
    Step,
    make_layer,
    make_step,
)

MAX_ERROR = {torch.float32: 1e-4, torch.float16: 2e-3, torch.bfloat16: 1e-2}
"""Of ||out - reference|| / ||reference||."""
ROW_ERROR_FACTOR = 4
"""The same of one head of one token, where errors don't average: so many times that. A partial
that was lost or is another step's makes a row wrong by its own size."""
REPETITIONS = 3
"""A merge that doesn't wait goes wrong now and then."""
_LEFTOVER = 3.0  # in slots that weren't written


class Check(NamedTuple):
    """One contender on one setting."""

    contender: str
    error: float
    """By `worst_error`; NaN where an output wasn't written."""


def interpreter_settings() -> list[Setting]:
    """Small enough for Triton's interpreter."""
    decode = Family("decode_6", 0, 6)
    mixed = Family("mixed_2_4", 2, 4, chunk_size=20)
    return [
        Setting(family, prefix, own, degree, ragged=True)
        for family, prefix, own, degree in (
            (decode, 32, 48, 1),
            (decode, 64, 32, 2),
            (decode, 128, 32, None),
            (mixed, 32, 48, 2),
            (mixed, 64, 32, None),
        )
    ]


def gpu_settings(*, quick: bool) -> list[Setting]:
    """All families, small and with odd lengths; some as large as they are timed."""
    small = [
        Setting(family, prefix, own, degree, ragged=True)
        for family in FAMILIES
        for prefix, own in ((128, 64), (512, 128))
        for degree in (1, 4, 16, None)
    ]
    full = [
        Setting(DECODE_256, 1024, 256, 16),
        Setting(DECODE_256, 1024, 256, 4, ragged=True),
        Setting(DECODE_256, 1024, 256, 1),
        Setting(DECODE_256, 4096, 256, None, ragged=True),
        Setting(DECODE_32, 4096, 2048, None),
        Setting(MIXED, 1024, 256, 16, ragged=True),
        Setting(MIXED, 4096, 256, 64),
    ]
    return small[::3] + full[:1] if quick else small + full


def run_gate(
    contenders: Sequence[Contender],
    wanted: Sequence[Setting],
    shape: AttentionShape,
    dtype: torch.dtype,
    device: torch.device,
    seed: int,
) -> tuple[list[Check], dict[str, str]]:
    """Check everybody on every setting.

    Returns:
        The checks, and by name what is wrong with a contender: what it raised, after which it isn't
        asked again, or its first wrong output.
    """
    rng = np.random.default_rng([seed, 1])
    torch.manual_seed(int(rng.integers(2**31)))
    checks: list[Check] = []
    limit = MAX_ERROR[dtype]
    raised: set[str] = set()
    unfit: dict[str, str] = {}
    for setting in wanted:
        step = make_step(setting, shape, rng, device)
        poisoned = make_layer(step, dtype, poisoned=True)
        expected = reference(step, poisoned)
        for contender in contenders:
            if contender.name in raised:
                continue
            for _ in range(REPETITIONS if device.type == "cuda" else 1):
                poisoned.out.fill_(float("nan"))
                try:
                    out = _output(contender, step, poisoned)
                # Its error is the finding; the others are still to be checked.
                except Exception as error:  # noqa: BLE001
                    raised.add(contender.name)
                    unfit[contender.name] = f"{setting.name}: {type(error).__name__}: {error}"
                    break
                error_norm = worst_error(out.float(), expected)
                checks.append(Check(contender.name, error_norm))
                if not error_norm <= limit:  # NaN never is
                    reason = f"{setting.name}: error {error_norm:.2g}, at most {limit:.2g}"
                    unfit.setdefault(contender.name, reason)
    return checks, unfit


def worst_error(out: Tensor, expected: Tensor) -> float:
    """Relative error of the norm: of all, or of the worst row by `ROW_ERROR_FACTOR`; NaN if any."""
    difference = out - expected
    rows = difference.norm(dim=-1) / expected.norm(dim=-1)
    whole = float(difference.norm() / expected.norm())
    worst_row = float(rows.max()) / ROW_ERROR_FACTOR
    return whole if math.isnan(whole) else max(whole, worst_row)


def worst_errors(checks: Sequence[Check]) -> dict[str, float | str]:
    """By contender; "nan", which JSON has no number for, if any output had one."""
    errors: dict[str, list[float]] = {}
    for check in checks:
        errors.setdefault(check.contender, []).append(check.error)
    return {
        name: max(each) if all(map(math.isfinite, each)) else "nan" for name, each in errors.items()
    }


def reference(step: Step, layer: Layer) -> Tensor:
    """Plain paged attention in float32: it knows nothing of groups."""
    scale = step.shape.head_dim**-0.5
    return prefix_shared_attention(
        layer.q, layer.k_cache, layer.v_cache, step.batch, [], scale=scale
    )


def _output(contender: Contender, step: Step, poisoned: Layer) -> Tensor:
    if isinstance(contender, Ours):
        return contender.prepare_batch(step.poisoned, [poisoned]).output(0)
    k_cache, v_cache = (
        cache.masked_fill(~step.written[..., None, None], _LEFTOVER)
        for cache in (poisoned.k_cache, poisoned.v_cache)
    )
    layer = replace(poisoned, k_cache=k_cache, v_cache=v_cache)
    return contender.prepare(step, [layer]).output(0)
