"""A report as a table in Markdown and as bars."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

_LABELS: Final = {
    "llm": "LLM.generate, as given",
    "llm_sorted": "LLM.generate, sorted",
    "run_batch": "vllm run-batch",
    "our_batch": "batchllm run-batch",
    "ray": "Ray Data LLM",
    "daft": "Daft, vllm-prefix-caching",
    "datatrove": "datatrove",
    "ours": "BatchLLM Operator",
}
_HEAD: Final = (
    "| | with plan and commit | generating | whole command | CPU time | prompt tokens | memory"
    " | equal texts |\n|---|---:|---:|---:|---:|---:|---:|---:|\n"
)
_HEAD_OF_STOPS: Final = "| | one null prompt | SIGKILL at half, then again |\n|---|---|---|\n"


def markdown(report: dict[str, Any]) -> str:
    """The table; times in seconds."""
    head, lines = _HEAD, []
    for found in report["results"]:
        cells = [f"{_LABELS[found['name']]} {found['version'] or ''}".rstrip()]
        if found.get("code"):
            cells += [f"exit code {found['code']:.0f}", *[""] * 6]
        elif "killed" in found:
            head = _HEAD_OF_STOPS
            cells += [_null(found["null"]), _killed(found["killed"])]
        else:
            cells += _cells(found, report["num_prompt_tokens"])
        lines.append(f"| {' | '.join(cells)} |\n")
    return head + "".join(lines)


def total_s(found: dict[str, Any]) -> float:
    """Seconds of generating, with plan and commit where there are some."""
    return float(found["generate_s"] + found.get("plan_s", 0.0) + found.get("commit_s", 0.0))


def _cells(found: dict[str, Any], num_prompt_tokens: int) -> tuple[str, ...]:
    share = found["num_computed"] / num_prompt_tokens
    return (
        *(f"{seconds:.1f}" for seconds in (total_s(found), found["generate_s"], found["wall_s"])),
        f"{found['cpu_s']:.0f}",
        f"{found['num_computed']:,.0f} ({share:.0%})",
        f"{found['peak_bytes'] / (1 << 30):.1f} GiB",
        f"{found['equal_texts']:.1%}",
    )


def _null(found: dict[str, Any]) -> str:
    end = f", exit code {found['code']}" if found["code"] else ""
    return f"{found['num_texts']} of {found['num_rows']} others{end}"


def _killed(found: dict[str, Any]) -> str:
    line = f"{found['num_again']} of {found['num_done']} rows again"
    line += f", {found['num_computed']:,} prompt tokens in all"
    if found["code"] or found["num_texts"] != found["num_rows"]:
        line += f", exit code {found['code']}, {found['num_texts']} of {found['num_rows']} texts"
    return line + (f"; {found['num_orphans']} processes went on" * bool(found["num_orphans"]))


def plot(report: dict[str, Any], file: Path) -> None:
    """The bars, as SVG."""
    import matplotlib as mpl

    mpl.use("svg")
    mpl.rcParams["svg.hashsalt"] = "peers"
    from matplotlib import pyplot as plt

    results = report["results"][::-1]
    names = [_LABELS[result["name"]] for result in results]
    colours = ["#d9730d" if result["name"] == "ours" else "#5b7fa6" for result in results]
    columns = {
        "seconds, with plan and commit": [total_s(result) for result in results],
        "CPU seconds of the command": [result["cpu_s"] for result in results],
        "thousand prompt tokens computed": [result["num_computed"] / 1e3 for result in results],
        "memory, GiB": [result["peak_bytes"] / (1 << 30) for result in results],
    }
    figure, axes = plt.subplots(1, 4, sharey=True, figsize=(12, 3), layout="constrained")
    figure.patch.set_facecolor("white")  # on a dark page, too
    for axis, (title, values) in zip(axes, columns.items(), strict=True):
        axis.bar_label(axis.barh(names, values, color=colours), fmt="%.3g", padding=2, fontsize=8)
        axis.set_title(title, fontsize=9)
        axis.margins(x=0.2)
        axis.spines[["top", "right"]].set_visible(False)
    figure.savefig(file, metadata={"Date": None})
