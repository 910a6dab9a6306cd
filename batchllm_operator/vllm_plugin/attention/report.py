"""Runs in each worker of a started engine: reports its attention, and warms it up."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from batchllm_kernels.prefix_attention.config import ARCHITECTURES, detect_arch, load_config
from batchllm_operator.vllm_plugin import compat
from batchllm_operator.vllm_plugin.attention.backend import (
    PrefixAttentionBackend,
    PrefixAttentionImpl,
)
from batchllm_operator.vllm_plugin.attention.builder import chosen_impl
from batchllm_operator.vllm_plugin.attention.settings import AttentionSettings


@dataclass(frozen=True, slots=True)
class AttentionReport:
    """The attention of one worker's layers."""

    num_ours: int
    """Layers with our attention."""
    others: Sequence[str]
    """Layers with another backend: "layer: backend"."""
    description: str
    """Implementation, device and settings of ours, and what computes prefill, for a log line."""


def report_attention(worker: Any) -> AttentionReport:
    """Report a worker's layers; runs in the worker, through vLLM's `collective_rpc`."""
    config = worker.vllm_config
    num_ours, others, prefill = 0, [], set()
    for name, layer in config.compilation_config.static_forward_context.items():
        if not (hasattr(layer, "impl") and hasattr(layer, "get_attn_backend")):
            continue  # no attention: state-space layers, mixtures of experts
        backend = layer.get_attn_backend()
        if issubclass(backend, PrefixAttentionBackend):
            num_ours += 1
            prefill.add(layer.impl.prefill)
        else:
            others.append(f"{name}: {backend.get_name()}")
    settings = AttentionSettings.from_additional_config(config.additional_config)
    description = ", ".join([_describe(settings, worker.device), *sorted(prefill)])
    return AttentionReport(num_ours, others, description)


def warm_up_attention(worker: Any) -> None:
    """Compile the kernels of a worker's layers, so that no step waits for a compiler.

    Runs in the worker, through vLLM's `collective_rpc`, after the KV cache has been made.
    """
    config = worker.vllm_config
    for layer in config.compilation_config.static_forward_context.values():
        impl = getattr(layer, "impl", None)
        if isinstance(impl, PrefixAttentionImpl) and impl.planner is not None:
            impl.warm_up(compat.as_kv_cache(layer.kv_cache), config.model_config.dtype)


def _describe(settings: AttentionSettings, device: Any) -> str:
    arch = detect_arch(device)
    config = load_config(arch)
    if chosen_impl(settings) == "reference":
        return f"in plain torch on {arch}"
    vendor = ARCHITECTURES.get(arch)
    file = f"{vendor}/{arch}.json" if vendor else f"{arch}.json"
    tuned = f"tuned on {config.tuned_on}" if config.tuned_on else "not tuned on a GPU"
    graphs = ", decode in full CUDA graphs" if settings.decode_graphs else ""
    return f"Triton on {arch}, settings {file}, {tuned}{graphs}"
