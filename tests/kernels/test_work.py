"""The model of bytes and FLOPs against counting them one by one."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from kernel_settings.workloads import Group
from support.benchmark_modules import load

from batchllm_kernels.prefix_attention import AttentionShape
from batchllm_operator.cost import find_gpu
from batchllm_operator.cost.gpu import read_gpu_table

kernel_work = load("kernel_work")
count_work, find_chip = kernel_work.count_work, kernel_work.find_chip

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
    return kernel_work.AttentionWork(
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
def test_sharing_is_bounded_by_what_is_read_apart(groups: list[Group]) -> None:
    work = count_work(groups, SHAPE)
    for chip in read_gpu_table().values():
        assert work.ideal_s(chip) <= min(work.shared_s(chip), work.plain_s(chip))


def test_a_decode_step_of_a_7b_model_is_bound_by_memory_and_prefill_by_compute() -> None:
    shape = AttentionShape(num_q_heads=32, num_kv_heads=8, head_dim=128, block_size=16)
    decode = count_work([Group(4096, ((255, 1),) * 256)], shape)
    num_bytes = (4096 + 256 * 256) * 4096 + 256 * 2 * 32 * 128 * 2
    assert decode.ideal_s(H100) == pytest.approx(num_bytes / 3.35e12)
    assert 10 < decode.predicted_speedup(H100) < 16
    prefill = count_work([Group(0, ((0, 8192),))], shape)
    assert prefill.ideal_s(H100) == pytest.approx(prefill.flop / H100.bf16_flop_per_s)


def test_finds_chips_by_what_drivers_call_them() -> None:
    assert find_chip("NVIDIA H100 80GB HBM3") == H100
    assert find_chip("NVIDIA H100 PCIe") is None  # slower memory: not the same chip
    assert find_chip("cpu") is None
