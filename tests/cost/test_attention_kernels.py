"""Rates of attention kernels on the GPUs of the table."""

from __future__ import annotations

from dataclasses import replace

from batchllm_operator.cost import AttentionRates, attention_kernels, find_gpu

H200 = find_gpu("H200")


def test_flash_attention_computes_prefill_beside_prefix_attention() -> None:
    kernels = attention_kernels(H200)
    assert list(kernels) == ["stock", "ours", "mixed"]
    stock, ours, mixed = kernels.values()
    assert stock.slow == AttentionRates(350e12, 350e12, 0.85 * 4.8e12)
    assert ours.fast == AttentionRates(300e12, 300e12, 0.82 * 4.8e12)
    for end in ("slow", "fast"):
        one, other, both = (getattr(each, end) for each in (stock, ours, mixed))
        assert both == replace(other, prefill_flop_per_s=one.prefill_flop_per_s)
    for each in kernels.values():
        assert each.slow.prefill_flop_per_s < each.fast.prefill_flop_per_s
        assert each.slow.decode_bytes_per_s < each.fast.decode_bytes_per_s


def test_other_gpus_have_no_rates_of_kernels() -> None:
    assert attention_kernels(find_gpu("A100")) == {}
    assert attention_kernels(replace(H200, name="mine")) == {}
