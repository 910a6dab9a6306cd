"""Registers our attention with vLLM: the entry point `vllm.general_plugins`, and its use here.

vLLM loads the entry point in every process of every environment that has this package, so it is
cheap, and changes nothing unless the engine asks through a variable that its workers inherit.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final, Literal

VARIABLE: Final = "BATCHLLM_ATTENTION"
BACKEND: Final = "batchllm_operator.vllm_plugin.attention.backend.PrefixAttentionBackend"
Attention = Literal["batchllm", "stock"]


def register() -> None:
    """Register our backend by its path, without importing it.

    On a GPU it becomes CUSTOM, which a user of vLLM has to choose; another plugin's CUSTOM stays
    unless the engine asks for ours. vLLM's CPU platform has only one backend, CPU_ATTN, so ours
    replaces it there, and only if the engine asks.
    """
    from vllm.platforms import current_platform
    from vllm.v1.attention.backends.registry import register_backend

    slot = _slot()
    is_asked_for = os.environ.get(VARIABLE) == "batchllm"
    if is_asked_for or (current_platform.is_cuda_alike() and not slot.is_overridden()):
        register_backend(slot, BACKEND)


@contextmanager
def attention_chosen(attention: Attention) -> Iterator[None]:
    """Use an attention for engines that start inside, in this process and its children.

    Restores the environment and vLLM's registry afterwards; a started engine keeps its attention.
    """
    slot, before = _slot(), os.environ.get(VARIABLE)
    path_before = slot.get_path() if slot.is_overridden() else None
    theirs = path_before if path_before != BACKEND else None
    os.environ[VARIABLE] = attention
    _override(slot, BACKEND if attention == "batchllm" else theirs)
    try:
        yield
    finally:
        del os.environ[VARIABLE]
        if before is not None:
            os.environ[VARIABLE] = before
        _override(slot, path_before)


def _override(slot: Any, path: str | None) -> None:
    """Make vLLM use the backend at a path for a member of its enumeration; None for its own."""
    from vllm.v1.attention.backends.registry import register_backend

    from batchllm_operator.vllm_plugin.compat import forget_chosen_backends

    slot.clear_override()
    if path is not None:
        register_backend(slot, path)
    forget_chosen_backends()


def _slot() -> Any:
    """The member of vLLM's enumeration that our backend is registered as on this platform."""
    from vllm.platforms import current_platform
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    return (
        AttentionBackendEnum.CPU_ATTN if current_platform.is_cpu() else AttentionBackendEnum.CUSTOM
    )
