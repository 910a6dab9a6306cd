"""The table of runs that `batchllm simulate` prints."""

from __future__ import annotations

from collections.abc import Sequence

from batchllm_operator.amounts import counted, text_table
from batchllm_operator.simulate.machine import POLICIES, Machine
from batchllm_operator.simulate.run import Run
from batchllm_operator.simulate.workload import Workload

_HEADINGS = (
    "policy",
    "steps",
    "saved of optimum",
    "preempted",
    "recomputed",
    "tokens/step",
    "valleys",
    "predicted",
    "relative",
    "scheduling",
)


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
