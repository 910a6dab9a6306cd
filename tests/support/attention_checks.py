"""Both implementations on a batch, against attention that shares nothing.

The oracle is the reference without groups; `tests/kernels/test_reference.py` checks that against
torch's own attention.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import combinations, product
from typing import TYPE_CHECKING, Any

import torch
from support.attention_cases import NAN, AttentionCase, Group, make_case
from torch import Tensor

from batchllm_kernels.prefix_attention import (
    ArchConfig,
    AttentionShape,
    BatchLimits,
    StepPlan,
    StepPlanner,
    load_config,
    prefix_attention,
    prefix_shared_attention,
)
from batchllm_kernels.prefix_attention.api import Impl

if TYPE_CHECKING:
    from batchllm_kernels.prefix_attention.device.tiles import Header
    from batchllm_kernels.prefix_attention.schedule import Schedule

CPU = torch.device("cpu")
Row = Mapping[str, Any]
IMPLS: tuple[Impl, ...] = ("reference", "triton")
SHAPE = AttentionShape(num_q_heads=8, num_kv_heads=2, head_dim=64, block_size=16)
# A relative error: of the norm, as the outputs of a head are sums of many terms.
TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 2e-3}

MIXED = [
    Group(64, ((5, 1), (70, 1), (0, 1))),
    Group(32, ((1, 1), (2, 1))),
    Group(0, ((200, 1),)),
    Group(0, ((0, 40),)),
    Group(48, ((3, 1),)),
]


def planner_for(
    case: AttentionCase, impl: Impl = "triton", config: ArchConfig | None = None
) -> StepPlanner:
    limits = BatchLimits(case.batch.num_requests + 2, case.num_tokens + 3)
    return StepPlanner(case.shape, limits, impl=impl, device=CPU, config=config)


def attend(case: AttentionCase, plan: StepPlan, **settings: Any) -> Tensor:
    """Attention in float32, into an output that is NaN before."""
    out = torch.full(case.q.shape, NAN)
    scale = case.shape.head_dim**-0.5
    prefix_attention(case.q, case.k_cache, case.v_cache, plan, scale=scale, out=out, **settings)
    return out


def expected(case: AttentionCase, **settings: Any) -> Tensor:
    """The oracle: no sharing, float32."""
    scale = case.shape.head_dim**-0.5
    return prefix_shared_attention(
        case.q, case.k_cache, case.v_cache, case.batch, [], scale=scale, **settings
    )


def assert_close(out: Tensor, case: AttentionCase, **settings: Any) -> None:
    want = expected(case, **settings)
    error = (out - want).norm() / want.norm()
    assert error < TOLERANCE[case.q.dtype], f"relative error {error}"
    per_token = (out - want).flatten(1).norm(dim=1) / want.flatten(1).norm(dim=1)
    assert per_token.max() < 3 * TOLERANCE[case.q.dtype]


def check(case: AttentionCase, config: ArchConfig | None = None, **settings: Any) -> StepPlan:
    """Attend with each implementation and compare; gives the kernel's plan."""
    for impl in IMPLS:
        plan = planner_for(case, impl, config).plan(case.batch)
        assert_close(attend(case, plan, **settings), case, **settings)
    assert not schedule_of(plan).counters.any()
    return plan


def schedule_of(plan: StepPlan) -> Schedule:
    """Of the kernel's plan."""
    assert plan.launches is not None
    return plan.launches.schedule


def header_of(schedule: Schedule) -> Header:
    from batchllm_kernels.prefix_attention.device.tiles import Header  # imports Triton

    return Header(*schedule.header.tolist()[: len(Header._fields)])


def num_prefix_tiles(plan: StepPlan) -> int:
    return int(header_of(schedule_of(plan)).prefix_tiles)


_HALF = torch.float16
AXES: Mapping[str, Sequence[Any]] = {
    "heads": ((2, 2), (8, 1), (7, 1), (14, 2), (24, 1), (32, 1)),
    "dtypes": (
        (torch.float32, None), (_HALF, None), (torch.bfloat16, None), (_HALF, torch.float8_e5m2),
        (_HALF, torch.float8_e4m3fn), (_HALF, torch.float8_e4m3fnuz),
    ),
    "window": (None, 1, 16, 50, 1000),
    "head_dim": (64, 96, 128, 256),
    "block_size": (16, 32, 48, 128),
    "layout": ("separate", "interleaved", "heads_first"),
    "soft_cap": (None, 0.5, 30.0),
    "merge_in_launch": (True, False),
}  # fmt: skip


DIAGONAL = [
    {axis: values[idx % len(values)] for axis, values in AXES.items()}
    for idx in range(max(map(len, AXES.values())))
]
"""Rows in which each value stands."""


def pairwise(axes: Mapping[str, Sequence[Any]], begun: Sequence[Row]) -> list[Row]:
    """More rows, so that any two values of two axes meet in one of them or of those begun."""
    left = {
        frozenset(pair): None  # a set that keeps its order
        for (a, of_a), (b, of_b) in combinations(axes.items(), 2)
        for pair in product([(a, value) for value in of_a], [(b, value) for value in of_b])
    }

    def num_met(row: Row, axis: str, value: Any) -> int:
        return sum(frozenset(((axis, value), other)) in left for other in row.items())

    def take(row: Row) -> Row:
        for pair in combinations(row.items(), 2):
            left.pop(frozenset(pair), None)
        return row

    for row in begun:
        take(row)
    rows = []
    while left:
        row = dict(next(iter(left)))
        for axis in axes:
            if axis not in row:
                row[axis] = max(axes[axis], key=partial(num_met, row, axis))
        rows.append(take({axis: row[axis] for axis in axes}))
    return rows


def name_of(row: Row) -> str:
    return "-".join(str(value).replace("torch.", "") for value in row.values())


def check_row(row: Row) -> None:
    """A small batch with these settings."""
    dtype, kv_dtype = row["dtypes"]
    size = row["block_size"]
    kv_bits = 8 if kv_dtype else 16
    shape = AttentionShape(*row["heads"], row["head_dim"], size, kv_bits=kv_bits)  # type: ignore[misc, call-arg]
    groups = [
        Group(2 * size, ((5, 1), (20, 1))),
        Group(size, ((3, 2),)),
        Group(0, ((size, 1),)),
        Group(0, ((0, 9),)),
    ]
    case = make_case(
        shape, groups, seed=2, dtype=dtype, kv_dtype=kv_dtype, num_padding=1, layout=row["layout"]
    )
    settings = {"window": row["window"], "soft_cap": row["soft_cap"]}
    if row["soft_cap"]:
        case = replace(case, q=case.q * 8)  # scores that it does something to
    if kv_dtype:
        settings |= {"k_scale": 0.5, "v_scale": 3.0}
    config = replace(load_config("cpu"), merge_in_launch=row["merge_in_launch"])
    plan = check(case, config, **settings)
    # 32 rows of a wide tile have to hold at least two requests.
    assert (num_prefix_tiles(plan) > 0) == (shape.heads_per_kv <= 16)
