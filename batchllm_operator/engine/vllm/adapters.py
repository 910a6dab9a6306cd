"""A job's LoRA adapters in vLLM."""

from __future__ import annotations

from typing import Any, Final, get_args

from vllm.config import lora
from vllm.lora.request import LoRARequest
from vllm.platforms import current_platform

from batchllm_operator.engine.vllm.logs import one_line
from batchllm_operator.errors import SpecError
from batchllm_operator.model import Adapter, find_adapters
from batchllm_operator.spec import JobSpec, ModelSpec

_MAX_LORAS: Final = 2
"""Adapters in a step: rows of the next begin while the last ones of the one before end."""


def adapter_args(spec: JobSpec) -> dict[str, Any]:
    """vLLM's engine arguments for a job's adapters.

    Raises:
        SpecError: one has more ranks than vLLM takes, or `extra_args` has too few slots for a CPU.
        ModelError: see `find_adapters`.
    """
    adapters = find_adapters(spec.model)
    if not adapters:
        return {}
    largest = max(adapters, key=lambda adapter: adapter.rank)
    ranks = sorted(get_args(lora.MaxLoRARanks))
    if largest.rank > ranks[-1]:
        raise SpecError(
            f"model.adapters.{largest.name}: has rank {largest.rank}, and vLLM takes at most"
            f" {ranks[-1]}"
        )
    return {
        "enable_lora": True,
        "max_loras": _num_slots(spec, len(adapters)),
        "max_lora_rank": next(rank for rank in ranks if rank >= largest.rank),
    }


def _num_slots(spec: JobSpec, num_adapters: int) -> int:
    """Adapters that vLLM holds on the device.

    On a CPU, it adds the last slot's adapter to rows without one, so that slot must stay empty.
    """
    if not current_platform.is_cpu():
        return min(num_adapters, _MAX_LORAS)
    least, given = num_adapters + 1, spec.engine.extra_args.get("max_loras")
    if spec.model.adapter_column is not None and isinstance(given, int) and given < least:
        raise SpecError(
            f"engine.extra_args: max_loras must be at least {least} on a CPU, one more than there"
            " are adapters: there vLLM adds the adapter in its last slot to rows without one"
        )
    return least


def load_adapters(model: ModelSpec, engine: Any) -> dict[str, LoRARequest]:
    """vLLM's requests for the adapters by name, each of which it has loaded once.

    Args:
        engine: vLLM's `LLMEngine`.

    Raises:
        SpecError: vLLM refuses one, such as for a layer that the model lacks; names it.
    """
    requests = {}
    for adapter in find_adapters(model):
        requests[adapter.name] = request = _request(adapter)
        try:
            engine.add_lora(request)
        # Files, shapes, memory: vLLM has no common error.
        except Exception as error:
            raise SpecError(
                f"model.adapters.{adapter.name}: vLLM refuses it: {one_line(error)}"
            ) from error
    return requests


def _request(adapter: Adapter) -> LoRARequest:
    return LoRARequest(adapter.name, adapter.number, str(adapter.folder))
