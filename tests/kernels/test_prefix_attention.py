"""Both implementations, on random batches, against attention that shares nothing.

The oracle here is the reference without groups; `test_reference.py` checks that against torch's
own attention. The kernel runs in Triton's interpreter.
"""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest
import torch
from support.attention_cases import NAN, AttentionCase, Group, make_case
from torch import Tensor

from batchllm_kernels.prefix_attention import (
    ArchConfig,
    AttentionShape,
    BatchLimits,
    Gate,
    StepPlan,
    StepPlanner,
    load_config,
    prefix_attention,
    prefix_shared_attention,
)
from batchllm_kernels.prefix_attention.api import Impl
from batchllm_kernels.prefix_attention.tiles import (
    HEADER_PREFIX_TILES,
    HEADER_SLOTS,
    HEADER_TILES,
)

CPU = torch.device("cpu")
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


def check(case: AttentionCase, impl: Impl = "triton", **settings: Any) -> StepPlan:
    """Attend and compare; gives the plan."""
    plan = planner_for(case, impl).plan(case.batch)
    assert_close(attend(case, plan, **settings), case, **settings)
    if plan.schedule is not None:
        assert not plan.schedule.counters.any()
    return plan


@pytest.mark.parametrize("impl", IMPLS)
def test_mixed_batch(impl: Impl) -> None:
    case = make_case(SHAPE, MIXED, seed=0, num_padding=3)
    plan = check(case, impl)
    if plan.prefixes is not None:
        assert sorted(prefix.requests for prefix in plan.prefixes) == sorted(
            rows for rows in case.groups if len(rows) > 1
        )
    if plan.schedule is not None:
        assert plan.schedule.header[HEADER_PREFIX_TILES] >= 2


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("num_keys", [1, 15, 16, 17, 63, 64, 65])
def test_decode_of_awkward_lengths(num_keys: int, impl: Impl) -> None:
    check(make_case(SHAPE, [Group(0, ((num_keys - 1, 1),))], seed=num_keys), impl)


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("num_queries", [1, 3, 4, 5, 15, 16, 17, 63, 65])
def test_prefill_of_awkward_lengths(num_queries: int, impl: Impl) -> None:
    groups = [Group(0, ((0, num_queries),)), Group(0, ((33, num_queries),))]
    check(make_case(SHAPE, groups, seed=num_queries), impl)


@pytest.mark.parametrize("num_earlier", [29, 30, 31, 32, 62, 63])
def test_chunk_whose_first_query_ends_a_step_of_keys(num_earlier: int) -> None:
    """Where the steps that all rows see whole end, and the masked ones begin."""
    check(make_case(SHAPE, [Group(0, ((num_earlier, 20),))], seed=num_earlier))


@pytest.mark.parametrize("own_tokens", [0, 1, 15, 16, 17, 63])
@pytest.mark.parametrize("num_prefix_tokens", [16, 64, 80])
def test_group_of_awkward_lengths(num_prefix_tokens: int, own_tokens: int) -> None:
    groups = [Group(num_prefix_tokens, ((own_tokens, 1),) * 3)]
    plan = check(make_case(SHAPE, groups, seed=own_tokens))
    assert plan.schedule is not None
    assert plan.schedule.header[HEADER_PREFIX_TILES] >= 1


@pytest.mark.parametrize("heads", [(8, 8), (8, 2), (8, 1), (7, 1), (28, 4), (24, 1), (32, 1)])
def test_heads_that_share_keys(heads: tuple[int, int]) -> None:
    shape = AttentionShape(*heads, head_dim=64, block_size=16)
    check(make_case(shape, [Group(64, ((5, 1), (20, 1), (0, 2))), *MIXED[2:4]], seed=1))


@pytest.mark.parametrize("head_dim", [64, 96, 128, 256])
@pytest.mark.parametrize("block_size", [16, 48, 128])
def test_head_and_block_sizes(head_dim: int, block_size: int) -> None:
    shape = AttentionShape(4, 2, head_dim, block_size)
    groups = [Group(block_size, ((5, 1), (20, 1))), Group(0, ((block_size, 1),)), MIXED[3]]
    check(make_case(shape, groups, seed=2))


