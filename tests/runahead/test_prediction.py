"""The chain's model against its own definition, written down plainly, and the costs behind it."""

import dataclasses
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.benchmark_modules import load
from support.levels import examples
from support.runahead import COST, CPU_CHAIN, CPU_COST, chains, splits

from batchllm_operator.cost import MODEL_SHAPES, find_gpu
from batchllm_operator.errors import PlanError
from batchllm_operator.runahead.prediction import Chain, ReplicaCost

H100 = find_gpu("H100")
rules = load("runahead_rules")
MOST_BLOCKS = {1: 500, 2: 4000, 3: 200, 4: 60, 5: 30}


def seconds(chain: Chain, split: Sequence[int]) -> float:
    return float(chain.seconds(np.array([split]))[0])


def plain_seconds(chain: Chain, split: Sequence[int]) -> float:
    """Layer by layer, with the name of each time."""
    cost, total = chain.cost, sum(split)
    done, sent = [0.0] * len(split), 0.0
    for _ in range(cost.num_layers):
        for i, chunk in enumerate(split):
            matrices = chunk * (cost.qkv_s_per_token + cost.other_s_per_token)
            slower = max(1.0, cost.weights_s / matrices)
            projected = done[i] + chunk * cost.qkv_s_per_token * slower
            has_all_before = max(projected, sent) if i > 0 else projected
            pairs = sum(range(sum(split[:i]) + 1, sum(split[: i + 1]) + 1))
            sent = max(projected, sent)
            sent += chunk * cost.kv_bytes_per_token / chain.link_bytes_per_s
            done[i] = has_all_before + chunk * cost.other_s_per_token * slower
            done[i] += pairs * cost.s_per_pair + total * cost.kv_copy_s_per_token
    return max(*done, sent) + cost.step_overhead_s + cost.sampled_token_s


@given(chains(), st.data())
def test_seconds_are_those_of_the_plain_definition(chain: Chain, data: st.DataObject) -> None:
    split = data.draw(splits(chain))
    assert seconds(chain, split) == pytest.approx(plain_seconds(chain, split))


def test_chunks_that_are_empty_or_dont_fit_take_forever() -> None:
    chain = Chain(COST, 2, 1e9, block_size=16, max_chunk_blocks=6)
    too_long = np.array([[128, 64], [0, 64], [96, 96]], dtype=np.int64)
    assert np.isinf(chain.seconds(too_long)).tolist() == [True, True, False]
    assert [chain.can_split(num) for num in (16, 17, 192, 193)] == [False, True, True, False]


def test_a_replica_on_a_gpu_takes_what_the_cost_model_says() -> None:
    """8B in 16 bits: 2 FLOP a weight, 4 * heads * size a pair, by the rates of `gpus.toml`."""
    model = MODEL_SHAPES["Llama-3-8B"]
    cost = ReplicaCost.of(model, H100)
    layers = cost.num_layers
    assert layers * cost.s_per_token == pytest.approx(model.flop_per_token / H100.flop_per_s)
    assert layers * cost.s_per_pair == pytest.approx(model.flop_per_pair / H100.flop_per_s)
    assert layers * cost.kv_bytes_per_token == model.kv_bytes_per_token == 131_072
    assert cost.qkv_s_per_token * H100.flop_per_s == 2 * 4096 * (4096 + 2 * 1024)
    head_s = model.vocab_size * model.hidden_size * 2 / H100.bytes_per_s
    weights_s = layers * cost.weights_s + head_s
    assert weights_s == pytest.approx(model.step_weight_bytes / H100.bytes_per_s)
    copied_s = cost.kv_copy_s_per_token
    assert copied_s == pytest.approx(2 * cost.kv_bytes_per_token / H100.bytes_per_s)  # read, write


