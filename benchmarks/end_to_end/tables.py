"""What was measured beside the paper's figures, as Markdown.

Reads the JSON of any of `benchmarks.end_to_end`, its `agreement` and `calibrate`, and
`benchmarks.kernel`, told apart by their `benchmark` field. What hasn't been measured says so.

    python -m benchmarks.end_to_end.tables benchmarks/results/*.json
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
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
_OF_THE_PAPER: Final = """

The paper, beside its Table 1: microbenchmarks (Fig. 5) run 1.1 to 1.5 times as fast as vLLM with
both techniques on an A100, up to 2 times on an MI200, and no faster at 200/2000. Reordering and
memory-centric batching (Figs. 6 and 7) give case 1 up to 9 % more requests/s and a TECD up to 15 %
shorter, in about 1,350 steps instead of 1,600. It saves 54.9 % of case 1's tokens, vLLM 44.2 %
(Sec. 6.3.1), and plans for 0.28 s beside 233.46 s (Sec. 6.3.4). A valley is a step of less than
half of the chunk size while requests wait."""
_IS_MET: Final = {None: "", True: "yes", False: "**no**"}


def markdown(reports: Iterable[Mapping[str, Any]], model: str) -> str:
    """All tables; no trailing line break.

    Args:
        reports: parsed JSON objects of benchmarks; ones of other kinds are left out.
        model: whose end-to-end figures are shown, with the paper's own.
    """
    by_kind: dict[str, Mapping[str, Any]] = {
        str(kind): report
        for report in reports
        if (kind := report.get("benchmark")) == "kernel" or report.get("model") == model
    }
    measured = by_kind.get("end_to_end")
    summaries = [Summary(**row) for row in measured["rows"]] if measured else []
    headings = (
        *("workload", "who", "requests/s", "over the best baseline", "TECD over sorted"),
        *("saved", "valleys, of steps", "preempted"),
    )
    counts = (
        measured is not None
        and measured["targets"] is not None
        and any(device in measured["device"] for device in TARGET_DEVICES)
    )
    return "\n\n".join(
        [
            _measured_with(measured, model),
            _table("Requests/s", headings, _speeds(summaries)) + _OF_THE_PAPER,
            _table(
                f"The project's targets ({' or '.join(TARGET_DEVICES)})",
                ("measure", "policy", "reach", "measured", "met"),
                _targets(summaries if counts else []),
            ),
            _kernel(by_kind.get("kernel")),
            _agreement(by_kind.get("agreement")),
            _calibration(by_kind.get("calibrate")),
        ]
    )


def _table(title: str, headings: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [f"| {' | '.join(headings)} |", "|" + "---|" * len(headings)]
    lines += [f"| {' | '.join(row)} |" for row in rows]
    return "\n".join([f"### {title}", "", *lines])


def _measured_with(report: Mapping[str, Any] | None, model: str) -> str:
    if report is None:
        return f"{model}: nothing has been measured on a GPU yet."
    versions = ", ".join(f"{name} {value}" for name, value in report["versions"].items())
    doubts = f" Doubts: {'; '.join(report['doubts'])}." if report["doubts"] else ""
    return (
        f"{model}'s shape with random weights on {report['device']}, {versions},"
        f" driver {report.get('driver')}, commit {str(report['git_sha'])[:10]}."
        f"{doubts}"
    )


def _speeds(summaries: Sequence[Summary]) -> Iterator[Sequence[str]]:
    """The paper's Table 1, and each policy at its best on each workload."""
    policies = (*BASELINES["as_given"], *BASELINES["sorted"], "batchllm_unpaced", *reversed(OURS))
    for workload in WORKLOADS:
        paper = PAPER_TABLE_1.get(workload, {})
        for name, value in paper.items():
            ratio = _ratio(value, paper["+ both"])
            yield workload, f"paper: {name}", f"{value:.2f}", ratio, "", "", "", ""
        baseline = best(summaries, workload, BASELINES["sorted"])
        tecd_s = least_tecd_s(summaries, workload, BASELINES["sorted"])
        for policy in policies:
            summary = best(summaries, workload, (policy,))
            if summary is None:
                yield workload, policy, *[NOT_MEASURED] * 6
                continue
            has_steps = summary.num_steps is not None
            yield (
                workload,
                f"{policy} ({summary.settings} settings)",
                summary.speed(),
                _ratio(summary.requests_per_s, baseline.requests_per_s if baseline else None),
                _ratio(summary.tecd_s, tecd_s),
                f"{summary.saving_ratio:.1%}",
                f"{summary.valley_steps:.0f} of {summary.num_steps:.0f}" if has_steps else "",
                f"{summary.preemptions:.0f}" if has_steps else "",
            )


