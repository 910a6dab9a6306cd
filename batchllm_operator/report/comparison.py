"""Compares two runs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, Literal

from batchllm_operator.report.pages import Trail, count, duration, mean, ratio, render, usd
from batchllm_operator.stored_plan.run_report import AnswerSummary, Bill, RunReport

Verdict = Literal["better", "worse", "same", "changed", ""]
"""`changed`: neither better nor worse, such as more rows. A tiny change counts as `same`. Empty if
either figure is unknown."""

_NOTABLE: Final = 0.01
_NOTABLE_FAILURES: Final = 0.001
"""Share of the rows; even a few failures are notable."""
_UNKNOWN_BILL: Final = Bill(gpu_s=None, usd_per_hour=None)


@dataclass(frozen=True, slots=True)
class Measure:
    """One figure of both runs."""

    name: str
    before: str
    after: str
    change: str
    """Relative, in percent, or in percentage points; empty if unknown."""
    verdict: Verdict


@dataclass(frozen=True, slots=True)
class Section:
    """Figures on one topic."""

    title: str
    measures: tuple[Measure, ...]


@dataclass(frozen=True, slots=True)
class Comparison:
    """Run `after` compared with run `before`."""

    before: RunReport
    after: RunReport
    sections: tuple[Section, ...]
    cautions: tuple[str, ...]
    """Reasons why the two may not be comparable."""

    @property
    def notable(self) -> list[str]:
        found = [
            (
                measure.verdict != "worse",
                f"{measure.name.lower()} {measure.verdict}: {measure.change}",
            )
            for section in self.sections
            for measure in section.measures
            if measure.verdict in ("better", "worse")
        ]
        return [text for _, text in sorted(found, key=lambda each: each[0])]


def compare(before: RunReport, after: RunReport) -> Comparison:
    """Compare two runs, of one job on two days or of two jobs.

    Costs and GPU times are compared as absolute values, speeds per second, and failures as shares
    of the rows, because partitions differ in size. More rows a second are better; of tokens, only
    their numbers are compared: a run that saves more computes fewer.
    """
    answers = _answers(before, after)
    return Comparison(
        before=before,
        after=after,
        sections=(
            Section("Input", _input(before, after)),
            Section("Saving", _saving(before, after)),
            Section("Speed and cost", _speed(before, after)),
            Section("Failures", _failures(before, after)),
            *([Section("Answers", answers)] if answers else []),
        ),
        cautions=_cautions(before, after),
    )


def format_comparison(comparison: Comparison) -> str:
    before, after = comparison.before, comparison.after
    rows = [
        (measure.name, measure.before, measure.after, measure.change, _mark(measure.verdict))
        for section in comparison.sections
        for measure in section.measures
    ]
    head = ("", f"{before.job} {before.ds}", f"{after.job} {after.ds}", "change", "")
    widths = [max(len(row[column]) for row in [head, *rows]) for column in range(4)]
    lines = [_line(head, widths)]
    for section in comparison.sections:
        if section.measures:
            lines.append(section.title)
        for _ in section.measures:
            lines.append(_line(rows.pop(0), widths))
    return "\n".join([*lines, *(f"note: {caution}" for caution in comparison.cautions)])


def render_comparison(comparison: Comparison, *, trail: Trail = ()) -> str:
    """The page of a comparison; `trail` as in `pages.render`."""
    return render("comparison.html.j2", trail=trail, comparison=comparison)


def _input(before: RunReport, after: RunReport) -> tuple[Measure, ...]:
    return (
        _amount("Rows in", before.num_rows_in, after.num_rows_in),
        _amount("Duplicate rows", before.num_rows_duplicate, after.num_rows_duplicate),
        _amount("Reused rows", before.num_rows_reused, after.num_rows_reused),
        _amount("Rows with control tokens", before.num_rows_control, after.num_rows_control),
        _amount("Rows that were cut", before.num_rows_truncated, after.num_rows_truncated),
        _amount("Requests", before.num_requests, after.num_requests),
        _amount("Shared groups", before.num_shared_groups, after.num_shared_groups),
        _amount("Prompt tokens", before.num_logical_tokens, after.num_logical_tokens),
        _amount("Output tokens", before.num_output_tokens, after.num_output_tokens),
        _amount("Shards", before.num_shards, after.num_shards),
    )


def _saving(before: RunReport, after: RunReport) -> tuple[Measure, ...]:
    old, new = before.bill or _UNKNOWN_BILL, after.bill or _UNKNOWN_BILL
    return (
        _share("Prompt tokens saved", before.achieved_saving, after.achieved_saving, True),
        _share("Planned", before.planned_saving, after.planned_saving, None),
        _share("Optimal", before.optimal_saving, after.optimal_saving, None),
        _share("Achieved of planned", _reached(before), _reached(after), True),
        _amount(
            "GPU time saved, predicted",
            *(old.predicted_saved_gpu_s, new.predicted_saved_gpu_s),
            show=duration,
        ),
        _amount(
            "Money saved, predicted", old.predicted_saved_usd, new.predicted_saved_usd, show=usd
        ),
    )


def _speed(before: RunReport, after: RunReport) -> tuple[Measure, ...]:
    old, new = before.bill or _UNKNOWN_BILL, after.bill or _UNKNOWN_BILL
    return (
        _amount(
            "Rows per second", before.rows_per_s, after.rows_per_s, show=mean, more_is_better=True
        ),
        _amount(
            "Computed prompt tokens per second",
            *(before.computed_tokens_per_s, after.computed_tokens_per_s),
        ),
        _amount("Output tokens per second", before.output_tokens_per_s, after.output_tokens_per_s),
        _amount("Generating", before.engine_s, after.engine_s, show=duration),
        _amount("GPU time", old.gpu_s, new.gpu_s, show=duration),
        _amount("Cost", old.cost_usd, new.cost_usd, show=usd),
        _amount(
            "Cost per 1,000 rows",
            _per_1000(old.cost_usd, before.num_rows_in),
            _per_1000(new.cost_usd, after.num_rows_in),
            show=usd,
            more_is_better=False,
        ),
        _share("Time in valleys", _valleys(before), _valleys(after), False),
    )


def _failures(before: RunReport, after: RunReport) -> tuple[Measure, ...]:
    def failed(name: str, kind: str | None) -> Measure:
        old, new = _failed(before, kind), _failed(after, kind)
        return _share(name, old, new, False, notable=_NOTABLE_FAILURES)

    kinds = sorted({*before.errors_by_kind, *after.errors_by_kind})
    return (failed("Failed rows", None), *(failed(f"of them {kind}", kind) for kind in kinds))


def _failed(report: RunReport, kind: str | None) -> float | None:
    number = report.num_rows_failed if kind is None else report.errors_by_kind.get(kind, 0)
    return number / report.num_rows_in if report.num_rows_in else None


def _answers(before: RunReport, after: RunReport) -> tuple[Measure, ...]:
    """Shares of labels and choices, means, and the share of answers that can't be used."""
    old, new = before.answers or AnswerSummary(), after.answers or AnswerSummary()
    measures = [
        _share(f"{column} {shown}", old.share(column, value), new.share(column, value), None)
        for column in dict.fromkeys([*old.counts, *new.counts])
        for value in dict.fromkeys([*old.counts.get(column, {}), *new.counts.get(column, {})])
        for shown in [value if value.isprintable() else repr(value)]
    ]
    for name in dict.fromkeys([*old.means, *new.means]):
        measures.append(_mean(f"Mean {name}", old.means.get(name), new.means.get(name)))
    if old.embedding_size or new.embedding_size:
        measures.append(_amount("Embedding size", old.embedding_size, new.embedding_size))
    if before.num_rows_invalid or after.num_rows_invalid:
        measures.append(
            _share(
                "Invalid outputs",
                *(before.invalid_share, after.invalid_share, False),
                notable=_NOTABLE_FAILURES,
            )
        )
    return tuple(measures)