@given(st.floats(0, 1), st.floats(1e-6, 1e-2), st.floats(0, 1e-5))
def test_measured_steps_give_the_rates_back(step_s: float, token_s: float, pair_s: float) -> None:
    sizes = [(128, 0), (512, 0), (1024, 0), (2048, 0), (1024, 1024), (512, 3584), (4096, 0)]
    pairs = [chunk * before + chunk * (chunk + 1) / 2 for chunk, before in sizes]
    steps = [
        (chunk, before, step_s + chunk * token_s + num * pair_s)
        for (chunk, before), num in zip(sizes, pairs, strict=True)
    ]
    fitted = COST.calibrated(steps)
    for chunk, before, measured_s in steps:
        assert fitted.step_seconds(chunk, before) == pytest.approx(measured_s, rel=1e-6)
    share = COST.qkv_s_per_token / COST.s_per_token
    assert fitted.qkv_s_per_token == pytest.approx(share * fitted.s_per_token)


def test_measurements_without_information_are_refused() -> None:
    with pytest.raises(PlanError, match="three measured steps"):
        COST.calibrated([(16, 0, 1.0), (16, 0, 1.1), (32, 0, 2.0)])
    with pytest.raises(PlanError, match="don't grow"):
        COST.calibrated([(16, 0, 4.0), (32, 0, 2.0), (64, 0, 1.0)])


# Splits


@st.composite
def prefixes(draw: st.DrawFn) -> tuple[Chain, int]:
    """A chain and a prefix of which all splits can be tried."""
    chain = draw(chains())
    p, size = chain.num_replicas, chain.block_size
    num_blocks = draw(st.integers(p, MOST_BLOCKS[p]))
    if draw(st.booleans()):
        even = -(-num_blocks // p)
        chain = dataclasses.replace(chain, max_chunk_blocks=draw(st.integers(even, 2 * even)))
    return chain, num_blocks * size - draw(st.integers(0, size - 1))


@settings(max_examples=examples(40))
@given(prefixes())
def test_a_split_has_whole_blocks_that_fit_and_never_beats_the_best(
    case: tuple[Chain, int],
) -> None:
    chain, num_tokens = case
    least_s = rules.least_seconds(chain, num_tokens) if chain.num_replicas > 1 else 0.0
    for split in (chain.split(num_tokens), rules.even_split(chain, num_tokens)):
        assert (len(split), sum(split)) == (chain.num_replicas, num_tokens)
        assert min(split) >= 1
        assert max(split) <= chain.longest_chunk
        assert not any(chunk % chain.block_size for chunk in split[:-1])
        assert seconds(chain, split) >= least_s * (1 - 1e-12)


def test_splits_and_placements_are_near_the_best() -> None:
    """The benchmark's own cases; it draws a thousand."""
    report = rules.measure(40, seed=3)
    assert report["num_long_chunks"] > 0
    assert report["worst_of_long_chunks"] <= rules.MOST_LONGER
    assert report["num_chosen_over_margin"] <= 1
    assert report["worst_share_longer"]["even"] > 0.1
    assert report["mean_placement"] < 0.02


@pytest.mark.parametrize("num_replicas", [5, 12])
def test_many_replicas_end_together_where_transfers_cost_nothing(num_replicas: int) -> None:
    """Here there are too many splits to try."""
    cost = dataclasses.replace(COST, num_layers=32, s_per_pair=2e-9)
    chain = Chain(cost, num_replicas, 1e15)
    split = chain.split(32_768)
    alone_s = cost.step_seconds(32_768)
    assert alone_s / num_replicas <= seconds(chain, split) <= 1.05 * alone_s / num_replicas
    assert seconds(chain, split) < 0.8 * seconds(chain, rules.even_split(chain, 32_768))
    assert list(split[:-1]) == sorted(split[:-1], reverse=True), "later tokens attend to more"


def test_the_cpu_that_was_measured_splits_where_it_did() -> None:
    """The optimum was flat around 2,304 to 2,816 of 4,096; 3.0 to 3.4 s became 1.4 to 1.7."""
    split = CPU_CHAIN.split(4096)
    assert 2304 <= split[0] <= 2816
    assert 3.0 <= CPU_COST.step_seconds(4096) <= 3.4
    assert 1.4 <= seconds(CPU_CHAIN, split) <= 1.7
    for first in (2304, 2816):
        assert seconds(CPU_CHAIN, (first, 4096 - first)) <= 1.2 * seconds(CPU_CHAIN, split)
