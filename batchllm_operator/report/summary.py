"""What `plan`, `report` and `job` print: a plan with its estimate, and the summary of a run."""

from collections.abc import Mapping
from typing import Final

from batchllm_operator.amounts import byte_size, clipped, token_speed
from batchllm_operator.report.pages import render_text
from batchllm_operator.stored_plan.counts import share
from batchllm_operator.stored_plan.manifest import PlanManifest
from batchllm_operator.stored_plan.run_report import RunReport

_MAX_TEXT_CHARS: Final = 70
_NUM_VALUES: Final = 5


def format_plan(manifest: PlanManifest, uri: str) -> str:
    """Lines for a terminal, the last one `uri` alone; no trailing line break."""
    functions = {"byte_size": byte_size, "seconds": _duration}
    return render_text("plan.txt.j2", manifest=manifest, uri=uri, **functions)


def _duration(seconds: float) -> str:
    if seconds < 120:
        return f"{seconds:,.3g} s"
    if seconds < 7200:
        return f"{seconds / 60:,.3g} min"
    return f"{seconds / 3600:,.4g} h"


def format_summary(report: RunReport) -> str:
    """Lines for a terminal; no trailing line break."""
    likeliest = sorted(report.answers.prior.items(), key=lambda item: (-item[1], item[0]))
    return render_text(
        "summary.txt.j2",
        report=report,
        failed=", ".join(f"{n} {kind}" for kind, n in sorted(report.errors_by_kind.items())),
        prior={label: f"{value:.4g}" for label, value in likeliest},
        first=_first_values,
        shares=lambda counts: {v: share(n, sum(counts.values())) for v, n in counts.items()},
        share=share,
        token_speed=token_speed,
        key_text=lambda key: ", ".join(f"{name}={_printable(text)}" for name, text in key.items()),
        clipped=clipped,
        repr=repr,
    )


def _first_values(shown: Mapping[str, str]) -> str:
    """The first values with what is shown of them, and the number of others."""
    first = [
        f"{_printable(clipped(value, _MAX_TEXT_CHARS))} {text}"
        for value, text in list(shown.items())[:_NUM_VALUES]
    ]
    num_more = len(shown) - len(first)
    return ", ".join([*first, f"{num_more} more"] if num_more else first)


def _printable(key: str) -> str:
    return key if key.isprintable() else repr(key)
