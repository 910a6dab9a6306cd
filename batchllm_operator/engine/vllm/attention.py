"""The attention of vLLM's engine: chosen by the spec, checked after the start, logged."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from vllm.platforms import current_platform

from batchllm_operator.errors import SpecError
from batchllm_operator.spec import JobSpec
from batchllm_operator.vllm_plugin.attention.settings import AttentionSettings

_MAX_GRAPH_SIZE: Final = 1024
"""Requests of the largest captured decode step; as many run at once by default."""


def attention_args(spec: JobSpec, known: Mapping[str, object]) -> dict[str, Any]:
    """vLLM's engine arguments that choose the spec's attention.

    None on a CPU: vLLM has one backend there, which ours replaces.

    Args:
        known: the arguments that this vLLM has.

    Raises:
        SpecError: vLLM's platform has no place for ours.
    """
    if spec.engine.attention == "stock":
        return {}
    if current_platform.is_cpu():
        return {}
    if not current_platform.is_cuda_alike():
        raise SpecError(
            "engine.attention: batchllm runs on CUDA, ROCm and CPU; on this platform take stock"
        )
    if "attention_backend" not in known:
        raise SpecError("engine.attention: this vLLM has no argument attention_backend; take stock")
    return {"attention_backend": "CUSTOM"} | _graph_args(spec.engine.extra_args)


def _graph_args(given: Mapping[str, Any]) -> dict[str, Any]:
    """Graphs for decode steps of up to 1,024 requests, unless the user chose sizes.

    vLLM's own limit is 512 on most GPUs.
    """
    settings = AttentionSettings.from_additional_config(given.get("additional_config"))
    if not settings.decode_graphs or {"cudagraph_capture_sizes", "compilation_config"} & set(given):
        return {}
    return {"max_cudagraph_capture_size": _MAX_GRAPH_SIZE}


def check_model(spec: JobSpec, vllm_config: Any) -> None:
    """Refuse a model or a GPU that our attention doesn't support, before the model is loaded.

    Raises:
        SpecError: `engine.attention` is batchllm, and something isn't supported.
    """
    if spec.engine.attention == "batchllm":
        from batchllm_operator.vllm_plugin.attention import backend as attention

        attention.check_model(vllm_config)


def start_attention(spec: JobSpec, engine: Any) -> str:
    """Check the attention of an engine's layers, and warm ours up.

    Returns:
        One line for the log: what runs, and why.

    Args:
        engine: vLLM's `LLMEngine`, started with `attention_args`.

    Raises:
        SpecError: ours was asked for, and some layers have another.
    """
    if spec.engine.attention == "stock":
        chosen = engine.vllm_config.attention_config.backend
        name = f", {chosen.name} (engine.extra_args)" if chosen is not None else ""
        return f"attention: vLLM's own{name} (engine.attention: stock, the default)"
    from batchllm_operator.vllm_plugin.attention.report import report_attention, warm_up_attention

    reports = engine.collective_rpc(report_attention)
    others = [each for report in reports for each in report.others]
    if others or not all(report.num_ours for report in reports):
        found = f"it has {others[0]} and {len(others) - 1} more" if others else "it has none"
        raise SpecError(
            "engine.attention: batchllm needs a model whose attention layers all take it; "
            f"{found}; with engine.attention: stock it runs"
        )
    engine.collective_rpc(warm_up_attention)
    return f"attention: batchllm (engine.attention), {reports[0].description}"
