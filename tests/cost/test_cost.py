"""The cost model, of jobs and of steps, against numbers worked out by hand, and the paper's own."""

import dataclasses
from dataclasses import fields, replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from batchllm_operator.cost import (
    GPU,
    MODEL_SHAPES,
    AttentionRates,
    EngineLimits,
    ModelShape,
    StepWork,
    Work,
    attention_kernels,
    find_gpu,
    model_shape,
    predict,
    prompt_work,
    rates,
    step_seconds,
)
from batchllm_operator.errors import ModelError, PlanError

MISTRAL = MODEL_SHAPES["Mistral-7B"]
H100 = find_gpu("H100")
# 2 layers of 4 * 2 * 2 * 2 + 2 * 4 * 2 = 48 attention and 3 * 4 * 8 = 96 MLP weights.
TINY = ModelShape("tiny", 2, 4, 2, 1, 2, 8, 10, num_parameters=388)
# Room for 776 bytes of weights and 625 tokens of 16 bytes.
BOX = GPU("box", 10_776, 1000.0, 2000.0, 0.5, 0.5, 1.0, 0.25, 36.0)


def test_the_shape_of_a_tiny_model_by_hand() -> None:
    assert TINY.num_layer_weights == 144
    assert TINY.kv_bytes_per_token == 2 * 2 * 2 * 1 * 2
    assert TINY.weight_bytes == 776
    assert TINY.step_weight_bytes == (288 + 40) * 2
    assert TINY.flop_per_token == 2 * 288
    assert TINY.flop_per_sampled_token == 80
    assert TINY.flop_per_pair == 4 * 2 * 4


def test_a_compute_bound_job_by_hand() -> None:
    """1,000 FLOP/s, 500 bytes/s; 125 of 625 token places are held on average in one step."""
    work = Work(100, 5050, 10, 1000, 125, 4)
    found = predict(work, TINY, BOX)
    # 576 FLOP a token; weights are read once in 8,192 prefilled tokens, 656 / 500 s.
    assert found.prefill_s == pytest.approx(100 * 0.576 + 5050 * 0.032)
    # Ten sampled tokens take 0.656 s each, more than the weights in 0.2 steps.
    steady, ramp = 125 / 625, 4
    expected = 10 * 0.656 + 1000 * 16 / 500 + steady * 0.25 + ramp * (1.312 + 0.25)
    assert found.decode_s == pytest.approx(expected)
    assert found.attention_bytes == 16_000
    assert found.num_steps == pytest.approx(4.2)
    assert found.gpu_s == pytest.approx(found.prefill_s + found.decode_s)
    assert found.cost_usd == pytest.approx(found.gpu_s / 100)


def test_a_memory_bound_job_by_hand() -> None:
    """20 steps that read the weights take longer than the matrices of ten tokens."""
    work = Work(100, 5050, 10, 1000, 12_500, 4)
    steady, ramp = 20, 2 * 4  # two engines
    weights = (steady - 100 / 8192 + ramp) * 1.312  # all steps but those full of prefill
    expected = 1000 * 16 / 500 + weights + (steady + ramp) * 0.25
    assert predict(work, TINY, BOX, num_engines=2).decode_s == pytest.approx(expected)


def test_prefill_that_is_spread_hides_the_weights_by_hand() -> None:
    """Of 200 steps' 262.4 s of weights, prefill's 57.6 s; and all where prefill takes longer."""
    limits = EngineLimits(spreads_prefill=True)
    found = predict(Work(100, 0, 10, 0, 125_000), TINY, BOX, limits)
    assert found.prefill_s == pytest.approx(57.6)
    assert found.decode_s == pytest.approx(200 * 1.312 - 57.6 + 200 * 0.25)
    found = predict(Work(1000, 0, 10, 0, 125_000), TINY, BOX, limits)
    assert found.prefill_s == pytest.approx(576)
    assert found.decode_s == pytest.approx(10 * 0.656 + 200 * 0.25)


