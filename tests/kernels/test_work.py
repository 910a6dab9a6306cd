"""The model of bytes and FLOPs against counting them one by one."""

from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.benchmark_modules import load

from batchllm_kernels.prefix_attention import AttentionShape, SharedPrefix

kernel_work = load("kernel_work")
AttentionWork = kernel_work.AttentionWork
count_work = kernel_work.count_work
find_chip = kernel_work.find_chip
read_chips = kernel_work.read_chips

SHAPE = AttentionShape(num_q_heads=6, num_kv_heads=2, head_dim=8, block_size=16)
H100 = read_chips()["H100"]


def count_by_hand(
    query_lens: Sequence[int],
    seq_lens: Sequence[int],
    prefixes: Sequence[SharedPrefix],
    shape: AttentionShape,
    q_bytes: int,
    kv_bytes: int,
) -> Any:
    """Every key, query, score and partial on its own."""
    prefix_of = {r: (i, p.num_tokens) for i, p in enumerate(prefixes) for r in p.requests}
    keys: set[tuple[object, int]] = set()
    num_plain = num_scores = num_queries = num_partials = 0
    for request, (query_len, seq_len) in enumerate(zip(query_lens, seq_lens, strict=True)):
        group, shared = prefix_of.get(request, (None, 0))
        for query in range(seq_len - query_len, seq_len):
            num_queries += 1
            num_partials += 2 if request in prefix_of else 0
            num_scores += len(range(query + 1))
        for position in range(seq_len if query_len else 0):
            num_plain += 1
            owner = ("group", group) if position < shared else ("request", request)
            keys.add((owner, position))
    kv_bytes_of_token = sum(kv_bytes for _ in "kv" for _ in range(shape.num_kv_heads * 8))
    per_partial = shape.num_q_heads * (shape.head_dim * 4 + 4)
    return AttentionWork(
        unique_kv_bytes=len(keys) * kv_bytes_of_token,
        plain_kv_bytes=num_plain * kv_bytes_of_token,
        q_out_bytes=num_queries * shape.num_q_heads * shape.head_dim * (q_bytes + q_bytes),
        partials_bytes=num_partials * per_partial * 2,
        flop=num_scores * shape.num_q_heads * (2 * shape.head_dim + 2 * shape.head_dim),
    )


@st.composite
def batches(draw: st.DrawFn) -> tuple[list[int], list[int], list[SharedPrefix]]:
    num_requests = draw(st.integers(0, 8))
    query_lens = [draw(st.integers(0, 5)) for _ in range(num_requests)]
    seq_lens = [query_len + draw(st.integers(0, 40)) for query_len in query_lens]
    rows = draw(st.permutations([r for r in range(num_requests) if query_lens[r]]))
    prefixes = []
    while len(rows) > 1 and draw(st.booleans()):
        degree = draw(st.integers(2, len(rows)))
        members, rows = sorted(rows[:degree]), rows[degree:]
        longest = min(seq_lens[r] - query_lens[r] for r in members)
        prefixes.append(SharedPrefix(tuple(members), draw(st.integers(0, longest))))
    return query_lens, seq_lens, prefixes


@given(batches(), st.sampled_from([1, 2]))
def test_counts_what_counting_by_hand_does(
    batch: tuple[list[int], list[int], list[SharedPrefix]], kv_bytes: int
) -> None:
    work = count_work(*batch, SHAPE, kv_bytes=kv_bytes)
    assert work == count_by_hand(*batch, SHAPE, 2, kv_bytes)


@given(batches())
def test_sharing_reads_no_more_keys_and_computes_the_same(
    batch: tuple[list[int], list[int], list[SharedPrefix]],
) -> None:
    shared, plain = count_work(*batch, SHAPE), count_work(*batch[:2], [], SHAPE)
    assert plain.unique_kv_bytes == plain.plain_kv_bytes == shared.plain_kv_bytes
    assert shared.unique_kv_bytes <= shared.plain_kv_bytes
    assert (shared.flop, shared.q_out_bytes) == (plain.flop, plain.q_out_bytes)
    assert plain.partials_bytes == 0
    for chip in read_chips().values():
        assert shared.ideal_s(chip) <= shared.shared_s(chip)
        assert shared.ideal_s(chip) <= shared.plain_s(chip)
        assert plain.predicted_speedup(chip) == 1.0


def test_a_decode_step_of_a_7b_model() -> None:
    shape = AttentionShape(num_q_heads=32, num_kv_heads=8, head_dim=128, block_size=16)
    prefix = SharedPrefix(tuple(range(256)), 4096)
    work = count_work([1] * 256, [4096 + 256] * 256, [prefix], shape)
    assert work.plain_kv_bytes == 256 * 4352 * 4096
    assert work.unique_kv_bytes == (4096 + 256 * 256) * 4096
    assert work.flop == 256 * 4352 * 4 * 32 * 128
    assert work.ideal_s(H100) == pytest.approx(
        ((4096 + 256 * 256) * 4096 + 256 * 2 * 32 * 128 * 2) / 3.35e12
    )
    assert 10 < work.predicted_speedup(H100) < 16


def test_prefill_is_bound_by_compute() -> None:
    shape = AttentionShape(num_q_heads=32, num_kv_heads=8, head_dim=128, block_size=16)
    work = count_work([8192], [8192], [], shape)
    assert work.ideal_s(H100) == pytest.approx(work.flop / H100.bf16_flop_per_s)


@pytest.mark.parametrize(
    ("query_lens", "seq_lens", "prefixes", "message"),
    [
        ([1], [1, 2], [], "1 query lengths for 2 requests"),
        ([3], [2], [], "request 0 has 3 query tokens"),
        ([1, 1], [9, 9], [SharedPrefix((0, 2), 8)], "request 2"),
        ([1, 1], [9, 9], [SharedPrefix((0, 1), 8), SharedPrefix((0, 1), 8)], "in two groups"),
        ([1, 1], [9, 9], [SharedPrefix((0, 1), 9)], "a prefix of 9"),
        ([1, 0], [9, 9], [SharedPrefix((0, 1), 8)], "request 1 has 0 query tokens"),
    ],
)
def test_refuses_what_does_not_fit(
    query_lens: list[int], seq_lens: list[int], prefixes: list[SharedPrefix], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        count_work(query_lens, seq_lens, prefixes, SHAPE)


def test_finds_chips_by_what_drivers_call_them() -> None:
    assert set(read_chips()) == {"H100", "H200", "A100", "MI300X", "MI250X"}
    assert find_chip("NVIDIA H100 80GB HBM3") == H100
    assert find_chip("NVIDIA H100 PCIe") is None  # slower memory: not the same chip
    assert find_chip("cpu") is None
