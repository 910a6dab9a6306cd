"""Predicts simulated runs with the attention kernels of a GPU, each slow and fast.

The steps are those of the run; only the rates of attention differ (`cost/attention.toml`). A run
whose decoding shares prefixes is predicted with prefix attention for all, and with FlashAttention 3
for prefill; others with FlashAttention 3 for all.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from batchllm_operator.amounts import text_table
from batchllm_operator.cost import AttentionRates, attention_kernels, step_seconds
from batchllm_operator.simulate.machine import POLICIES, Machine
from batchllm_operator.simulate.run import Run

_PREFILL_AND_DECODE: Final[Mapping[str, tuple[str, str]]] = {
    "stock": ("FlashAttention 3", "FlashAttention 3"),
    "ours": ("prefix attention", "prefix attention"),
    "mixed": ("FlashAttention 3", "prefix attention"),
}
_BASES: Final = ("stock_shuffled", "stock_sorted")
Range = tuple[float, float]
"""With the slow and with the fast rates."""


@dataclass(frozen=True, slots=True)
class AttentionPrediction:
    """One run with some kernels."""

    policy: str
    kernels: str
    """`stock`, `ours` or `mixed`."""
    num_tokens: int
    """Tokens of all steps."""
    seconds: Range
    speedups: Mapping[str, Range]
    """Time of a run of stock vLLM over this one's, by its policy; both slow, and both fast."""

    def row(self) -> dict[str, Any]:
        """The numbers by name."""
        return {
            "policy": self.policy,
            "kernels": self.kernels,
            "tokens": self.num_tokens,
            "predicted_s": [round(seconds, 3) for seconds in self.seconds],
            "speedups": {
                name: [round(ratio, 4) for ratio in speedup]
                for name, speedup in self.speedups.items()
            },
        }


def predict_attention(runs: Sequence[Run], machine: Machine) -> list[AttentionPrediction]:
    """Each run with each choice of kernels; empty where the GPU has no rates of kernels."""
    kernels = attention_kernels(machine.gpu)
    if not kernels:
        return []
    predicted = [
        (run, name, (_seconds(run, machine, slow), _seconds(run, machine, fast)))
        for run in runs
        for name, (slow, fast) in kernels.items()
        if (name == "stock") != POLICIES[run.policy].shared_attention
    ]
    bases = {run.policy: seconds for run, _, seconds in predicted if run.policy in _BASES}
    return [
        AttentionPrediction(
            run.policy,
            name,
            int(run.timeline.num_tokens.sum()),
            seconds,
            {base: (slow / seconds[0], fast / seconds[1]) for base, (slow, fast) in bases.items()},
        )
        for run, name, seconds in predicted
    ]


def _seconds(run: Run, machine: Machine, rates: AttentionRates) -> float:
    return float(run.timeline.idle_s.sum()) + sum(
        step_seconds(work, machine.model, machine.gpu, machine.num_gpus, rates)
        for work in run.works
    )


def format_attention(predictions: Sequence[AttentionPrediction], machine: Machine) -> str:
    """A few lines for a terminal; no trailing line break."""
    bases = list(predictions[0].speedups)
    rows = [
        (
            prediction.policy,
            *_PREFILL_AND_DECODE[prediction.kernels],
            f"{prediction.num_tokens:,}",
            "{:,.1f} to {:,.1f} s".format(*prediction.seconds),
            *("{:.2f} to {:.2f}".format(*prediction.speedups[base]) for base in bases),
        )
        for prediction in predictions
    ]
    headings = ("policy", "prefill by", "decode by", "tokens", "predicted")
    lines = text_table([(*headings, *(f"over {base}" for base in bases)), *rows], left=range(3))
    return "\n".join(
        [f"attention kernels on {machine.gpu.name}, slow to fast: predicted, not measured", *lines]
    )