def test_a_job_bound_by_the_number_of_requests_by_hand() -> None:
    work = Work(0, 0, 40, 0, 125, 0)
    found = predict(work, TINY, BOX, EngineLimits(max_num_seqs=2))
    assert found.num_steps == 20
    assert found.decode_s == pytest.approx(max(40 * 0.656, 20 * 1.312) + 20 * 0.25)


def test_a_job_without_decode_by_hand() -> None:
    """Two steps' worth of tokens: their overhead is prefill's, and nothing drains."""
    work = prompt_work(np.array([60, 40]), np.array([0, 0])).total()
    for spreads in (False, True):
        limits = EngineLimits(max_num_batched_tokens=50, spreads_prefill=spreads)
        found = predict(work, TINY, BOX, limits)
        pairs = 60 * 61 // 2 + 40 * 41 // 2
        assert found.prefill_s == pytest.approx(100 * 0.576 + pairs * 0.032 + 2 * 0.25)
        assert (found.decode_s, found.attention_bytes, found.num_steps) == (0, 0, 2)
        assert found.gpu_s == found.prefill_s


def test_small_chunks_read_the_weights_more_often_than_they_compute() -> None:
    limits = EngineLimits(max_num_batched_tokens=2)
    assert predict(Work(100), TINY, BOX, limits).gpu_s == pytest.approx(50 * (1.312 + 0.25))


def test_a_job_of_long_prompts_and_short_outputs_is_bound_by_its_tokens() -> None:
    """1,010 tokens in steps of 100, whatever room there is in memory."""
    work = Work(1000, 0, 10, 0, 125, 1)
    found = predict(work, TINY, BOX, EngineLimits(max_num_batched_tokens=100))
    assert found.num_steps == pytest.approx(10.1 + 1)
    assert found.prefill_s == pytest.approx(1000 * 0.576)
    assert found.decode_s == pytest.approx(10 * 0.656 + 10.1 * 0.25 + 1.312 + 0.25)


CONFIGS = {
    "Mistral-7B": ("mistral", 4096, 14336, 32, 32, 8, 32000),
    "Llama-3-8B": ("llama", 4096, 14336, 32, 32, 8, 128256),
    "Qwen2-7B": ("qwen2", 3584, 18944, 28, 28, 4, 152064),
}
FIELDS = (
    "model_type",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "vocab_size",
)


@pytest.mark.parametrize("name", sorted(CONFIGS))
def test_a_config_gives_the_published_number_of_parameters(name: str) -> None:
    config = dict(zip(FIELDS, CONFIGS[name], strict=True))
    assert model_shape(config, name) == MODEL_SHAPES[name]


def test_what_a_config_says_of_weights() -> None:
    config = dict(zip(FIELDS, CONFIGS["Qwen2-7B"], strict=True))
    tied = model_shape({**config, "tie_word_embeddings": True, "head_dim": 64}, "x")
    assert tied.head_size == 64
    assert tied.num_parameters < MODEL_SHAPES["Qwen2-7B"].num_parameters - 152064 * 3584 + 1
    awq = {**config, "quantization_config": {"quant_method": "awq", "bits": 4}}
    assert model_shape(awq, "x").bytes_per_weight == 0.5
    fp8 = {**config, "quantization_config": {"quant_method": "fp8"}}
    assert model_shape(fp8, "x").bytes_per_weight == 1
    assert model_shape(config, "x", bytes_per_weight=4).bytes_per_weight == 4


@pytest.mark.parametrize(
    "change",
    [
        {"model_type": "mamba"},
        {"num_local_experts": 8},
        {"vocab_size": None},
        {"num_hidden_layers": 0},
        {"hidden_size": "4096"},
        {"quantization_config": {"quant_method": "new"}},
    ],
)
def test_other_models_are_refused(change: dict[str, object]) -> None:
    config = dict(zip(FIELDS, CONFIGS["Mistral-7B"], strict=True))
    with pytest.raises(ModelError, match="model x: "):
        model_shape({**config, **change}, "x")


