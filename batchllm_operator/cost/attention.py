"""Rates of attention kernels on a GPU, for predictions that a measurement can contradict.

Each rate is a range. Kernels by the parts of a step's attention:

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


@dataclass(frozen=True, slots=True)
class AttentionKernels:
    """Kernels that share a step's attention, with their slow and their fast rates."""

    name: str
    slow: AttentionRates
    fast: AttentionRates


def attention_kernels(gpu: GPU) -> dict[str, AttentionKernels]:
    """`stock`, `ours` and `mixed` on a GPU of `attention.toml`, by name; none on others."""
    text = (files("batchllm_operator.cost") / "attention.toml").read_text("utf-8")
    table = tomllib.loads(text).get(gpu.name)
    if table is None:
        return {}
    flash, prefix = table["flash_attention_3"], table["prefix_attention"]
    return {
        name: AttentionKernels(name, *(_rates(gpu, prefill, decode, end) for end in range(2)))
        for name, prefill, decode in (
            ("stock", flash, flash),
            ("ours", prefix, prefix),
            ("mixed", flash, prefix),
        )
    }


def _rates(
    gpu: GPU, prefill: Mapping[str, Any], decode: Mapping[str, Any], end: int
) -> AttentionRates:
    return AttentionRates(
        prefill["prefill_flop_per_s"][end],
        decode["prefill_flop_per_s"][end],
        gpu.hbm_bytes_per_s * decode["decode_bandwidth"][end],
    )
