"""Predicts simulated runs with the attention kernels of a GPU, each slow and fast.

The steps are those of the run; only the rates of attention differ (`cost/attention.toml`). A run
whose decoding shares prefixes is predicted with prefix attention for all, and with FlashAttention 3
for prefill; others with FlashAttention 3 for all.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
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


def predict_attention(runs: Sequence[Run], machine: Machine) -> list[dict[str, Any]]:
    """Each run with each choice of kernels; empty where the GPU has no rates of kernels.

    Returns:
        The numbers by name: `predicted_s` with the slow and with the fast rates; `speedups`, the
        time of each run of stock vLLM over this one's, both slow and both fast, by policy.
    """
    predicted = [
        (run, name, [_seconds(run, machine, rates) for rates in slow_and_fast])
        for run in runs
        for name, slow_and_fast in attention_kernels(machine.gpu).items()
        if (name == "stock") != POLICIES[run.policy].shared_attention
    ]
    bases = {run.policy: seconds for run, _, seconds in predicted if run.policy in _BASES}
    return [
        {
            "policy": run.policy,
            "kernels": name,
            "tokens": int(run.timeline.num_tokens.sum()),
            "predicted_s": [round(value, 3) for value in seconds],
            "speedups": {
                base: [round(other / own, 4) for other, own in zip(others, seconds, strict=True)]
                for base, others in bases.items()
            },
        }
        for run, name, seconds in predicted
    ]


def _seconds(run: Run, machine: Machine, rates: AttentionRates) -> float:
    return float(run.timeline.idle_s.sum()) + sum(
        step_seconds(work, machine.model, machine.gpu, machine.num_gpus, rates)
        for work in run.works
    )


def format_attention(predictions: Sequence[Mapping[str, Any]], machine: Machine) -> str:
    """A few lines for a terminal; no trailing line break."""
    bases = predictions[0]["speedups"]
    headings = ("policy", "prefill by", "decode by", "tokens", "predicted")
    rows = [
        (
            prediction["policy"],
            *_PREFILL_AND_DECODE[prediction["kernels"]],
            f"{prediction['tokens']:,}",
            "{:,.1f} to {:,.1f} s".format(*prediction["predicted_s"]),
            *("{:.2f} to {:.2f}".format(*speedup) for speedup in prediction["speedups"].values()),
        )
        for prediction in predictions
    ]
    lines = text_table([(*headings, *(f"over {base}" for base in bases)), *rows], left=range(3))
    return "\n".join(
        [f"attention kernels on {machine.gpu.name}, slow to fast: predicted, not measured", *lines]
    )
