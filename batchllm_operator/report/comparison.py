"""Compares two runs."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import Final, Literal

from batchllm_operator.amounts import text_table
from batchllm_operator.report.pages import Trail, count, duration, mean, ratio, render, usd
from batchllm_operator.stored_plan.run_report import RunReport

Verdict = Literal["better", "worse", "same", "changed", ""]
"""`changed`: neither better nor worse, such as more rows. A tiny change counts as `same`. Empty if
either figure is unknown."""

_NOTABLE: Final = 0.01
_NOTABLE_FAILURES: Final = 0.001
"""Share of the rows; even a few failures are notable."""


@dataclass(frozen=True, slots=True)
class Measure:
    name: str
    before: str
    after: str
    change: str
    """Relative, in percent, or in percentage points; empty if unknown."""
    verdict: Verdict


@dataclass(frozen=True, slots=True)
class Comparison:
    """Run `after` compared with run `before`."""

    before: RunReport
    after: RunReport
    sections: Mapping[str, Sequence[Measure]]
    cautions: tuple[str, ...]
    """Reasons why the two may not be comparable."""

    @property
    def notable(self) -> list[str]:
        """What became worse, then what became better."""
        return [
            f"{measure.name.lower()} {measure.verdict}: {measure.change}"
            for verdict in ("worse", "better")
            for measures in self.sections.values()
            for measure in measures
            if measure.verdict == verdict
        ]


def _relative(before: float, after: float) -> tuple[str, float]:
    """The change as text and as a number; of nothing to something it is infinite."""
    if not before:
        return ("+0.0\N{NO-BREAK SPACE}%", 0.0) if after == before else ("new", float("inf"))
    change = after / before - 1
    return f"{100 * change:+.1f}\N{NO-BREAK SPACE}%", change


def _in_points(before: float, after: float) -> tuple[str, float]:
    return f"{100 * (after - before):+.1f} points", after - before


def _absolute(before: float, after: float) -> tuple[str, float]:
    return f"{after - before:+.3f}", after - before


@dataclass(frozen=True, slots=True)
class _Figure:
    name: str
    of: Callable[[RunReport], float | None]
    show: Callable[[float | None], str] = count
    change: Callable[[float, float], tuple[str, float]] = _relative
    more_is_better: bool | None = None
    notable: float = _NOTABLE
    """The least change that isn't `same`."""

    def measure(self, before: RunReport, after: RunReport) -> Measure:
        old, new = self.of(before), self.of(after)
        text = ""
        verdict: Verdict = ""
        if old is not None and new is not None:
            text, change = self.change(old, new)
            verdict = "better" if (change > 0) == self.more_is_better else "worse"
            if abs(change) < self.notable:
                verdict = "same"
            elif self.more_is_better is None:
                verdict = "changed"
        return Measure(self.name, self.show(old), self.show(new), text, verdict)


_share = partial(_Figure, show=ratio, change=_in_points)
_failed_share = partial(_share, more_is_better=False, notable=_NOTABLE_FAILURES)


def _reached(report: RunReport) -> float | None:
    planned, achieved = report.planned_saving, report.achieved_saving
    return achieved / planned if planned and achieved is not None else None


def _valleys(report: RunReport) -> float | None:
    total_s = sum(line.duration_s for line in report.timelines)
    valley_s = sum(line.duration_s * line.valley_share for line in report.timelines)
    return valley_s / total_s if total_s else None


def _cost_per_1000(report: RunReport) -> float | None:
    cost_usd, num_rows = report.bill.cost_usd, report.num_rows_in
    return 1000 * cost_usd / num_rows if cost_usd is not None and num_rows else None


_FIGURES: Final = {
    "Input": (
        _Figure("Rows in", lambda run: run.num_rows_in),
        _Figure("Duplicate rows", lambda run: run.plan.num_duplicate_rows),
        _Figure("Reused rows", lambda run: run.plan.num_reused_rows),
        _Figure("Rows with control tokens", lambda run: run.plan.num_control_rows),
        _Figure("Rows that were cut", lambda run: run.plan.num_truncated_rows),
        _Figure("Requests", lambda run: run.plan.num_requests),
        _Figure("Shared groups", lambda run: run.plan.num_shared_groups),
        _Figure("Prompt tokens", lambda run: run.plan.num_logical_tokens),
        _Figure("Output tokens", lambda run: run.done.num_output_tokens),
        _Figure("Shards", lambda run: run.num_shards),
    ),
    "Saving": (
        _share("Prompt tokens saved", lambda run: run.achieved_saving, more_is_better=True),
        _share("Planned", lambda run: run.planned_saving),
        _share("Optimal", lambda run: run.optimal_saving),
        _share("Achieved of planned", _reached, more_is_better=True),
        _Figure(
            "GPU time saved, predicted", lambda run: run.bill.predicted_saved_gpu_s, show=duration
        ),
        _Figure("Money saved, predicted", lambda run: run.bill.predicted_saved_usd, show=usd),
    ),
    "Speed and cost": (
        _Figure("Rows per second", lambda run: run.done.rows_per_s, mean, more_is_better=True),
        _Figure("Computed prompt tokens per second", lambda run: run.done.computed_tokens_per_s),
        _Figure("Output tokens per second", lambda run: run.done.output_tokens_per_s),
        _Figure("Generating", lambda run: run.done.engine_s, duration),
        _Figure("GPU time", lambda run: run.bill.gpu_s, duration),
        _Figure("Cost", lambda run: run.bill.cost_usd, usd),
        _Figure("Cost per 1,000 rows", _cost_per_1000, usd, more_is_better=False),
        _share("Time in valleys", _valleys, more_is_better=False),
    ),
}