@pytest.mark.parametrize("layout", ["separate", "interleaved", "heads_first"])
def test_cache_layouts(layout: str) -> None:
    check(make_case(SHAPE, MIXED, seed=3, layout=layout))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision(dtype: torch.dtype) -> None:
    check(make_case(SHAPE, MIXED, seed=4, dtype=dtype))


def test_output_in_the_queries_dtype() -> None:
    case = make_case(SHAPE, MIXED, seed=5, dtype=torch.float16)
    plan = planner_for(case).plan(case.batch)
    out = prefix_attention(case.q, case.k_cache, case.v_cache, plan, scale=0.125)
    assert out.dtype == torch.float16
    assert_close(out.float(), case)


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize(
    "kv_dtype", [torch.float8_e4m3fn, torch.float8_e4m3fnuz, torch.float8_e5m2]
)
def test_fp8_cache(kv_dtype: torch.dtype, impl: Impl) -> None:
    shape = replace(SHAPE, kv_bits=8)
    case = make_case(shape, MIXED, seed=6, dtype=torch.float16, kv_dtype=kv_dtype)
    check(case, impl, k_scale=0.5, v_scale=3.0)


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("window", [1, 16, 50, 1000])
def test_sliding_window(window: int, impl: Impl) -> None:
    groups = [*MIXED, Group(160, ((5, 1), (90, 1), (30, 2)))]
    check(make_case(SHAPE, groups, seed=7), impl, window=window)


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("soft_cap", [0.5, 30.0])
def test_soft_cap(soft_cap: float, impl: Impl) -> None:
    case = make_case(SHAPE, MIXED, seed=8)
    check(replace(case, q=case.q * 8), impl, soft_cap=soft_cap)


def test_large_scores_stay_finite() -> None:
    case = make_case(SHAPE, MIXED, seed=9)
    case = replace(case, q=case.q * 1e4)
    out = attend(case, planner_for(case).plan(case.batch))
    torch.testing.assert_close(out, expected(case), rtol=1e-3, atol=1e-3)


def test_long_context_of_few_requests_is_split() -> None:
    case = make_case(SHAPE, [Group(0, ((1100, 1),)), Group(0, ((3, 1),))], seed=10)
    plan = check(case)
    assert plan.schedule is not None
    assert plan.schedule.header[HEADER_TILES] > 4
    assert plan.schedule.header[HEADER_SLOTS] > 2


def test_long_prefix_and_long_prefill_are_split() -> None:
    groups = [Group(2048, ((1, 1), (700, 1), (40, 2))), Group(0, ((900, 40),))]
    plan = check(make_case(SHAPE, groups, seed=11))
    assert plan.schedule is not None
    assert plan.schedule.header[HEADER_PREFIX_TILES] > 1


def test_members_that_prefill_in_chunks() -> None:
    groups = [Group(128, ((0, 4), (30, 3), (5, 4), (64, 3), (2, 4))), Group(64, ((1, 2), (0, 2)))]
    plan = check(make_case(SHAPE, groups, seed=12))
    assert plan.schedule is not None
    assert plan.schedule.header[HEADER_PREFIX_TILES] >= 2


def test_group_larger_than_a_tile() -> None:
    groups = [Group(96, tuple((own, 1) for own in range(21)))]
    plan = check(make_case(SHAPE, groups, seed=13))
    assert plan.schedule is not None
    assert plan.schedule.header[HEADER_PREFIX_TILES] >= 3


