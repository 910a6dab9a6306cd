"""Predicts the time of one engine step on a GPU, by the roofline model of `cost`.

A step takes as long as the slower of computing its tokens and reading the weights, then its
attention, then an overhead. Attention of prefill is bound by compute, that of decoding by
reading KV. With shared-prefix attention (paper, Sec. 4.4), a prefix is read once for all requests
of its group that decode in the step, instead of once for each. Attention has the GPU's rates, or
those of kernels, each a range, so that a measurement can contradict the prediction:

    stock    FlashAttention 3 for all
    ours     prefix attention for all: prefill and decoding
    mixed    FlashAttention 3 for prefill, prefix attention for decoding

An extension by a few tokens, which `mixed` leaves to prefix attention, counts as prefill.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.resources import files
from typing import Any

from batchllm_operator.cost.gpu import GPU
from batchllm_operator.cost.model_shape import ModelShape


@dataclass(frozen=True, slots=True)
class AttentionRates:
    """Rates that attention reaches on a GPU."""

    prefill_flop_per_s: float
    decode_flop_per_s: float
    decode_bytes_per_s: float

    @classmethod
    def of(cls, gpu: GPU) -> AttentionRates:
        """Those of the GPU's own roofline."""
        return cls(gpu.flop_per_s, gpu.flop_per_s, gpu.bytes_per_s)


def attention_kernels(gpu: GPU) -> dict[str, tuple[AttentionRates, AttentionRates]]:
    """Slow and fast rates of `stock`, `ours` and `mixed` by name, on a GPU of `attention.toml`.

    Empty for other GPUs.
    """
    text = (files("batchllm_operator.cost") / "attention.toml").read_text("utf-8")
    table = tomllib.loads(text).get(gpu.name)
    if table is None:
        return {}
    flash, prefix = table["flash_attention_3"], table["prefix_attention"]

    def rates(prefill: Mapping[str, Any], decode: Mapping[str, Any], end: int) -> AttentionRates:
        return AttentionRates(
            prefill["prefill_flop_per_s"][end],
            decode["prefill_flop_per_s"][end],
            gpu.hbm_bytes_per_s * decode["decode_bandwidth"][end],
        )

    kernels = {"stock": (flash, flash), "ours": (prefix, prefix), "mixed": (flash, prefix)}
    return {name: (rates(*pair, end=0), rates(*pair, end=1)) for name, pair in kernels.items()}


@dataclass(frozen=True, slots=True)
class StepWork:
    """Counts of one step."""

    num_tokens: int
    """Tokens of all requests, in any phase."""
    num_sampled: int
    """Requests that get an output token."""
    num_prefill_pairs: int
    """Sum over prefilled tokens of the tokens each attends to, itself included."""
    num_decode_pairs: int
    """Sum over decoding requests of the tokens each attends to."""
    num_read_tokens: int
    """Tokens whose KV decoding reads: with shared-prefix attention, each prefix once."""


def matrix_seconds(model: ModelShape, gpu: GPU, num_gpus: int = 1) -> tuple[float, float]:
    """Seconds per token in all matrices, and seconds to read all weights once."""
    return (
        model.flop_per_token / gpu.flop_per_s / num_gpus,
        model.step_weight_bytes / gpu.bytes_per_s / num_gpus,
    )


def step_seconds(
    work: StepWork,
    model: ModelShape,
    gpu: GPU,
    num_gpus: int = 1,
    attention: AttentionRates | None = None,
) -> float:
    """Seconds of a step on an engine of `num_gpus`, which divide the work evenly.

    Attention has the GPU's rates unless others are given.
    """
    attention = attention or AttentionRates.of(gpu)
    flop = work.num_tokens * model.flop_per_token + work.num_sampled * model.flop_per_sampled_token
    matrices_s = max(flop / gpu.flop_per_s, model.step_weight_bytes / gpu.bytes_per_s)
    prefill_s = work.num_prefill_pairs * model.flop_per_pair / attention.prefill_flop_per_s
    decode_s = max(
        work.num_read_tokens * model.kv_bytes_per_token / attention.decode_bytes_per_s,
        work.num_decode_pairs * model.flop_per_pair / attention.decode_flop_per_s,
    )
    return (matrices_s + prefill_s + decode_s) / num_gpus + gpu.step_overhead_s