def compare(before: RunReport, after: RunReport) -> Comparison:
    """Compare two runs, of one job on two days or of two jobs.

    Costs and GPU times are compared as absolute values, speeds per second, and failures as shares
    of the rows, because partitions differ in size. More rows a second are better; of tokens, only
    their numbers are compared: a run that saves more computes fewer.
    """
    figures = {
        **_FIGURES,
        "Failures": _failures(before, after),
        "Answers": _answers(before, after),
    }
    return Comparison(
        before=before,
        after=after,
        sections={
            title: [figure.measure(before, after) for figure in of_title]
            for title, of_title in figures.items()
            if of_title
        },
        cautions=_cautions(before, after),
    )


def format_comparison(comparison: Comparison) -> str:
    before, after = comparison.before, comparison.after
    rows = [["", f"{before.job} {before.ds}", f"{after.job} {after.ds}", "change", ""]]
    for measures in comparison.sections.values():
        for measure in measures:
            verdict = measure.verdict if measure.verdict in ("better", "worse") else ""
            rows.append([measure.name, measure.before, measure.after, measure.change, verdict])
    head, *figures = text_table(rows, left=(0, 4), indent="  ")
    lines, figure = [head], iter(figures)
    for title, measures in comparison.sections.items():
        lines += [title, *islice(figure, len(measures))]
    return "\n".join([*lines, *(f"note: {caution}" for caution in comparison.cautions)])


def render_comparison(comparison: Comparison, *, trail: Trail = ()) -> str:
    """The page of a comparison; `trail` as in `pages.render`."""
    return render("comparison.html.j2", trail=trail, comparison=comparison)


def _failures(before: RunReport, after: RunReport) -> list[_Figure]:
    def failed(name: str, num_failed: Callable[[RunReport], int]) -> _Figure:
        def share(run: RunReport) -> float | None:
            return num_failed(run) / run.plan.num_asked_rows if run.plan.num_asked_rows else None

        return _failed_share(name, share)

    def of_kind(kind: str) -> _Figure:
        return failed(f"of them {kind}", lambda run: run.errors_by_kind.get(kind, 0))

    kinds = sorted({*before.errors_by_kind, *after.errors_by_kind})
    return [failed("Failed rows", lambda run: run.num_failed_rows), *map(of_kind, kinds)]


def _answers(before: RunReport, after: RunReport) -> list[_Figure]:
    """Shares of labels and choices, means, and the share of answers that can't be used."""

    def share(column: str, value: str) -> _Figure:
        shown = value if value.isprintable() else repr(value)
        return _share(f"{column} {shown}", lambda run: run.answers.share(column, value))

    def mean_of(name: str) -> _Figure:
        return _Figure(f"Mean {name}", lambda run: run.answers.means.get(name), mean, _absolute)

    old, new = before.answers, after.answers
    figures = [
        share(column, value)
        for column in dict.fromkeys([*old.counts, *new.counts])
        for value in dict.fromkeys([*old.counts.get(column, {}), *new.counts.get(column, {})])
    ]
    figures += map(mean_of, dict.fromkeys([*old.means, *new.means]))
    if old.embedding_size or new.embedding_size:
        figures.append(_Figure("Embedding size", lambda run: run.answers.embedding_size))
    if before.num_invalid_rows or after.num_invalid_rows:
        figures.append(_failed_share("Invalid outputs", lambda run: run.invalid_share))
    return figures


def _cautions(before: RunReport, after: RunReport) -> tuple[str, ...]:
    fields = (("the job", before.job, after.job), ("the model", before.model, after.model))
    cautions = [f"{what} differs: {old} and {new}" for what, old, new in fields if old != new]
    if before.plan_uri == after.plan_uri:
        cautions.append("both are the same run")
    return tuple(cautions)