def test_the_work_of_prompts_by_hand() -> None:
    """Prompts of 5 and 3 tokens that share 3, with outputs of 2 and 1; and one alone."""
    work = prompt_work(np.array([5, 3, 4]), np.array([2, 1, 1]), np.array([0, 3, 0]))
    assert work.num_prefill_tokens.tolist() == [5, 0, 4]
    assert work.num_pairs.tolist() == [1 + 2 + 3 + 4 + 5, 0, 1 + 2 + 3 + 4]
    assert work.num_decode_tokens.tolist() == [2, 1, 1]
    assert work.num_context_tokens.tolist() == [6 + 7, 4, 5]
    assert work.num_held_token_steps.tolist() == [6 + 7, 1, 5]
    assert work.total() == Work(9, 25, 4, 22, 19, 2)


@given(st.lists(st.tuples(st.integers(0, 60), st.integers(1, 30)), max_size=12), st.data())
def test_sharing_never_costs(prompts: list[tuple[int, int]], data: st.DataObject) -> None:
    """Against brute force, too: pairs and contexts counted one token after another."""
    lengths = np.array([length for length, _ in prompts], dtype=np.int64)
    outputs = np.array([output for _, output in prompts], dtype=np.int64)
    alone = prompt_work(lengths, outputs).total()
    assert alone.num_pairs == sum(sum(range(1, n + 1)) for n, _ in prompts)
    assert alone.num_context_tokens == sum(n + t for n, o in prompts for t in range(1, o + 1))
    shared = data.draw(st.integers(1, 60))
    fits = np.flatnonzero(lengths >= shared)
    if len(fits) < 2:
        return
    given, taken = lengths[fits], outputs[fits]
    members_alone = prompt_work(given, taken).total()
    shares = np.where(np.arange(len(fits)) > 0, shared, 0)
    together = prompt_work(given, taken, shares).total()
    assert together.num_pairs <= members_alone.num_pairs
    assert together.num_context_tokens == members_alone.num_context_tokens
    assert predict(together, TINY, BOX).gpu_s <= predict(members_alone, TINY, BOX).gpu_s + 1e-9


@given(
    st.lists(st.tuples(st.integers(1, 5000), st.integers(1, 500)), min_size=1, max_size=20),
    st.sampled_from(
        [
            EngineLimits(),
            EngineLimits(max_num_seqs=1),
            EngineLimits(max_num_batched_tokens=16),
            EngineLimits(kv_cache_bytes=1 << 28, num_gpus=2),
            EngineLimits(kv_cache_bytes=1 << 28, spreads_prefill=True),
        ]
    ),
)
def test_shares_of_a_job_add_up_to_it(prompts: list[tuple[int, int]], limits: EngineLimits) -> None:
    """But for the ramp, which belongs to no request; whatever the steps are bound by."""
    work = prompt_work(np.array([n for n, _ in prompts]), np.array([o for _, o in prompts]))
    rate = rates(work.total(), MISTRAL, H100, limits)
    found = predict(work.total(), MISTRAL, H100, limits)
    ramp_s = work.total().max_output_tokens * rate.s_per_ramp_step
    assert work.nanoseconds(rate).sum() / 1e9 == pytest.approx(found.gpu_s - ramp_s, abs=1e-6)


def test_no_work_takes_no_time() -> None:
    nothing = prompt_work(np.zeros(0, dtype=np.int64), np.zeros(0, dtype=np.int64)).total()
    assert nothing == Work()
    assert predict(nothing, MISTRAL, H100).gpu_s == 0


def test_a_model_that_leaves_no_room_is_refused() -> None:
    with pytest.raises(PlanError, match="tensor_parallel_size"):
        predict(Work(), MISTRAL, dataclasses.replace(H100, memory_bytes=15e9))
    two = EngineLimits(num_gpus=2)
    assert predict(Work(), MISTRAL, dataclasses.replace(H100, memory_bytes=15e9), two).gpu_s == 0


# Steps


