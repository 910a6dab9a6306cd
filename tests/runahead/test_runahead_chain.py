"""The chain's model against its own definition, written down plainly, and against the paper's."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.runahead import COST, chains, costs, links, splits

from batchllm_operator.cost import MODEL_SHAPES, ModelShape, find_gpu
from batchllm_operator.errors import PlanError
from batchllm_operator.runahead.planning import (
    AllGather,
    Chain,
    Goal,
    Link,
    ReplicaCost,
    all_gather_ttft,
)

H100 = find_gpu("H100")
FAST = Link(1e15)


def plain_times(chain: Chain, split: Sequence[int]) -> tuple[float, list[float], list[float]]:
    """TTFT, ends of chunks and of whole prefixes: replica by replica instead of layer by layer."""
    cost, link, p = chain.cost, chain.link, len(split)
    layers, total = range(cost.num_layers), sum(split)
    ready_before: list[float] = []
    there: list[list[float]] = []
    done: list[list[float]] = []
    for i, chunk in enumerate(split):
        before = sum(split[:i])
        matrices = chunk * (cost.qkv_s_per_token + cost.other_s_per_token)
        slower = max(1.0, cost.weights_s / matrices)
        qkv = chunk * cost.qkv_s_per_token * slower
        copied = before + (before + chunk if i < p - 1 else 0)
        copies = copied * cost.kv_copy_s_per_token
        attention = cost.pairs(chunk, before) * cost.s_per_pair
        rest = chunk * cost.other_s_per_token * slower + attention
        rest = max(rest, cost.overhead_s - qkv - copies)
        hop = link.latency_s + before * cost.kv_bytes_per_token / link.bytes_per_s
        now, arrived, ready = cost.step_overhead_s, 0.0, []
        there.append([])
        done.append([])
        for layer in layers:
            at = now + qkv
            if i > 0:
                posted = 0.0 if link.prefetches else now
                arrived = max(ready_before[layer], arrived, posted) + hop
                at = max(at, arrived)
            there[i].append(at)
            ready.append(at + copies)
            now = ready[-1] + rest
            done[i].append(now)
        ready_before = ready
    whole = [done[p - 1][-1]]
    arrivals = there[p - 1]
    for i in range(p - 2, -1, -1):
        after = total - sum(split[: i + 1])
        hop = link.latency_s + after * cost.kv_bytes_per_token / link.bytes_per_s
        back, now = [], 0.0
        for layer in layers:
            now = max(now, arrivals[layer]) + hop
            back.append(now)
        whole.append(max(done[i][-1], back[-1]))
        arrivals = [max(a, b) for a, b in zip(there[i], back, strict=True)]
    return done[p - 1][-1] + cost.sampled_token_s, [each[-1] for each in done], whole[::-1]


@given(chains(), st.data())
def test_times_are_those_of_the_plain_definition(chain: Chain, data: st.DataObject) -> None:
    split = data.draw(splits(chain.block_size))
    ttft, chunk, whole = plain_times(chain, split)
    found = chain.times(split)
    assert found.ttft_s == pytest.approx(ttft)
    assert found.chunk_s == pytest.approx(chunk)
    assert found.whole_s == pytest.approx(whole)


def test_two_replicas_by_hand() -> None:
    """Chunks of 4 and 2 tokens, two layers; 1 s per token for QKV, 2 s for the rest, 0.5 a pair."""
    cost = ReplicaCost(2, 1.0, 2.0, 0.5, kv_bytes_per_token=10.0, step_overhead_s=3.0)
    chain = Chain(cost, Link(bytes_per_s=8.0, latency_s=1.0), block_size=2)
    # Replica 0: starts at 3, has K and V at 7, and 10 pairs and the rest take 5 + 8: 20 and 37.
    # The hop takes 1 + 40 / 8 = 6: layers are there at 13 and 24 + 6 = 30.
    # Replica 1: at 13, 11 pairs and the rest take 5.5 + 4: 22.5; its second layer at 30 + 9.5.
    found = chain.times((4, 2))
    assert found.chunk_s == (37.0, 39.5)
    assert found.ttft_s == 39.5
    # Back go 20 bytes, 3.5 s, when all is there: at 13 and 30.
    assert found.whole_s == (37.0, 39.5)
    posted_late = dataclasses.replace(chain, link=Link(8.0, 1.0, prefetches=False))
    # The second receive is posted at 22.5, but replica 0 has that layer at 24 only: the same.
    assert posted_late.times((4, 2)).ttft_s == 39.5
    slow = dataclasses.replace(chain, link=Link(2.0, 1.0))
    # 21 s a hop: at 28, and 49 though replica 0 has the layer at 24; then 9.5.
    assert slow.times((4, 2)).ttft_s == 58.5
    # Back it takes 11 s: until 39, and from 49 until 60, long after replica 0 has computed all.
    assert slow.times((4, 2)).whole_s == (60.0, 58.5)
    slow = dataclasses.replace(chain, link=Link(2.0, 1.0, prefetches=False))
    # Posted when the first layer is done, at 37.5.
    assert slow.times((4, 2)).ttft_s == 37.5 + 21 + 9.5


def test_pairs_and_chunks_are_those_of_the_papers_figures() -> None:
    """Fig. 4 and 5: nine tokens; 27 products on each of three processes, or 16, 21 and 18."""
    cost = dataclasses.replace(COST, computes_masked_pairs=True)
    assert cost.pairs(3, 6) == 27
    assert [cost.pairs(4, 0), cost.pairs(3, 4), cost.pairs(2, 7)] == [16, 21, 18]
    assert COST.pairs(3, 4) == 5 + 6 + 7, "a causal kernel: token 5 attends to 5, and so on"


@given(chains(), st.data())
def test_no_split_beats_the_papers_bound(chain: Chain, data: st.DataObject) -> None:
    """Eq. 1: each pair of the rectangles has to be computed by one of p replicas."""
    cost = dataclasses.replace(chain.cost, computes_masked_pairs=True)
    split = data.draw(splits(chain.block_size, num_replicas=4))
    total = sum(split)
    pairs = (total**2 + sum(chunk**2 for chunk in split)) / 2
    found = dataclasses.replace(chain, cost=cost).times(split)
    assert max(found.chunk_s) >= pairs * cost.s_per_pair * cost.num_layers / 4 * (1 - 1e-9)
    bound = cost.num_layers * cost.s_per_pair * total**2 / 2 * (1 / 4 + 1 / 16)  # Eq. 3
    assert pairs * cost.s_per_pair * cost.num_layers / 4 >= bound * (1 - 1e-9)


@given(costs(), st.integers(1, 5000))
def test_one_replica_takes_what_the_chunk_takes(cost: ReplicaCost, num_tokens: int) -> None:
    alone = Chain(cost, FAST, 16).times((num_tokens,))
    assert alone.ttft_s == pytest.approx(cost.chunk_seconds(num_tokens))
    assert alone.whole_s == alone.chunk_s
    assert cost.prefill_seconds(num_tokens) == cost.chunk_seconds(num_tokens)


@given(chains(), st.data())
def test_a_better_link_is_never_slower(chain: Chain, data: st.DataObject) -> None:
    split = data.draw(splits(chain.block_size))
    link = dataclasses.replace(chain.link, prefetches=False)
    chain = dataclasses.replace(chain, link=link)
    better = [
        dataclasses.replace(link, bytes_per_s=2 * link.bytes_per_s),
        dataclasses.replace(link, latency_s=link.latency_s / 2),
        dataclasses.replace(link, prefetches=True),
    ]
    found = chain.times(split)
    for each in better:
        times = dataclasses.replace(chain, link=each).times(split)
        assert times.ttft_s <= found.ttft_s * (1 + 1e-12)
        assert max(times.whole_s) <= max(found.whole_s) * (1 + 1e-12)
    assert all(whole >= chunk for whole, chunk in zip(found.whole_s, found.chunk_s, strict=True))


@given(costs(), links(), st.integers(1, 4), st.integers(16, 4000))
def test_an_all_gather_by_its_formula(
    cost: ReplicaCost, link: Link, num_replicas: int, num_tokens: int
) -> None:
    cost = dataclasses.replace(cost, weights_s=0.0, overhead_s=0.0)
    found = all_gather_ttft(cost, AllGather(link.bytes_per_s), num_tokens, num_replicas)
    if num_replicas == 1:
        assert found == cost.chunk_seconds(num_tokens)
        return
    chunk = -(-num_tokens // num_replicas)
    layer_s = (
        chunk * (cost.qkv_s_per_token + cost.other_s_per_token)
        + (num_tokens - chunk) * cost.kv_bytes_per_token / link.bytes_per_s
        + num_tokens * cost.kv_copy_s_per_token
        + cost.pairs(chunk, num_tokens - chunk) * cost.s_per_pair
    )
    head_s = cost.step_overhead_s + cost.sampled_token_s
    assert found == pytest.approx(cost.num_layers * layer_s + head_s)


def test_an_all_gather_launches_more_than_a_layer() -> None:
    cost = dataclasses.replace(COST, overhead_s=10.0)
    gather = AllGather(1e15, overhead_s=2.0)
    assert all_gather_ttft(cost, gather, 64, 4) == pytest.approx(cost.num_layers * 12.0)


def test_a_replica_on_a_gpu_takes_what_the_cost_model_says() -> None:
    """8B in 16 bits: 2 FLOP a weight, 4 * heads * size a pair, by the rates of `gpus.toml`."""
    model = MODEL_SHAPES["Llama-3-8B"]
    cost = ReplicaCost.of(model, H100)
    layers = cost.num_layers
    matrices = layers * (cost.qkv_s_per_token + cost.other_s_per_token)
    assert matrices == pytest.approx(model.flop_per_token / H100.flop_per_s)
    assert layers * cost.s_per_pair == pytest.approx(model.flop_per_pair / H100.flop_per_s)
    assert layers * cost.kv_bytes_per_token == model.kv_bytes_per_token == 131_072
    assert cost.qkv_s_per_token * H100.flop_per_s == 2 * 4096 * (4096 + 2 * 1024)
    head_s = model.vocab_size * model.hidden_size * 2 / H100.bytes_per_s
    weights_s = layers * cost.weights_s + head_s
    assert weights_s == pytest.approx(model.step_weight_bytes / H100.bytes_per_s)
    unfused = ReplicaCost.of(model, H100, score_bytes=30.0)
    more_s = unfused.s_per_pair - cost.s_per_pair
    assert more_s == pytest.approx(32 * 30 / H100.bytes_per_s)
    copied_s = cost.kv_copy_s_per_token
    assert copied_s == pytest.approx(2 * cost.kv_bytes_per_token / H100.bytes_per_s)  # read, write


def test_steps_are_cut_and_small_ones_read_all_weights() -> None:
    cost = ReplicaCost(2, 1.0, 1.0, 0.0, 1.0, weights_s=100.0, step_overhead_s=7.0)
    assert cost.prefill_seconds(90, max_step_tokens=60) == (2 * 120 + 7) + (2 * 100 + 7)


def test_later_steps_attend_to_what_is_before_them() -> None:
    steps = [COST.chunk_seconds(512, before) for before in (0, 512, 1024)]
    assert COST.prefill_seconds(1536, max_step_tokens=512) == pytest.approx(sum(steps))
    assert steps[2] > steps[1] > steps[0]


@given(
    st.floats(0, 1),
    st.floats(1e-6, 1e-2),
    st.floats(0, 1e-5),
    st.booleans(),
)
def test_measured_steps_give_the_rates_back(
    step_s: float, token_s: float, pair_s: float, computes_masked_pairs: bool
) -> None:
    cost = dataclasses.replace(COST, computes_masked_pairs=computes_masked_pairs)
    sizes = [(128, 0), (512, 0), (1024, 0), (2048, 0), (1024, 1024), (512, 3584), (4096, 0)]
    steps = [(c, s, step_s + c * token_s + cost.pairs(c, s) * pair_s) for c, s in sizes]
    fitted = cost.calibrated(steps)
    assert [fitted.chunk_seconds(c, s) for c, s, _ in steps] == pytest.approx(
        [seconds for _, _, seconds in steps], rel=1e-6
    )
    share = cost.qkv_s_per_token / (cost.qkv_s_per_token + cost.other_s_per_token)
    tokens_s = fitted.qkv_s_per_token + fitted.other_s_per_token
    assert fitted.qkv_s_per_token == pytest.approx(share * tokens_s)


def test_measurements_that_say_nothing_are_refused() -> None:
    with pytest.raises(PlanError, match="three measured steps"):
        COST.calibrated([(16, 0, 1.0), (16, 0, 1.1), (32, 0, 2.0)])
    with pytest.raises(PlanError, match="more than 0 seconds"):
        COST.calibrated([(16, 0, 1.0), (32, 0, 0.0), (64, 0, 2.0)])
    with pytest.raises(PlanError, match="don't grow"):
        COST.calibrated([(16, 0, 4.0), (32, 0, 2.0), (64, 0, 1.0)])


@pytest.mark.parametrize(
    ("split", "said"),
    [
        ((32, 32), "don't make up a prefix of 100"),
        ((100, 0), "don't make up"),
        ((50, 50), "aren't whole blocks"),
        ((16, 84), "84 tokens doesn't fit into a step of 64"),
    ],
)
def test_splits_that_are_none_are_refused(split: tuple[int, ...], said: str) -> None:
    chain = Chain(COST, FAST, 16, max_step_tokens=64)
    chain.check_split((48, 52), 100)
    with pytest.raises(PlanError, match=said):
        chain.check_split(split, 100)


def test_prefixes_that_cannot_be_split_are_refused_with_what_to_do() -> None:
    chain = Chain(COST, FAST, 16, max_step_tokens=100)
    assert chain.max_chunk_blocks == 6
    chain.check_length(192, 2)
    with pytest.raises(PlanError, match=r"raise engine\.max_num_batched_tokens"):
        chain.check_length(193, 2)
    with pytest.raises(PlanError, match="use fewer"):
        chain.check_length(16, 2)
    with pytest.raises(PlanError, match="at least one replica"):
        chain.check_length(16, 0)
    too_long = np.array([[128, 64], [0, 64], [96, 96]], dtype=np.int64)
    goals: tuple[Goal, ...] = ("first_token", "whole_prefix")
    for until in goals:
        assert np.isinf(chain.seconds(too_long, until)).tolist() == [True, True, False]


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: Link(0.0), "bytes_per_s"),
        (lambda: Link(float("inf")), "bytes_per_s"),
        (lambda: Link(1.0, -1.0), "latency_s"),
        (lambda: AllGather(-1.0), "bytes_per_s"),
        (lambda: AllGather(1.0, float("nan")), "overhead_s"),
        (lambda: Chain(COST, FAST, 0), "block_size"),
        (lambda: Chain(COST, FAST, 16, 15), "holds no block"),
        (lambda: ReplicaCost(0, 1.0, 1.0, 1.0, 1.0), "num_layers"),
        (lambda: ReplicaCost(1, 1.0, 1.0, -1.0, 1.0), "s_per_pair must be finite and not below 0"),
        (lambda: ReplicaCost(1, 0.0, 1.0, 1.0, 1.0), "qkv_s_per_token must be finite and above 0"),
        (lambda: all_gather_ttft(COST, AllGather(1.0), 3, 4), "3 tokens are too few for 4"),
    ],
)
def test_values_out_of_range_are_refused(make: object, said: str) -> None:
    assert callable(make)
    with pytest.raises(PlanError, match=said):
        make()


def test_a_longer_hop_is_needed_for_more_heads_of_keys_and_values() -> None:
    """The first hop of an 8B model at 400 TFLOP/s has to carry some 3.7 GB/s to be hidden."""
    gpu = dataclasses.replace(H100, achievable_compute=400 / 989)
    shape = MODEL_SHAPES["Llama-3-8B"]
    cost = ReplicaCost.of(shape, gpu)
    chunk = 4096
    layer_s = cost.chunk_seconds(chunk) - cost.step_overhead_s - cost.sampled_token_s
    needed = chunk * cost.kv_bytes_per_token * cost.num_layers / layer_s
    assert needed == pytest.approx(3.7e9, rel=0.15)
    many = ReplicaCost.of(ModelShape(**{**dataclasses.asdict(shape), "num_kv_heads": 32}), gpu)
    assert many.kv_bytes_per_token == 4 * cost.kv_bytes_per_token
