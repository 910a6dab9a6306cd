"""The short printed summary of a run."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from batchllm_operator.amounts import counted, token_speed
from batchllm_operator.report.pages import duration, usd
from batchllm_operator.stored_plan.counts import share
from batchllm_operator.stored_plan.run_report import AnswerSummary, Bill, RunReport

_MAX_TEXT_CHARS: Final = 70
_NUM_VALUES: Final = 5


def format_summary(report: RunReport) -> str:
    failed = "".join(f", {count} {kind}" for kind, count in sorted(report.errors_by_kind.items()))
    workers = "" if report.num_workers is None else f" by {counted(report.num_workers, 'worker')}"
    reused = f", {report.num_rows_reused:,} reused" if report.num_rows_reused else ""
    spelling = counted(report.num_rows_control, "spells", "spell")
    control = f", {spelling} control tokens" * bool(report.num_rows_control)
    cut = f", {report.num_rows_truncated:,} cut" * bool(report.num_rows_truncated)
    lines = [
        f"job {report.job}, partition {report.ds}",
        f"  rows           {report.num_rows_in:,} in, {report.num_rows_out:,} out,"
        f" {report.num_rows_failed:,} failed{failed and ' (' + failed[2:] + ')'},"
        f" {counted(report.num_rows_duplicate, 'duplicate')} generated once{reused}{control}{cut}",
        f"  prompt tokens  {report.num_logical_tokens:,} logical,"
        f" {report.num_computed_tokens:,} computed; output tokens {report.num_output_tokens:,}",
        *_answer_lines(report),
        f"  saved tokens   {_ratio(report.achieved_saving)} of the prompt tokens achieved,"
        f" {_ratio(report.planned_saving)} planned, {_ratio(report.optimal_saving)} optimal",
        *_saving_lines(report.bill),
        f"  plan           {counted(report.num_requests, 'request')} in"
        f" {counted(report.num_groups, 'group')} ({report.num_shared_groups:,} shared),"
        f" {counted(report.num_shards, 'shard')}",
        f"  speed          {_speed(report)} over {report.engine_s:,.1f} s of generating{workers}",
        f"  model          {report.model}",
        f"  table          {report.table_uri}",
        f"  report         {report.report_uri}",
        f"  page           {report.page_uri}",
    ]
    if report.sample_rows:
        lines.append("  sample rows")
    for row in report.sample_rows:
        key = ", ".join(f"{name}={_printable(value)}" for name, value in row.key.items())
        lines.append(f"    {key}: {_clip(row.generated_text)!r}")
    return "\n".join(lines)


def _saving_lines(bill: Bill | None) -> list[str]:
    """The GPU time and the money that the cost model says are saved; nothing measures them."""
    if bill is None or bill.predicted_saved_gpu_s is None:
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


def _speed(report: RunReport) -> str:
    computed, output = report.computed_tokens_per_s, report.output_tokens_per_s
    return "unknown" if computed is None or output is None else token_speed(computed, output)


def _answer_lines(report: RunReport) -> list[str]:
    """What is known of the answers as a whole."""
    lines = []
    answers = report.answers or AnswerSummary()
    for column, found in answers.counts.items():
        total = sum(found.values())
        named = [
            f"{_printable(_clip(value))} {share(number, total)}"
            for value, number in list(found.items())[:_NUM_VALUES]
        ]
        more = f", {len(found) - _NUM_VALUES} more" if len(found) > _NUM_VALUES else ""
        lines.append(f"  {column:<14} {', '.join(named) or 'none'}{more}")
    if answers.means:
        means = (f"{name} {value:,.4g}" for name, value in answers.means.items())
        lines.append(f"  means          {', '.join(means)}")
    if answers.prior:
        lines.append(f"  prior          {_prior_text(answers.prior)}; labels are calibrated by it")
    lines += [f"  warning        {warning}" for warning in answers.warnings]
    if answers.embedding_size is not None:
        lines.append(f"  embeddings     {counted(answers.embedding_size, 'number')} each")
    if report.num_rows_invalid:
        num_answers = report.num_rows_out + report.num_rows_invalid
        of_answers = share(report.num_rows_invalid, num_answers)
        invalid = counted(report.num_rows_invalid, "answer")
        lines.append(f"  invalid        {invalid}, {of_answers}")
    return lines


def _prior_text(prior: Mapping[str, float]) -> str:
    likeliest = sorted(prior.items(), key=lambda each: (-each[1], each[0]))
    named = [f"{_printable(_clip(label))} {value:.4g}" for label, value in likeliest[:_NUM_VALUES]]
    more = f", {len(prior) - _NUM_VALUES} more" if len(prior) > _NUM_VALUES else ""
    return ", ".join(named) + more


def _ratio(value: float | None) -> str:
    return "unknown" if value is None else f"{value:.1%}"


def _clip(text: str) -> str:
    return text if len(text) <= _MAX_TEXT_CHARS else text[: _MAX_TEXT_CHARS - 1] + "…"


def _printable(key: str) -> str:
    return key if key.isprintable() else repr(key)
