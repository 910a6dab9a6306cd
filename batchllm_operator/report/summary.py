"""What `plan`, `report` and `job` print: a plan with its estimate, and the summary of a run."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from batchllm_operator.amounts import byte_size, clipped, counted, token_speed
from batchllm_operator.report.pages import duration, usd
from batchllm_operator.stored_plan.counts import Counts, share
from batchllm_operator.stored_plan.manifest import CostEstimate, PlanManifest
from batchllm_operator.stored_plan.run_report import Bill, RunReport

_MAX_TEXT_CHARS: Final = 70
_NUM_VALUES: Final = 5


def format_plan(manifest: PlanManifest, uri: str) -> str:
    """Lines for a terminal, the last one `uri` alone; no trailing line break."""
    counts = manifest.counts
    lines = [
        f"{counted(counts.num_rows, 'row')}: {counted(counts.num_requests, 'request')} in"
        f" {counted(counts.num_groups, 'group')} ({counts.num_shared_groups:,} shared),"
        f" {counted(counts.num_duplicate_rows, 'duplicate')},"
        f" {counts.num_rejected_rows:,} rejected",
        f"{counted(counts.num_logical_tokens, 'prompt token')}, {counts.num_planned_tokens:,} to"
        f" compute; tokens saved: {counts.planned_saving_ratio:.1%} planned,"
        f" {counts.optimal_saving_ratio:.1%} optimal",
    ]
    if counts.num_control_rows:
        fate = {"keep": "kept", "text": "placed as ordinary text", "reject": "rejected"}
        rows = counted(counts.num_control_rows, "row spells", "rows spell")
        lines.append(
            f"{rows} control tokens of the model: {fate[manifest.spec.prompt.control_mode]}"
        )
    if manifest.spec.prompt.truncate:
        lines.append(
            f"{counted(counts.num_truncated_rows, 'row is', 'rows are')} cut (prompt.truncate)"
        )
    if manifest.spec.reuse_outputs:
        lines.append(
            f"{counted(counts.num_reused_rows, 'row reuses', 'rows reuse')} an output that was"
            " committed before; tokens and saving ratios are about the others"
        )
    if (learned := manifest.learned) is not None:
        lines.append(
            f"output lengths as in partition {learned.ds}: {learned.mean_output_tokens:,.1f} tokens"
            f" on average of {counted(learned.num_rows, 'row')};"
            f" {learned.num_known_prefixes:,} of its prefixes can be known again"
        )
    if manifest.estimate is not None:
        lines += _format_estimate(manifest.estimate)
    if manifest.spec.engine.replicas > 1:
        lines.append(_format_replicas(manifest))
    num_shards = len(manifest.shards)
    balance = f", the largest with {manifest.imbalance:.2f} times the average work"
    lines.append(f"{counted(num_shards, 'shard')}{balance if num_shards > 1 else ''}; plan:")
    return "\n".join([*lines, uri])


def _format_replicas(manifest: PlanManifest) -> str:
    """The prefixes that replicas compute together, and the predicted gain."""
    engine = manifest.spec.engine
    placed = [shard.replicas for shard in manifest.shards if shard.replicas is not None]
    num_chained = sum(placement.num_chained for placement in placed)
    line = f"{engine.replicas} replicas share a shard"
    if num_chained:
        chained = [placement for placement in placed if placement.num_chained]
        without_s = max(placement.without_chains_s for placement in chained)
        makespan_s = max(placement.makespan_s for placement in chained)
        line += (
            f"; all compute {counted(num_chained, 'prefix', 'prefixes')} together: the longest such"
            f" shard takes {_duration(makespan_s)}, not {_duration(without_s)}"
        )
    if any(placement.measure for placement in placed):
        if not num_chained:
            line += "; computing prefixes together may pay"
        line += "; the run will measure how fast replicas hand KV on, for later plans"
    return line


def _format_estimate(estimate: CostEstimate) -> list[str]:
    steps = counted(round(estimate.num_steps), "step")
    phases = f"prefill {_duration(estimate.prefill_s)} in {steps}, without decode"
    if estimate.num_output_tokens:
        phases = (
            f"prefill {_duration(estimate.prefill_s)}, decode {_duration(estimate.decode_s)} with"
            f" {byte_size(estimate.attention_bytes)} of KV read in {steps}"
        )
    alone_s = estimate.unshared_gpu_s
    saved = f" ({estimate.saved_gpu_s / alone_s:.1%})" if alone_s else ""
    return [
        f"predicted for {estimate.gpu.name}: {_duration(estimate.gpu_s)} of GPU time,"
        f" {usd(estimate.cost_usd)} (each row alone: {_duration(alone_s)},"
        f" {usd(estimate.unshared_cost_usd)})",
        f"  saved against each row alone: {counted(estimate.num_saved_tokens, 'prompt token')},"
        f" {_duration(estimate.saved_gpu_s)} of GPU time{saved}, {usd(estimate.saved_cost_usd)}",
        f"  {phases}",
        *(f"  assumed: {assumption}" for assumption in estimate.assumptions),
    ]


def _duration(seconds: float) -> str:
    if seconds < 120:
        return f"{seconds:,.3g} s"
    if seconds < 7200:
        return f"{seconds / 60:,.3g} min"
    return f"{seconds / 3600:,.4g} h"


def format_summary(report: RunReport) -> str:
    plan, done = report.plan, report.done
    failed = "".join(f", {count} {kind}" for kind, count in sorted(report.errors_by_kind.items()))
    workers = f" by {counted(report.num_workers, 'worker')}" * bool(report.num_workers)
    reused = f", {plan.num_reused_rows:,} reused" if plan.num_reused_rows else ""
    spelling = counted(plan.num_control_rows, "spells", "spell")
    control = f", {spelling} control tokens" * bool(plan.num_control_rows)
    cut = f", {plan.num_truncated_rows:,} cut" * bool(plan.num_truncated_rows)
    lines = [
        f"job {report.job}, partition {report.ds}",
        f"  rows           {plan.num_rows:,} in, {report.num_rows_out:,} out,"
        f" {report.num_failed_rows:,} failed{failed and ' (' + failed[2:] + ')'},"
        f" {counted(plan.num_duplicate_rows, 'duplicate')} generated once{reused}{control}{cut}",
        f"  prompt tokens  {plan.num_logical_tokens:,} logical,"
        f" {done.num_computed_tokens:,} computed; output tokens {done.num_output_tokens:,}",
        *_answer_lines(report),
        f"  saved tokens   {_ratio(report.achieved_saving)} of the prompt tokens achieved,"
        f" {_ratio(report.planned_saving)} planned, {_ratio(report.optimal_saving)} optimal",
        *_saving_lines(report.bill),
        f"  plan           {counted(plan.num_requests, 'request')} in"
        f" {counted(plan.num_groups, 'group')} ({plan.num_shared_groups:,} shared),"
        f" {counted(report.num_shards, 'shard')}",
        f"  speed          {_speed(done)} over {done.engine_s:,.1f} s of generating{workers}",
        f"  model          {report.model}",
        f"  table          {report.table_uri}",
        f"  report         {report.report_uri}",
        f"  page           {report.page_uri}",
    ]
    if report.sample_rows:
        lines.append("  sample rows")
    for row in report.sample_rows:
        key = ", ".join(f"{name}={_printable(value)}" for name, value in row.key.items())
        lines.append(f"    {key}: {clipped(row.generated_text, _MAX_TEXT_CHARS)!r}")
    return "\n".join(lines)


def _saving_lines(bill: Bill) -> list[str]:
    """The GPU time and the money that the cost model says are saved; nothing measures them."""
    if bill.predicted_saved_gpu_s is None:
        return []
    alone_s = bill.unshared_gpu_s
    saved_s = duration(bill.predicted_saved_gpu_s)
    share_s = f" ({bill.predicted_saved_gpu_s / alone_s:.1%})" if alone_s else ""
    lines = [
        f"  saved time     {saved_s} of {duration(alone_s)} of GPU time{share_s}, predicted for"
        f" {bill.gpu} against each row alone"
    ]
    if bill.predicted_saved_usd is not None:
        saved, alone = usd(bill.predicted_saved_usd), usd(bill.usd(alone_s))
        lines.append(
            f"  saved money    {saved} of {alone}, predicted, at {usd(bill.usd_per_hour)} an hour"
        )
    return lines


def _speed(done: Counts) -> str:
    computed, output = done.computed_tokens_per_s, done.output_tokens_per_s
    return "unknown" if computed is None or output is None else token_speed(computed, output)


def _answer_lines(report: RunReport) -> list[str]:
    """What is known of the answers as a whole."""
    answers = report.answers
    lines = []
    for column, counts in answers.counts.items():
        total = sum(counts.values())
        shares = {value: share(number, total) for value, number in counts.items()}
        lines.append(f"  {column:<14} {_first_values(shares) or 'none'}")
    if answers.means:
        means = (f"{name} {value:,.4g}" for name, value in answers.means.items())
        lines.append(f"  means          {', '.join(means)}")
    if answers.prior:
        likeliest = sorted(answers.prior.items(), key=lambda item: (-item[1], item[0]))
        prior = _first_values({label: f"{value:.4g}" for label, value in likeliest})
        lines.append(f"  prior          {prior}; labels are calibrated by it")
    lines += [f"  warning        {warning}" for warning in answers.warnings]
    if answers.embedding_size is not None:
        lines.append(f"  embeddings     {counted(answers.embedding_size, 'number')} each")
    if num_invalid := report.num_invalid_rows:
        of_answers = share(num_invalid, report.num_rows_out + num_invalid)
        lines.append(f"  invalid        {counted(num_invalid, 'answer')}, {of_answers}")
    return lines


def _first_values(shown: Mapping[str, str]) -> str:
    """The first values with what is shown of them, and the number of others."""
    first = [
        f"{_printable(clipped(value, _MAX_TEXT_CHARS))} {text}"
        for value, text in list(shown.items())[:_NUM_VALUES]
    ]
    num_more = len(shown) - len(first)
    return ", ".join([*first, f"{num_more} more"] if num_more else first)


def _ratio(value: float | None) -> str:
    return "unknown" if value is None else f"{value:.1%}"


def _printable(key: str) -> str:
    return key if key.isprintable() else repr(key)
