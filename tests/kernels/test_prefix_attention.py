"""The kernel, in Triton's interpreter, and the reference: each kind of batch once.

An axis of settings is a few values at a time (`attention_checks.DIAGONAL`); `full/` has any two of
them together, and more batches.
"""

from dataclasses import replace

import pytest
import torch
from support.attention_cases import NAN, AttentionCase, Group, make_case
from support.attention_checks import (
    DIAGONAL,
    IMPLS,
    MIXED,
    SHAPE,
    Row,
    assert_close,
    attend,
    check,
    check_row,
    expected,
    header_of,
    name_of,
    num_prefix_tiles,
    planner_for,
    schedule_of,
)

from batchllm_kernels.prefix_attention import StepPlan, prefix_attention
from batchllm_kernels.prefix_attention.api import Impl


@pytest.fixture(scope="module")
def mixed() -> tuple[AttentionCase, StepPlan]:
    """A batch of all sorts, and the kernel's plan of it."""
    case = make_case(SHAPE, MIXED, seed=0, num_padding=3)
    return case, planner_for(case).plan(case.batch)


def test_mixed_batch(mixed: tuple[AttentionCase, StepPlan]) -> None:
    case, plan = mixed
    assert_close(attend(case, plan), case)
    assert not schedule_of(plan).counters.any()
    assert num_prefix_tiles(plan) >= 2


def test_mixed_batch_by_the_reference() -> None:
    case = make_case(SHAPE, MIXED, seed=0, num_padding=3)
    plan = planner_for(case, "reference").plan(case.batch)
    assert_close(attend(case, plan), case)
    assert plan.prefixes is not None
    assert sorted(prefix.requests for prefix in plan.prefixes) == sorted(
        rows for rows in case.groups if len(rows) > 1
    )


def test_a_plan_serves_every_layer_and_leaves_padding_alone(
    mixed: tuple[AttentionCase, StepPlan],
) -> None:
    case, plan = mixed
    keys = torch.randn(case.k_cache.shape, generator=torch.Generator().manual_seed(1))
    layer = replace(case, k_cache=keys)
    padded = replace(layer, q=torch.cat([case.q, torch.full_like(case.q[:4], NAN)]))
    out = attend(padded, plan)
    assert out[case.num_tokens :].isnan().all()
    assert_close(out[: case.num_tokens], layer)


def test_output_in_the_queries_dtype(mixed: tuple[AttentionCase, StepPlan]) -> None:
    case = make_case(SHAPE, MIXED, seed=0, num_padding=3, dtype=torch.float16)
    out = prefix_attention(case.q, case.k_cache, case.v_cache, mixed[1], scale=0.125)
    assert out.dtype == torch.float16
    assert_close(out.float(), case)


def test_large_scores_stay_finite(mixed: tuple[AttentionCase, StepPlan]) -> None:
    case, plan = mixed
    case = replace(case, q=case.q * 1e4)
    torch.testing.assert_close(attend(case, plan), expected(case), rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("row", DIAGONAL, ids=name_of)
def test_settings(row: Row) -> None:
    check_row(row)


def test_awkward_lengths() -> None:
    """Of a context that is decoded or prefilled, and where a step of keys ends with a query."""
    decoded = [(num_keys - 1, 1) for num_keys in (1, 15, 16, 17, 63, 64, 65)]
    prefilled = [(0, 3), (33, 4), (0, 5), (33, 16), (0, 17), (0, 65), (31, 20), (63, 20)]
    check(make_case(SHAPE, [Group(0, (each,)) for each in decoded + prefilled], seed=1))


def test_groups_of_awkward_lengths() -> None:
    """Own contexts are empty or end near a block; the second group takes more than one tile."""
    groups = [
        Group(16, ((0, 1), (15, 1), (17, 1))),
        Group(64, ((0, 1), (1, 1), (63, 1))),
        Group(80, ((16, 2),) + ((63, 2),) * 4),
    ]
    assert num_prefix_tiles(check(make_case(SHAPE, groups, seed=2))) == 4


def test_long_context_of_few_requests_is_split() -> None:
    plan = check(make_case(SHAPE, [Group(0, ((530, 1),)), Group(0, ((3, 1),))], seed=10))
    header = header_of(schedule_of(plan))
    assert header.tiles > 4 and header.slots > 2


def test_long_prefix_and_long_prefill_are_split() -> None:
    groups = [Group(640, ((1, 1), (300, 1), (40, 2))), Group(0, ((400, 20),))]
    assert num_prefix_tiles(check(make_case(SHAPE, groups, seed=11))) > 1


@pytest.mark.parametrize("impl", IMPLS)
def test_batch_of_padding_alone(impl: Impl) -> None:
    case = make_case(SHAPE, [], seed=20, num_padding=3)
    out = attend(case, planner_for(case, impl).plan(case.batch))
    assert out.shape == (0, 8, 64)
