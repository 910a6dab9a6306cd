"""The tables that `batchllm simulate` prints: of runs, and of their attention kernels.

The steps of a run are predicted with the attention kernels of a GPU, each slow and fast; only the
rates of attention differ (`cost/attention.toml`). A run whose decoding shares prefixes is predicted
with prefix attention for all, and with FlashAttention 3 for prefill; others with FlashAttention 3
for all.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Final

from batchllm_operator.amounts import counted, text_table
from batchllm_operator.cost import AttentionRates, attention_kernels, step_seconds
from batchllm_operator.simulate.machine import POLICIES, Machine
from batchllm_operator.simulate.run import Run
from batchllm_operator.simulate.workload import Workload

_HEADINGS: Final = (
    *("policy", "steps", "saved of optimum", "preempted", "recomputed"),
    *("tokens/step", "valleys", "predicted", "relative", "scheduling"),
)
_PREFILL_AND_DECODE: Final[Mapping[str, tuple[str, str]]] = {
    "stock": ("FlashAttention 3", "FlashAttention 3"),
    "ours": ("prefix attention", "prefix attention"),
    "mixed": ("FlashAttention 3", "prefix attention"),
}
_BASES: Final = ("stock_shuffled", "stock_sorted")


def relative_times(runs: Sequence[Run]) -> list[float]:
    """Predicted time of each run over that of the first one of stock vLLM, or of the first."""
    stock = [run for run in runs if run.policy.startswith("stock")]
    base = (stock or runs)[0].predicted_s
    return [run.predicted_s / base for run in runs]


def format_runs(workload: Workload, machine: Machine, runs: Sequence[Run]) -> str:
    """A few lines for a terminal; no trailing line break."""
    lines = [
        f"{workload.name}: {counted(len(workload), 'request')},"
        f" {workload.tokens.num_tokens:,} prompt and"
        f" {counted(int(workload.output_tokens.sum()), 'output token')}",
        f"{machine.model.name} on {machine.num_gpus} x {machine.gpu.name}: {machine.num_blocks:,}"
        f" KV blocks of {machine.block_size} tokens, steps of up to"
        f" {machine.max_num_batched_tokens:,} tokens",
        "",
    ]
    rows = [
        (
            run.policy,
            f"{run.steps:,}",
            f"{run.saving_ratio:.1%} of {run.optimal_saving_ratio:.1%}",
            f"{run.preemptions:,}",
            f"{run.recomputed_tokens:,}",
            f"{run.mean_tokens_per_step:,.0f}",
            f"{run.valley_steps:,}",
            f"{run.predicted_s:,.1f} s",
            f"{relative:.2f}",
            f"{run.sched_ms_per_step:.2f} ms",
        )
        for run, relative in zip(runs, relative_times(runs), strict=True)
    ]
    return "\n".join([*lines, *text_table([_HEADINGS, *rows]), *_notes(runs)])


def _notes(runs: Sequence[Run]) -> list[str]:
    """Why ours is predicted slower than stock vLLM, as small jobs are."""
    stock = [run for run in runs if run.policy.startswith("stock")]
    slower = [
        run
        for run, relative in zip(runs, relative_times(runs), strict=True)
        if relative > 1 and POLICIES[run.policy].arrival == "as_fed"
    ]
    if not stock or not slower:
        return []
    more = slower[0].steps - stock[0].steps
    return [
        "",
        f"{slower[0].policy} takes {counted(more, 'step')} more than {stock[0].policy}, because"
        " a run feeds its engine a few requests a step.",
        "Stock vLLM takes in all requests before its first step; these 0.4 ms a request aren't in"
        " its prediction.",
    ] * (more > 0)


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
