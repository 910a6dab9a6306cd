"""The model of bytes and FLOPs against counting them one by one."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.benchmark_modules import load

from batchllm_kernels.prefix_attention import AttentionShape
from batchllm_kernels.tuning.workloads import Group
from batchllm_operator.cost import find_gpu
from batchllm_operator.cost.gpu import read_gpu_table

kernel_work = load("kernel_work")
AttentionWork = kernel_work.AttentionWork
count_work = kernel_work.count_work
find_chip = kernel_work.find_chip

SHAPE = AttentionShape(num_q_heads=6, num_kv_heads=2, head_dim=8, block_size=16)
H100 = find_gpu("H100")


def count_by_hand(groups: list[Group], q_bytes: int, kv_bytes: int) -> Any:
    """Every key, query, score and partial on its own."""
    shape, keys = SHAPE, set()
    num_plain = num_scores = num_queries = num_partials = 0
    for idx, group in enumerate(groups):
        is_shared = len(group.members) > 1 and group.num_prefix_tokens > 0
        for member, (prior, query_len) in enumerate(group.members):
            length = group.num_prefix_tokens + prior + query_len
            for query in range(length - query_len, length):
                num_queries += 1
                num_partials += 2 if is_shared else 0
                num_scores += len(range(query + 1))
            for position in range(length):
                num_plain += 1
                keys.add((idx, None if position < group.num_prefix_tokens else member, position))
    kv_bytes_of_token = sum(kv_bytes for _ in "kv" for _ in range(shape.num_kv_heads * 8))
    per_partial = shape.num_q_heads * (shape.head_dim * 4 + 4)
    return AttentionWork(
        unique_kv_bytes=len(keys) * kv_bytes_of_token,
        plain_kv_bytes=num_plain * kv_bytes_of_token,
        q_out_bytes=num_queries * shape.num_q_heads * shape.head_dim * (q_bytes + q_bytes),
        partials_bytes=num_partials * per_partial * 2,
        flop=num_scores * shape.num_q_heads * (2 * shape.head_dim + 2 * shape.head_dim),
    )


members = st.tuples(st.integers(0, 40), st.integers(1, 5))
batches = st.lists(
    st.builds(Group, st.integers(0, 40), st.lists(members, min_size=1, max_size=5).map(tuple)),
    max_size=4,
)


@given(batches, st.sampled_from([1, 2]))
def test_counts_what_counting_by_hand_does(groups: list[Group], kv_bytes: int) -> None:
    assert count_work(groups, SHAPE, kv_bytes=kv_bytes) == count_by_hand(groups, 2, kv_bytes)


@given(batches)
def test_sharing_reads_no_more_keys_and_computes_the_same(groups: list[Group]) -> None:
    apart = [
        Group(group.num_prefix_tokens, (member,)) for group in groups for member in group.members
    ]
    shared, plain = count_work(groups, SHAPE), count_work(apart, SHAPE)
    assert plain.unique_kv_bytes == plain.plain_kv_bytes == shared.plain_kv_bytes
    assert shared.unique_kv_bytes <= shared.plain_kv_bytes
    assert (shared.flop, shared.q_out_bytes) == (plain.flop, plain.q_out_bytes)
    assert plain.partials_bytes == 0
    for chip in read_gpu_table().values():
        assert shared.ideal_s(chip) <= shared.shared_s(chip)
        assert shared.ideal_s(chip) <= shared.plain_s(chip)
        assert plain.predicted_speedup(chip) == 1.0


def test_a_decode_step_of_a_7b_model() -> None:
    shape = AttentionShape(num_q_heads=32, num_kv_heads=8, head_dim=128, block_size=16)
    work = count_work([Group(4096, ((255, 1),) * 256)], shape)
    assert work.plain_kv_bytes == 256 * 4352 * 4096
    assert work.unique_kv_bytes == (4096 + 256 * 256) * 4096
    assert work.flop == 256 * 4352 * 4 * 32 * 128
    assert work.ideal_s(H100) == pytest.approx(
        ((4096 + 256 * 256) * 4096 + 256 * 2 * 32 * 128 * 2) / 3.35e12
    )
    assert 10 < work.predicted_speedup(H100) < 16


def test_prefill_is_bound_by_compute() -> None:
    shape = AttentionShape(num_q_heads=32, num_kv_heads=8, head_dim=128, block_size=16)
    work = count_work([Group(0, ((0, 8192),))], shape)
    assert work.ideal_s(H100) == pytest.approx(work.flop / H100.bf16_flop_per_s)


def test_finds_chips_by_what_drivers_call_them() -> None:
    assert find_chip("NVIDIA H100 80GB HBM3") == H100
    assert find_chip("NVIDIA H100 PCIe") is None  # slower memory: not the same chip
    assert find_chip("cpu") is None
