"""Bridges between versions of vLLM, chosen by feature, not by version number.

`tests/vllm_plugin/test_signatures.py` pins what we use where no test runs it.
"""

from collections.abc import Callable
from typing import Any

from torch import Tensor
from vllm.v1.request import Request, RequestStatus


def is_ready(request: Request) -> bool:
    """Whether vLLM can run a waiting request, or end it for a grammar that can't be compiled."""
    if request.status != RequestStatus.WAITING_FOR_STRUCTURED_OUTPUT_GRAMMAR:
        return True
    return getattr(request.structured_output_request, "grammar", None) is not None


def method_of_triton_backend(name: str) -> Callable[..., tuple[int, ...]]:
    """A static method of vLLM's Triton backend, whose KV cache ours has.

    Since 0.30 vLLM has that shape for all backends, and asks none for it.
    """

    def method(*args: Any, **kwargs: Any) -> tuple[int, ...]:
        from vllm.v1.attention.backends.triton_attn import TritonAttentionBackend

        return tuple(getattr(TritonAttentionBackend, name)(*args, **kwargs))

    return method


def kv_cache_views(kv_cache: Tensor, head_size: int) -> tuple[Tensor, Tensor]:
    """Keys and values of a layer's cache.

    Args:
        kv_cache: [num_blocks, num_kv_heads, block_size, 2 * head_size]; any strides.
        head_size: size of keys and of values.

    Returns:
        Two views, [num_blocks, block_size, num_kv_heads, head_size].

    Raises:
        ValueError: the cache has another shape.
    """
    if kv_cache.dim() != 4 or kv_cache.shape[3] != 2 * head_size:
        shape = tuple(kv_cache.shape)
        raise ValueError(f"a KV cache of shape {shape} isn't known, with heads of {head_size}")
    packed = kv_cache.transpose(1, 2)
    return packed[..., :head_size], packed[..., head_size:]


def attention_layers(vllm_config: Any) -> list[tuple[str, Any]]:
    """Layers by name, without those that have no attention: state spaces, mixtures of experts."""
    layers = vllm_config.compilation_config.static_forward_context
    return [
        (name, layer)
        for name, layer in layers.items()
        if hasattr(layer, "impl") and hasattr(layer, "get_attn_backend")
    ]


def attention_kinds(vllm_config: Any) -> list[str]:
    """What decides the layout inside a block: the layers' backends, and a CPU's instructions."""
    return sorted(
        {
            f"{layer.get_attn_backend().get_name()} {getattr(layer, 'isa', '')}".strip()
            for _, layer in attention_layers(vllm_config)
        }
    )


def writes_kv_before_attention(vllm_config: Any) -> bool:
    """Whether keys and values are in the KV cache before attention begins, not written by it."""
    backends = [layer.get_attn_backend() for _, layer in attention_layers(vllm_config)]
    return bool(backends) and not any(
        getattr(backend, "forward_includes_kv_cache_update", True) for backend in backends
    )


def forget_chosen_backends() -> None:
    """Clear vLLM's cached choice of attention backends."""
    from vllm.v1.attention import selector

    selector._cached_get_attn_backend.cache_clear()
