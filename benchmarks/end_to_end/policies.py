"""Who is compared: stock vLLM as a user would run it, at its best, and ours."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final, Literal

Order = Literal["as_given", "sorted", "plan"]


@dataclass(frozen=True, slots=True)
class Policy:
    """How prompts are ordered, and which parts of the engine are ours."""

    name: str
    about: str
    order: Order
    scheduler: Literal["stock", "batchllm"] = "stock"
    attention: Literal["stock", "batchllm"] = "stock"
    extra_args: Mapping[str, Any] = field(default_factory=dict)
    environment: Mapping[str, str] = field(default_factory=dict)
    settings: tuple[str, ...] = ("default",)
    """Of `SETTINGS`; the better one counts, workload by workload."""
    simulated_as: str | None = None
    """The simulator's policy of the same behaviour, if it has one."""

    @property
    def is_ours(self) -> bool:
        return self.scheduler == "batchllm"


SETTINGS: Final[Mapping[str, Mapping[str, int]]] = {
    "default": {},
    "even": {"max_num_batched_tokens": 4096, "max_num_seqs": 512},
}
"""Engine settings by name: vLLM's own for the device, and steps about as large as these
workloads fill all the time, with which stock vLLM preempts least."""
TINY_SETTINGS: Final[Mapping[str, Mapping[str, int]]] = {
    "default": {"max_num_batched_tokens": 512, "max_num_seqs": 64},
    "even": {"max_num_batched_tokens": 256, "max_num_seqs": 32},
}

_BOTH: Final = tuple(SETTINGS)
POLICIES: Final[Mapping[str, Policy]] = {
    policy.name: policy
    for policy in (
        Policy(
            "stock_as_given",
            "vLLM as it is, rows in random order",
            "as_given",
            settings=_BOTH,
            simulated_as="stock_shuffled",
        ),
        Policy(
            "stock_sorted",
            "vLLM as it is, rows sorted by their prompts",
            "sorted",
            settings=_BOTH,
            simulated_as="stock_sorted",
        ),
        Policy(
            "stock_cascade",
            "sorted, with vLLM's cascade attention (one prefix for all of a step), where it runs",
            "sorted",
            extra_args={"disable_cascade_attn": False},
            environment={"VLLM_USE_V2_MODEL_RUNNER": "0"},
        ),
        Policy(
            "batchllm_stock_attention",
            "our plan and scheduler, with vLLM's attention",
            "plan",
            scheduler="batchllm",
            simulated_as="batchllm_stock_attention",
        ),
        Policy(
            "batchllm",
            "our plan, scheduler and attention",
            "plan",
            scheduler="batchllm",
            attention="batchllm",
            simulated_as="batchllm",
        ),
        Policy(
            "batchllm_unpaced",
            "our plan and scheduler without even pacing of prefill, with vLLM's attention",
            "plan",
            scheduler="batchllm",
            extra_args={"additional_config": {"batchllm": {"pace": False}}},
        ),
    )
}
"""All that can be measured. Each has prefix caching, chunked prefill and whatever attention and
graphs vLLM chooses for the device; the two that start with `stock_` and have several settings are
the baselines."""
