"""The paper's tables and figures beside what was measured, as Markdown.

Reads the JSON of any of `benchmarks.end_to_end`, its `agreement` and `calibrate`, and
`benchmarks.kernel`, told apart by their `benchmark` field. What hasn't been measured says so.

    python -m benchmarks.end_to_end.tables benchmarks/results/*.json
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from benchmarks.end_to_end.targets import (
    BASELINES,
    OURS,
    TARGET_DEVICES,
    Summary,
    best,
    least_tecd_s,
    targets,
)
from benchmarks.workloads import WORKLOADS

NOT_MEASURED: Final = "not measured"
PAPER_TABLE_1: Final[Mapping[str, Mapping[str, float]]] = {
    "case_1": {  # Mistral-7B on an A100
        "vLLM": 7.13,
        "+ prefix caching": 9.9,
        "+ chunked prefill": 7.08,
        "+ both": 9.83,
        "BatchLLM": 12.85,
    },
    "case_2": {  # Qwen2-7B on an MI200
        "vLLM": 4.34,
        "+ prefix caching": 4.41,
        "+ chunked prefill": 4.56,
        "+ both": 5.88,
        "BatchLLM": 8.65,
    },
}
"""Requests/s."""
_PAPER_SAVING: Final = (0.442, 0.549)  # vLLM's prefix caching and BatchLLM, Sec. 6.3.1
_PAPER_PLAN_S: Final = (0.28, 233.46)  # planning and processing of case 1, Sec. 6.3.4


class Results:
    """All that was measured of one model on one device, with the paper's own model.

    Args:
        reports: parsed JSON objects of benchmarks; ones of other kinds are left out.
        model: whose end-to-end figures are shown.
    """

    def __init__(self, reports: Iterable[Mapping[str, Any]], model: str) -> None:
        self.end_to_end: Mapping[str, Any] | None = None
        self.by_kind: dict[str, Mapping[str, Any]] = {}
        for report in reports:
            kind = report.get("benchmark")
            if kind == "end_to_end" and report["model"] == model and report["share"] == 1.0:
                self.end_to_end = report
            elif kind == "kernel" or report.get("model") == model:
                self.by_kind[str(kind)] = report
        self.summaries: list[Summary] = []
        if self.end_to_end is not None:
            self.summaries = [Summary(**row) for row in self.end_to_end["rows"]]


def markdown(results: Results, model: str) -> str:
    """All tables; no trailing line break."""
    sections = [
        _measured_with(results, model),
        _table_1(results.summaries),
        _figure_5(results.summaries),
        _figures_6_and_7(results.summaries),
        _figure_8(results.by_kind.get("kernel")),
        _saving_and_planning(results.summaries),
        _targets(results),
        _agreement(results.by_kind.get("agreement")),
        _calibration(results.by_kind.get("calibrate")),
    ]
    return "\n\n".join(sections)


def _table(title: str, headings: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [f"| {' | '.join(headings)} |", "|" + "---|" * len(headings)]
    lines += [f"| {' | '.join(row)} |" for row in rows]
    return "\n".join([f"### {title}", "", *lines])


def _measured_with(results: Results, model: str) -> str:
    found = results.end_to_end
    if found is None:
        return f"{model}: nothing has been measured on a GPU yet."
    versions = ", ".join(f"{name} {value}" for name, value in found["versions"].items())
    doubts = f" Doubts: {'; '.join(found['doubts'])}." if found["doubts"] else ""
    return (
        f"{model}'s shape with random weights on {found['device']}, {versions},"
        f" driver {found.get('driver')}, commit {str(found['git_sha'])[:10]}."
        f"{doubts}"
    )


def _speed(summary: Summary | None) -> str:
    if summary is None:
        return NOT_MEASURED
    spread = f"{summary.least_requests_per_s:.2f} to {summary.most_requests_per_s:.2f}"
    known = f"{spread}, {summary.repetitions} runs" if summary.repetitions > 1 else "one run"
    return f"{summary.requests_per_s:.2f} ({known})"


def _ratio(numerator: float | None, denominator: float | None) -> str:
    if numerator is None or not denominator:
        return NOT_MEASURED
    return f"{numerator / denominator:.2f}x"


def _table_1(summaries: Sequence[Summary]) -> str:
    rows = []
    for workload, paper in PAPER_TABLE_1.items():
        for name, value in paper.items():
            rows.append(
                (workload, f"paper: {name}", f"{value:.2f}", _ratio(value, paper["+ both"]))
            )
        stock = best(summaries, workload, BASELINES["sorted"])
        chosen = (*BASELINES["as_given"], *BASELINES["sorted"], *reversed(OURS))
        for policy in chosen:
            found = best(summaries, workload, (policy,))
            ratio = _ratio(
                found.requests_per_s if found else None, stock.requests_per_s if stock else None
            )
            settings = f" ({found.settings} settings)" if found else ""
            rows.append((workload, policy + settings, _speed(found), ratio))
    title = "Table 1: industry workloads, requests/s"
    headings = ("workload", "who", "requests/s", "over the best baseline")
    return _table(title, headings, rows)


def _figure_5(summaries: Sequence[Summary]) -> str:
    rows = []
    for workload in (name for name in WORKLOADS if name.startswith("micro")):
        given = best(summaries, workload, BASELINES["as_given"])
        in_order = best(summaries, workload, BASELINES["sorted"])
        ours = [best(summaries, workload, (policy,)) for policy in OURS]
        speeds = [each.requests_per_s if each else None for each in (given, in_order, *ours)]
        rows.append(
            (
                workload,
                *map(_speed, (given, in_order, *ours)),
                *(_ratio(speed, speeds[0]) for speed in speeds[2:]),
                *(_ratio(speed, speeds[1]) for speed in speeds[2:]),
            )
        )
    table = _table(
        "Fig. 5: microbenchmarks, requests/s",
        (
            "workload",
            "stock as given",
            "stock sorted",
            *OURS,
            *(f"{policy} over as given" for policy in OURS),
            *(f"{policy} over sorted" for policy in OURS),
        ),
        rows,
    )
    return table + (
        "\n\nThe paper gives no figures but ranges: 1.1 to 1.5 times vLLM with both techniques on"
        "\nan A100, up to 2 times on an MI200, and no gain worth mentioning at 200/2000."
    )


def _figures_6_and_7(summaries: Sequence[Summary]) -> str:
    rows = []
    base = best(summaries, "case_1", BASELINES["sorted"])
    base_tecd_s = least_tecd_s(summaries, "case_1", BASELINES["sorted"])
    names = ("stock_sorted", "batchllm_unpaced", *reversed(OURS))
    for policy in names:
        found = best(summaries, "case_1", (policy,))
        rows.append(
            (
                policy,
                f"{found.valley_steps:.0f} of {found.num_steps:.0f}" if found else NOT_MEASURED,
                _ratio(
                    found.requests_per_s if found else None, base.requests_per_s if base else None
                ),
                _ratio(found.tecd_s if found else None, base_tecd_s),
                f"{found.preemptions:.0f}" if found else NOT_MEASURED,
            )
        )
    table = _table(
        "Figs. 6 and 7: token batches of case 1",
        ("policy", "valleys, of steps", "requests/s over sorted", "TECD over sorted", "preempted"),
        rows,
    )
    return table + (
        "\n\nThe paper's reordering and memory-centric batching together: up to 9 % more requests/s"
        "\nand a TECD up to 15 % shorter, in about 1,350 steps instead of 1,600. A valley is a step"
        "\nof less than half of the chunk size while requests wait."
    )


def _figure_8(kernel: Mapping[str, Any] | None) -> str:
    title = "Fig. 8: the kernel"
    measured = [row for row in (kernel or {}).get("rows", ()) if row.get("speedup_vs_fa3")]
    if kernel is None or not measured:
        return f"### {title}\n\n{NOT_MEASURED} (`python -m benchmarks.kernel`)"
    rows = [
        (row["setting"], f"{row['speedup_vs_fa3']:.2f}x", f"{row['speedup_vs_best']:.2f}x")
        for row in measured
    ]
    return _table(
        f"{title}, on {kernel['device']}",
        ("setting", "over FlashAttention 3", "over the best"),
        rows,
    )


def _saving_and_planning(summaries: Sequence[Summary]) -> str:
    stock = best(summaries, "case_1", ("stock_as_given",))
    in_order = best(summaries, "case_1", ("stock_sorted",))
    ours = best(summaries, "case_1", OURS[:1])

    def share(found: Summary | None) -> str:
        return f"{found.saving_ratio:.1%}" if found else NOT_MEASURED

    planning = NOT_MEASURED
    if ours is not None:
        planning = f"{ours.plan_s:.2f} s of {ours.total_s:.1f} s ({ours.plan_s / ours.total_s:.2%})"
    rows = [
        ("saving ratio, vLLM's prefix caching", f"{_PAPER_SAVING[0]:.1%}", share(stock)),
        ("the same, rows sorted", "", share(in_order)),
        ("saving ratio, BatchLLM", f"{_PAPER_SAVING[1]:.1%}", share(ours)),
        (
            "planning",
            f"{_PAPER_PLAN_S[0]} s beside {_PAPER_PLAN_S[1]} s",
            planning,
        ),
    ]
    return _table(
        "Sec. 6.3.1 and 6.3.4: reuse and planning, case 1", ("measure", "paper", "here"), rows
    )


def _targets(results: Results) -> str:
    found = results.end_to_end
    counts = found is not None and found["targets"] is not None
    if found is None or not counts or not any(name in found["device"] for name in TARGET_DEVICES):
        listed = targets([], {})
    else:
        listed = targets(results.summaries, found["missing"])
    rows = [
        (
            each["measure"],
            each["policy"],
            str(each["reach"]),
            _measured(each),
            {None: "", True: "yes", False: "**no**"}[each["is_met"]],
        )
        for each in listed
    ]
    headings = ("measure", "policy", "reach", "measured", "met")
    return _table(f"The project's targets ({' or '.join(TARGET_DEVICES)})", headings, rows)


def _measured(target: Mapping[str, Any]) -> str:
    if target["measured"] is None:
        return NOT_MEASURED
    notes = [f"without {name}" for name in target["baselines_missing"]]
    if target["repetitions"] == 1:
        notes.append("one run")
    return f"{target['measured']} ({', '.join(notes)})" if notes else str(target["measured"])


def _agreement(report: Mapping[str, Any] | None) -> str:
    title = "Agreement with stock vLLM's tokens"
    if report is None:
        return f"### {title}\n\n{NOT_MEASURED} (`python -m benchmarks.end_to_end.agreement`)"
    rows = [
        (
            name,
            f"{each['equal_outputs']:.1%}",
            f"{each['tokens_before_difference']:.1%}",
            str(each["median_margin"]),
            str(each["largest_margin"]),
            {None: "", True: "yes", False: "**no**"}[report["is_plausible"].get(name)],
        )
        for name, each in report["compared"].items()
    ]
    return _table(
        f"{title}, {report['workload']}",
        (
            "run",
            "equal outputs",
            "tokens before a difference",
            "median margin",
            "largest margin",
            "near-ties",
        ),
        rows,
    )


def _calibration(report: Mapping[str, Any] | None) -> str:
    title = "The simulator's prediction"
    if report is None:
        return f"### {title}\n\n{NOT_MEASURED} (`python -m benchmarks.end_to_end.calibrate`)"
    rows = [
        (
            each["workload"],
            f"{each['policy']}, {each['settings']}",
            f"{each['measured_s']:.1f} s",
            f"{each['predicted_s']:.1f} s",
            f"{each['error']:+.1%}",
            f"{each['simulated_steps']} of {each['measured_steps']:.0f}",
        )
        for each in report["rows"]
    ]
    return _table(
        f"{title}, fitted to the other workloads",
        ("workload", "policy", "measured", "predicted", "error", "steps, simulated of measured"),
        rows,
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__.partition("\n\n")[0], prog="python -m benchmarks.end_to_end.tables"
    )
    parser.add_argument("results", nargs="*", type=Path, help="JSON files of benchmarks")
    parser.add_argument("--model", default="Mistral-7B")
    args = parser.parse_args()
    reports = [json.loads(path.read_text(encoding="utf-8")) for path in args.results]
    print(markdown(Results(reports, args.model), args.model))


if __name__ == "__main__":
    main()
