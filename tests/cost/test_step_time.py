"""The time of a step against numbers worked out by hand."""

from __future__ import annotations

from dataclasses import fields, replace

import pytest

from batchllm_operator.cost import (
    GPU,
    AttentionRates,
    ModelShape,
    StepWork,
    attention_kernels,
    find_gpu,
    step_seconds,
)

# 2 layers of 144 weights: 576 FLOP a token, 80 for one that is sampled, 32 for a pair; 656 bytes of
# weights are read in a step, and 16 bytes for each token of a context.
TINY = ModelShape("tiny", 2, 4, 2, 1, 2, 8, 10, num_parameters=388)
# 1,000 FLOP/s and 500 bytes/s; 0.25 s for a step on top.
BOX = GPU("box", 10_776, 1000.0, 2000.0, 0.5, 0.5, 1.0, 0.25, 36.0)
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
