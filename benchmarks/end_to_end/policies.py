"""Who is compared: stock vLLM as a user would run it, at its best, and ours."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final, Literal

Order = Literal["as_given", "sorted", "plan"]


@dataclass(frozen=True, slots=True)
class Policy:
    """How prompts are ordered, and which parts of the engine are ours."""

    name: str
    order: Order
    """Rows in random order, sorted by their prompts, or planned."""
    scheduler: Literal["stock", "batchllm"] = "stock"
    attention: Literal["stock", "batchllm"] = "stock"
    extra_args: Mapping[str, Any] = field(default_factory=dict)
    environment: Mapping[str, str] = field(default_factory=dict)
    settings: tuple[str, ...] = ("default",)
    """Of `SETTINGS`; the better one counts, workload by workload."""
    front_end: Literal["ours", "llm"] = "ours"
    """Who feeds vLLM: the engine that jobs use, or vLLM's class `LLM`."""


SETTINGS: Final[Mapping[str, Mapping[str, int]]] = {
    "default": {},
    "chunk_4096_seqs_512": {"max_num_batched_tokens": 4096, "max_num_seqs": 512},
}
"""Engine settings by name: vLLM's own for the device, and smaller steps of fewer requests."""
TINY_SETTINGS: Final[Mapping[str, Mapping[str, int]]] = {
    "default": {"max_num_batched_tokens": 512, "max_num_seqs": 64},
    "chunk_4096_seqs_512": {"max_num_batched_tokens": 256, "max_num_seqs": 32},
}

MOST_CAPTURED: Final = 1024
"""Tokens of the largest CUDA graph, of every policy: as many as requests run at a time."""
_BOTH: Final = tuple(SETTINGS)
_OURS: Final[dict[str, Any]] = {"order": "plan", "scheduler": "batchllm"}
POLICIES: Final[Mapping[str, Policy]] = {
    policy.name: policy
    for policy in (
        Policy("stock_as_given", "as_given", settings=_BOTH),
        Policy("stock_sorted", "sorted", settings=_BOTH),
        Policy(  # through vLLM's own class LLM, with its engine in a process of its own
            "stock_llm",
            "sorted",
            front_end="llm",
            environment={"VLLM_ENABLE_V1_MULTIPROCESSING": "1"},
        ),
        Policy("batchllm_stock_attention", **_OURS),
        Policy("batchllm", **_OURS, attention="batchllm"),
        Policy(  # full CUDA graphs of decode steps include our attention
            "batchllm_graphs",
            **_OURS,
            attention="batchllm",
            extra_args={"additional_config": {"batchllm_attention": {"decode_graphs": True}}},
        ),
        Policy(  # without even pacing of prefill, with vLLM's attention
            "batchllm_unpaced",
            **_OURS,
            extra_args={"additional_config": {"batchllm": {"pace": False}}},
        ),
    )
}
"""All that can be measured. Each has prefix caching, chunked prefill and whatever attention and
graphs vLLM chooses for the device. `stock_llm` is a control: whether our front end slows stock
vLLM down."""
