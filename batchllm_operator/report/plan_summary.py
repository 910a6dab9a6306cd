"""The output of `plan`: counts, saving, shards, and the estimate with its assumptions."""

from __future__ import annotations

from batchllm_operator.amounts import byte_size, counted
from batchllm_operator.report.pages import usd
from batchllm_operator.stored_plan.manifest import CostEstimate, PlanManifest


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
    num_chained = sum(each.num_chained for each in placed)
    line = f"{engine.replicas} replicas share a shard"
    if num_chained:
        chained = [each for each in placed if each.num_chained]
        without_s = max(each.without_chains_s for each in chained)
        makespan_s = max(each.makespan_s for each in chained)
        line += (
            f"; all compute {counted(num_chained, 'prefix', 'prefixes')} together: the longest such"
            f" shard takes {_duration(makespan_s)}, not {_duration(without_s)}"
        )
    if any(each.measure for each in placed):
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
    share = f" ({estimate.saved_gpu_s / alone_s:.1%})" if alone_s else ""
    return [
        f"predicted for {estimate.gpu.name}: {_duration(estimate.gpu_s)} of GPU time,"
        f" {usd(estimate.cost_usd)} (each row alone: {_duration(alone_s)},"
        f" {usd(estimate.unshared_cost_usd)})",
        f"  saved against each row alone: {counted(estimate.num_saved_tokens, 'prompt token')},"
        f" {_duration(estimate.saved_gpu_s)} of GPU time{share}, {usd(estimate.saved_cost_usd)}",
        f"  {phases}",
        *(f"  assumed: {assumption}" for assumption in estimate.assumptions),
    ]


def _duration(seconds: float) -> str:
    if seconds < 120:
        return f"{seconds:,.3g} s"
    if seconds < 7200:
        return f"{seconds / 60:,.3g} min"
    return f"{seconds / 3600:,.4g} h"