def _mean(name: str, before: float | None, after: float | None) -> Measure:
    change, verdict = "", _verdict(None, None)
    if before is not None and after is not None:
        change, verdict = f"{after - before:+.3f}", _verdict(after - before, None)
    return Measure(name, mean(before), mean(after), change, verdict)


def _cautions(before: RunReport, after: RunReport) -> tuple[str, ...]:
    cautions = [
        f"{what} differs: {old} and {new}"
        for what, old, new in (
            ("the job", before.job, after.job),
            ("the model", before.model, after.model),
        )
        if old != new
    ]
    if before.plan_uri == after.plan_uri:
        cautions.append("both are the same run")
    return tuple(cautions)


def _reached(report: RunReport) -> float | None:
    """Achieved saving as a share of the planned."""
    planned, achieved = report.planned_saving, report.achieved_saving
    return achieved / planned if planned and achieved is not None else None


def _valleys(report: RunReport) -> float | None:
    total_s = sum(line.duration_s for line in report.timelines)
    valley_s = sum(line.duration_s * line.valley_share for line in report.timelines)
    return valley_s / total_s if total_s else None


def _per_1000(cost_usd: float | None, num_rows: int) -> float | None:
    return 1000 * cost_usd / num_rows if cost_usd is not None and num_rows else None


def _amount(
    name: str,
    before: float | None,
    after: float | None,
    *,
    show: Callable[[float | None], str] = count,
    more_is_better: bool | None = None,
) -> Measure:
    change, verdict = "", _verdict(None, more_is_better)
    if before is not None and after is not None:
        relative = after / before - 1 if before else (0.0 if after == before else None)
        change = "new" if relative is None else f"{100 * relative:+.1f}\N{NO-BREAK SPACE}%"
        verdict = _verdict(float("inf") if relative is None else relative, more_is_better)
    return Measure(name, show(before), show(after), change, verdict)


def _share(
    name: str,
    before: float | None,
    after: float | None,
    more_is_better: bool | None,
    *,
    notable: float = _NOTABLE,
) -> Measure:
    change, verdict = "", _verdict(None, more_is_better)
    if before is not None and after is not None:
        change = f"{100 * (after - before):+.1f} points"
        verdict = _verdict(after - before, more_is_better, notable)
    return Measure(name, ratio(before), ratio(after), change, verdict)


def _verdict(
    change: float | None, more_is_better: bool | None, notable: float = _NOTABLE
) -> Verdict:
    if change is None:
        return ""
    if abs(change) < notable:
        return "same"
    if more_is_better is None:
        return "changed"
    return "better" if (change > 0) == more_is_better else "worse"


def _mark(verdict: Verdict) -> str:
    return verdict if verdict in ("better", "worse") else ""


def _line(cells: tuple[str, ...], widths: list[int]) -> str:
    name, before, after, change, mark = cells
    shown = f"  {name:<{widths[0]}}  {before:>{widths[1]}}  {after:>{widths[2]}}"
    return f"{shown}  {change:>{widths[3]}}  {mark}".rstrip()