def _ratio(numerator: float | None, denominator: float | None) -> str:
    if numerator is None or not denominator:
        return NOT_MEASURED
    return f"{numerator / denominator:.2f}x"


def _targets(summaries: Sequence[Summary]) -> Iterator[Sequence[str]]:
    for target in targets(summaries):
        measured = NOT_MEASURED
        if target["measured"] is not None:
            notes = [f"without {name}" for name in target["baselines_missing"]]
            notes += ["one run"] if target["repetitions"] == 1 else []
            measured = f"{target['measured']}" + (f" ({', '.join(notes)})" if notes else "")
        reach, is_met = str(target["reach"]), _IS_MET[target["is_met"]]
        yield target["measure"], target["policy"], reach, measured, is_met


def _kernel(report: Mapping[str, Any] | None) -> str:
    measured = [row for row in (report or {}).get("rows", ()) if row.get("speedup_vs_fa3")]
    if report is None or not measured:
        return _not_measured("Fig. 8: the kernel", "kernel")
    rows = [
        (row["setting"], f"{row['speedup_vs_fa3']:.2f}x", f"{row['speedup_vs_best']:.2f}x")
        for row in measured
    ]
    headings = ("setting", "over FlashAttention 3", "over the best")
    return _table(f"Fig. 8: the kernel, on {report['device']}", headings, rows)


def _agreement(report: Mapping[str, Any] | None) -> str:
    title = "Agreement with stock vLLM's tokens"
    if report is None:
        return _not_measured(title, "end_to_end.agreement")
    rows = [
        (
            name,
            f"{compared['equal_outputs']:.1%}",
            f"{compared['tokens_before_difference']:.1%}",
            f"{compared['median_margin']}, {compared['largest_margin']}",
            _IS_MET[report["is_plausible"].get(name)],
        )
        for name, compared in report["compared"].items()
    ]
    headings = ("run", "equal outputs", "tokens before a difference", "margins", "near-ties")
    return _table(f"{title}, {report['workload']} (margins: median, largest)", headings, rows)


def _calibration(report: Mapping[str, Any] | None) -> str:
    title = "The simulator's prediction"
    if report is None:
        return _not_measured(title, "end_to_end.calibrate")
    rows = [
        (
            row["workload"],
            f"{row['policy']}, {row['settings']}",
            f"{row['predicted_s']:.1f} of {row['measured_s']:.1f} s",
            f"{row['error']:+.1%}",
            f"{row['simulated_steps']} of {row['measured_steps']:.0f}",
        )
        for row in report["rows"]
    ]
    headings = ("workload", "policy", "predicted of measured", "error", "steps, likewise")
    return _table(f"{title}, fitted to the other workloads", headings, rows)


def _not_measured(title: str, module: str) -> str:
    return f"### {title}\n\n{NOT_MEASURED} (`python -m benchmarks.{module}`)"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__.partition("\n\n")[0], prog="python -m benchmarks.end_to_end.tables"
    )
    parser.add_argument("results", nargs="*", type=Path, help="JSON files of benchmarks")
    parser.add_argument("--model", default="Mistral-7B")
    args = parser.parse_args()
    reports = [json.loads(path.read_text(encoding="utf-8")) for path in args.results]
    print(markdown(reports, args.model))


if __name__ == "__main__":
    main()
