"""Which LoRA adapters a step has room for."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vllm.v1.request import Request


def has_adapter_slot(request: Request, running: Sequence[Request], lora_config: Any) -> bool:
    """Whether a request's adapter runs already, or may run beside those that do.

    vLLM would let later requests pass a request that has to wait for a slot, past our gate.

    Args:
        lora_config: vLLM's; None without adapters.
    """
    if lora_config is None or request.lora_request is None:
        return True
    wanted, in_use = request.lora_request.lora_int_id, set()
    for each in reversed(running):  # mostly the latest one has it
        if each.lora_request is not None:
            if each.lora_request.lora_int_id == wanted:
                return True
            in_use.add(each.lora_request.lora_int_id)
    return len(in_use) < int(lora_config.max_loras)