@pytest.mark.parametrize("seed", range(6))
def test_random_batches(seed: int) -> None:
    rng = random.Random(seed)
    groups = []
    for _ in range(rng.randint(1, 6)):
        degree = rng.choice([1, 1, 2, 3, 6])
        prefix = 16 * rng.choice([0, 1, 3, 8, 20])
        members = tuple(
            (rng.choice([0, 1, 15, 16, 17, 63, 130]), rng.choice([1, 1, 1, 2, 7, 30]))
            for _ in range(degree)
        )
        groups.append(Group(prefix, members))
    heads = rng.choice([(8, 2), (4, 4), (4, 1)])
    shape = AttentionShape(*heads, head_dim=64, block_size=rng.choice([16, 32]))
    groups = [replace(g, num_prefix_tokens=g.num_prefix_tokens // 32 * 32) for g in groups]
    dtype = rng.choice([torch.float32, torch.float16, torch.bfloat16])
    check(make_case(shape, groups, seed=seed, dtype=dtype, num_padding=rng.randint(0, 2)))


@pytest.mark.parametrize("seed", range(4))
def test_merging_waits_for_nobody(seed: int) -> None:
    """Tiles may finish in any order: whichever comes last merges."""
    groups = [Group(1024, ((1, 1), (700, 1), (40, 2))), *MIXED]
    case = make_case(SHAPE, groups, seed=14)
    plan = planner_for(case).plan(case.batch)
    assert plan.schedule is not None
    num_tiles = int(plan.schedule.header[HEADER_TILES])
    order = torch.randperm(num_tiles, generator=torch.Generator().manual_seed(seed))
    plan.schedule.tiles[:num_tiles] = plan.schedule.tiles[order]
    assert_close(attend(case, plan), case)


@pytest.mark.parametrize("seed", range(3))
def test_merging_in_a_launch_of_its_own(seed: int) -> None:
    groups = [Group(1024, ((1, 1), (700, 1), (40, 2))), Group(0, ((1100, 9),)), *MIXED]
    case = make_case(SHAPE, groups, seed=seed)
    config = replace(load_config("cpu"), merge_in_launch=False)
    assert_close(attend(case, planner_for(case, config=config).plan(case.batch)), case)


def test_partials_of_an_earlier_step_are_never_read() -> None:
    groups = [Group(1024, ((1, 1), (700, 1), (40, 2))), *MIXED]
    first = make_case(SHAPE, groups, seed=15)
    planner = planner_for(first)
    for case in (first, make_case(SHAPE, MIXED[::-1], seed=16), make_case(SHAPE, [], seed=17)):
        plan = planner.plan(case.batch)
        assert plan.schedule is not None
        plan.schedule.partial_out.fill_(NAN)
        plan.schedule.partial_lse.fill_(NAN)
        if case.num_tokens:
            assert_close(attend(case, plan), case)
        assert not plan.schedule.counters.any()


def test_plan_serves_every_layer() -> None:
    case = make_case(SHAPE, MIXED, seed=18)
    plan = planner_for(case).plan(case.batch)
    for seed in range(3):
        keys = torch.randn(case.k_cache.shape, generator=torch.Generator().manual_seed(seed))
        layer = replace(case, k_cache=keys)
        assert_close(attend(layer, plan), layer)


def test_padding_tokens_are_left_alone() -> None:
    case = make_case(SHAPE, MIXED, seed=19)
    padded = replace(case, q=torch.cat([case.q, torch.full_like(case.q[:4], NAN)]))
    out = attend(padded, planner_for(case).plan(case.batch))
    assert out[case.num_tokens :].isnan().all()
    assert_close(out[: case.num_tokens], case)


@pytest.mark.parametrize("impl", IMPLS)
def test_batch_of_padding_alone(impl: Impl) -> None:
    case = make_case(SHAPE, [], seed=20, num_padding=3)
    out = attend(case, planner_for(case, impl).plan(case.batch))
    assert out.shape == (0, 8, 64)


def test_closed_gate_gives_the_same_without_sharing() -> None:
    case = make_case(SHAPE, MIXED, seed=21)
    config = replace(load_config("cpu"), gate=Gate({2: 10_000}, 64))
    plan = planner_for(case, config=config).plan(case.batch)
    assert plan.schedule is not None
    assert plan.schedule.header[HEADER_PREFIX_TILES] == 0
    assert_close(attend(case, plan), case)