# For TINY, 576 FLOP a token, 80 for one that is sampled, 32 for a pair; a step reads 656 bytes of
# weights, and 16 bytes for each token of a context. BOX adds 0.25 s to a step.
WEIGHTS_S = 1.312
H200 = find_gpu("H200")


def seconds(num_gpus: int = 1, **counts: int) -> float:
    names = [field.name for field in fields(StepWork)]
    work = StepWork(**{name: counts.get(name, 0) for name in names})
    return step_seconds(work, TINY, BOX, num_gpus)


def test_a_step_reads_the_weights_at_least() -> None:
    assert seconds() == pytest.approx(WEIGHTS_S + 0.25)
    assert seconds(num_tokens=2, num_sampled=2) == pytest.approx(max(2 * 0.656, 1.312) + 0.25)


def test_many_tokens_are_bound_by_compute() -> None:
    assert seconds(num_tokens=10, num_sampled=3) == pytest.approx(5.76 + 0.24 + 0.25)


def test_prefill_attends_to_pairs() -> None:
    assert seconds(num_prefill_pairs=55) == pytest.approx(WEIGHTS_S + 55 * 0.032 + 0.25)


def test_decoding_reads_contexts_or_computes_whichever_is_slower() -> None:
    read = seconds(num_decode_pairs=100, num_read_tokens=100)
    assert read == pytest.approx(WEIGHTS_S + max(100 * 16 / 500, 100 * 0.032) + 0.25)
    # With shared-prefix attention less is read, and as much computed.
    assert seconds(num_decode_pairs=100, num_read_tokens=40) == pytest.approx(read)
    slow = replace(BOX, hbm_bytes_per_s=100.0)
    work = StepWork(0, 0, 0, 100, 40)
    assert step_seconds(work, TINY, slow) == pytest.approx((656 + 40 * 16) / 50 + 0.25)


def test_attention_may_have_rates_of_its_own() -> None:
    """10 pairs of prefill at 64 FLOP/s; 20 pairs at 16, which takes longer than 50 bytes/s."""
    work = StepWork(0, 0, num_prefill_pairs=10, num_decode_pairs=20, num_read_tokens=20)
    found = step_seconds(work, TINY, BOX, attention=AttentionRates(64.0, 16.0, 50.0))
    assert found == pytest.approx(WEIGHTS_S + 5 + 40 + 0.25)
    found = step_seconds(work, TINY, BOX, 2, AttentionRates(64.0, 1000.0, 50.0))
    assert found == pytest.approx((WEIGHTS_S + 5 + 6.4) / 2 + 0.25)
    roofline = AttentionRates(1000.0, 1000.0, 500.0)
    assert step_seconds(work, TINY, BOX, attention=roofline) == step_seconds(work, TINY, BOX)


def test_gpus_divide_the_work_but_not_the_overhead() -> None:
    counts = {"num_tokens": 10, "num_sampled": 3, "num_prefill_pairs": 55}
    assert seconds(4, **counts) - 0.25 == pytest.approx((seconds(**counts) - 0.25) / 4)


# Kernels


def test_flash_attention_computes_prefill_beside_prefix_attention() -> None:
    kernels = attention_kernels(H200)
    assert list(kernels) == ["stock", "ours", "mixed"]
    stock, ours, mixed = kernels.values()
    assert stock[0] == AttentionRates(350e12, 350e12, 0.85 * 4.8e12)
    assert ours[1] == AttentionRates(300e12, 300e12, 0.82 * 4.8e12)
    for one, other, both in zip(stock, ours, mixed, strict=True):
        assert both == replace(other, prefill_flop_per_s=one.prefill_flop_per_s)
    for slow, fast in kernels.values():
        assert slow.prefill_flop_per_s < fast.prefill_flop_per_s
        assert slow.decode_bytes_per_s < fast.decode_bytes_per_s


def test_other_gpus_have_no_rates_of_kernels() -> None:
    assert attention_kernels(find_gpu("A100")) == {}
    assert attention_kernels(replace(H200, name="mine")) == {}
