"""What is refused, by name, and what planning promises."""

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from support.attention_cases import NAN, AttentionCase, Group, make_case

from batchllm_kernels.prefix_attention import (
    AttentionShape,
    BatchLimits,
    PagedBatch,
    StepPlan,
    StepPlanner,
    UnsupportedError,
    prefix_attention,
)
from batchllm_kernels.prefix_attention.api import Impl

CPU = torch.device("cpu")
SHAPE = AttentionShape(num_q_heads=4, num_kv_heads=2, head_dim=64, block_size=16)
LIMITS = BatchLimits(4, 8)
GROUPS = [Group(32, ((5, 1), (9, 1)))]


def case() -> AttentionCase:
    return make_case(SHAPE, GROUPS, seed=0)


def planner(impl: Impl = "triton", shape: AttentionShape = SHAPE) -> StepPlanner:
    return StepPlanner(shape, LIMITS, impl=impl, device=CPU)


@cache
def planned(impl: Impl) -> tuple[AttentionCase, StepPlan]:
    """A batch and its plan, which a refused call leaves alone."""
    good = case()
    return good, planner(impl).plan(good.batch)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"head_dim": 80}, "head_dim is 80"),
        ({"block_size": 8}, "block_size is 8"),
        ({"block_size": 24}, "block_size is 24"),
        ({"block_size": 256}, "block_size is 256"),
        ({"kv_bits": 4}, "kv_bits is 4"),
    ],
)
def test_shapes_that_only_the_reference_takes(change: dict[str, int], named: str) -> None:
    shape = replace(SHAPE, **change)
    planner("reference", shape)
    with pytest.raises(UnsupportedError, match=named):
        planner("triton", shape)


def test_what_no_implementation_takes() -> None:
    for heads in ((4, 3), (4, 0), (3, 4)):
        with pytest.raises(UnsupportedError, match="num_q_heads"):
            AttentionShape(*heads, head_dim=64, block_size=16)
    with pytest.raises(UnsupportedError, match="impl is 'cuda'"):
        planner("cuda")
    large = make_case(SHAPE, GROUPS * 3, seed=0)
    with pytest.raises(UnsupportedError, match="6 requests, the limit is 4"):
        planner().plan(large.batch)


Change = Callable[[AttentionCase], dict[str, Any]]


@pytest.mark.parametrize("impl", ["reference", "triton"])
@pytest.mark.parametrize(
    ("change", "named"),
    [
        (lambda c: {"q": c.q[:, :2]}, "q must be"),
        (lambda c: {"q": c.q.double()}, "q is torch.float64"),
        (lambda c: {"k_cache": c.k_cache[:, :8]}, "k_cache must be"),
        (lambda c: {"v_cache": c.v_cache[..., :32]}, "v_cache must be"),
        (lambda c: {"k_cache": c.k_cache.half()}, "k_cache is torch.float16"),
        (lambda c: {"v_cache": c.v_cache.half()}, "v_cache is torch.float16"),
        (lambda c: {"v_cache": c.v_cache[:-1]}, "v_cache has"),
        (lambda c: {"q": torch.empty(2, 64, 4).transpose(1, 2)}, "q must be contiguous"),
        (
            lambda c: {"k_cache": torch.empty(len(c.k_cache), 2, 16, 64).transpose(1, 2)},
            "same strides",
        ),
        (lambda c: {"out": torch.empty(1, 4, 64)}, "out is"),
        (lambda c: {"scale": 0.0}, "scale"),
        (lambda c: {"window": 0}, "window"),
        (lambda c: {"soft_cap": -1.0}, "soft_cap"),
        (
            lambda c: {
                "k_cache": c.k_cache.to(torch.float8_e5m2),
                "v_cache": c.v_cache.to(torch.float8_e5m2),
            },
            "the plan is for 16 bits",
        ),
    ],
)
def test_tensors_and_settings_that_cannot_be_taken(change: Change, named: str, impl: Impl) -> None:
    good, plan = planned(impl)
    given = {"q": good.q, "k_cache": good.k_cache, "v_cache": good.v_cache, "scale": 0.125}
    given |= change(good)
    with pytest.raises(UnsupportedError, match=named):
        prefix_attention(plan=plan, **given)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"seq_lens": torch.ones(2)}, "seq_lens must be an int32 tensor"),
        ({"block_table": torch.zeros(2, dtype=torch.int32)}, "block_table must be"),
        ({"block_table": torch.zeros(3, 4, dtype=torch.int32)}, "block_table 2 rows"),
        ({"query_start_loc": torch.zeros(2, dtype=torch.int32)}, "3 entries"),
        ({"block_table": torch.zeros(4, 2, dtype=torch.int32).T}, "contiguous"),
    ],
)
def test_batches_that_do_not_fit_together(change: dict[str, Any], named: str) -> None:
    good: dict[str, Any] = {
        "query_start_loc": torch.zeros(3, dtype=torch.int32),
        "seq_lens": torch.zeros(2, dtype=torch.int32),
        "block_table": torch.zeros(2, 4, dtype=torch.int32),
    }
    PagedBatch(**good)
    with pytest.raises(UnsupportedError, match=named):
        PagedBatch(**good | change)


@pytest.mark.parametrize("impl", ["reference", "triton"])
def test_warming_up_leaves_everything_as_it_was(impl: Impl) -> None:
    good = case()
    warmed = planner(impl)
    before = good.k_cache.clone()
    warmed.warm_up(good.q, good.k_cache, good.v_cache)
    warmed.warm_up(good.q, good.k_cache, good.v_cache, window=16, soft_cap=30.0)
    torch.testing.assert_close(good.k_cache, before, equal_nan=True)
    out = torch.full_like(good.q, NAN)
    args = good.q, good.k_cache, good.v_cache
    prefix_attention(*args, warmed.plan(good.batch), scale=0.125, out=out)
    fresh = prefix_attention(*args, planner(impl).plan(good.batch), scale=0.125)
    torch.testing.assert_close(out, fresh, rtol=0, atol=0)
