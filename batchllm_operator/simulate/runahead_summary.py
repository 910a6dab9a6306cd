"""The output of `batchllm simulate --runahead`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any, Final

from batchllm_operator.amounts import text_table
from batchllm_operator.simulate.runahead import (
    Paper,
    PredictedRow,
    PredictedSplit,
    Quantity,
    log_errors,
    root_mean_square,
)

_HEADINGS: Final = (
    "source",
    "model",
    "GPUs",
    "GB/s",
    "context",
    "TSP",
    "paper",
    "KVR-E",
    "KVR-S",
    "paper",
    "speed-up",
    "paper",
    "off by",
)
_NUM_TEXTS: Final = 2
"""Columns aligned to the left."""
_LABELS: Final[dict[Quantity, str]] = {
    "tsp": "TTFT of TSP",
    "kvr_s": "TTFT of KVR-S, or of one GPU",
    "speedup": "speed-ups of KVR-S that are given alone",
    "even_speedup": "speed-ups of KVR-E",
}
_SPEEDUP_CONTEXTS: Final = (2048, 16384)
_SPEEDUP_GPUS: Final = (4, 8)


def speedup_errors(rows: Sequence[PredictedRow]) -> list[float]:
    """Relative errors of speed-ups over TSP: Llama 7B, 4 and 8 GPUs, 2k to 16k, 300 GB/s."""
    return [
        row.speedup_error
        for row in rows
        if row.speedup_error is not None
        and row.model == "Llama 7B"
        and row.num_gpus in _SPEEDUP_GPUS
        and row.network_bytes_per_s == max(each.network_bytes_per_s or 0 for each in rows)
        and _SPEEDUP_CONTEXTS[0] <= row.context <= _SPEEDUP_CONTEXTS[1]
    ]


def format_rows(
    paper: Paper, rows: Sequence[PredictedRow], splits: Sequence[PredictedSplit]
) -> str:
    """A table of all rows, then splits, constants and errors."""
    lines = [
        "Predicted TTFT in seconds, beside that of the KV-Runahead paper (Cho et al., 2024) on"
        f" {paper.gpu}; rows with * took no part in the fit",
        "",
        *text_table([_HEADINGS, *map(_cells, rows)], range(_NUM_TEXTS)),
        "",
        "Chunks, as shares of the context:",
    ]
    lines += [
        f"  {each.source}, {each.num_gpus} GPUs, {each.context:,} tokens: {_shares(each.shares)};"
        f" paper {_shares(each.paper_shares)}, predicted to take"
        f" {each.ttft_over_searched - 1:+.1%} of the searched chunks' time"
        for each in splits
    ]
    constants = paper.calibration.model_dump()
    fitted = [row for row in rows if row.fitted]
    lines += [
        "",
        f"{len(constants)} constants fitted to {len(log_errors(fitted))} figures of Llama 7B:"
        f" {', '.join(f'{name} {value:g}' for name, value in constants.items())}",
        f"Errors, root mean square: {root_mean_square(log_errors(fitted)):.1%} of what was fitted;",
    ]
    for quantity, label in _LABELS.items():
        errors = [row.log_errors().get(quantity) for row in fitted]
        found = [error for error in errors if error is not None]
        lines.append(
            f"  {label} ({len(found)}): {root_mean_square(found):.1%}, the worst"
            f" {max(map(abs, found)):.1%}"
        )
    for label, others in _unseen(rows).items():
        lines.append(f"  not fitted, {label}: {root_mean_square(log_errors(others)):.1%}")
    speedups = speedup_errors(rows)
    lines.append(
        "Speed-ups of KVR-S over TSP, Llama 7B, 4 and 8 GPUs, 2k to 16k, at the higher bandwidth:"
        f" {len(speedups)} in the paper's text, off by at most {max(map(abs, speedups)):.1%}"
    )
    return "\n".join(lines)


def result(
    paper: Paper, rows: Sequence[PredictedRow], splits: Sequence[PredictedSplit]
) -> dict[str, Any]:
    """The same as JSON."""
    fitted = [row for row in rows if row.fitted]
    speedups = speedup_errors(rows)
    return {
        "gpu": paper.gpu,
        "num_fitted_parameters": len(paper.calibration.model_dump()),
        "parameters": paper.calibration.model_dump(),
        "num_fitted_figures": len(log_errors(fitted)),
        "rms_log_error_fitted": round(root_mean_square(log_errors(fitted)), 4),
        "rms_log_error_unseen": {
            label: round(root_mean_square(log_errors(others)), 4)
            for label, others in _unseen(rows).items()
        },
        "num_llama_7b_speedups": len(speedups),
        "worst_llama_7b_speedup_error": round(max(map(abs, speedups)), 4),
        "rows": [row.figures() for row in rows],
        "splits": [asdict(each) for each in splits],
    }


def _unseen(rows: Sequence[PredictedRow]) -> dict[str, list[PredictedRow]]:
    """Rows outside of the fit, by their difference from the fitted ones."""
    fitted = [row for row in rows if row.fitted]
    models, num_gpus = {row.model for row in fitted}, {row.num_gpus for row in fitted}
    found: dict[str, list[PredictedRow]] = {}
    for row in rows:
        if not row.fitted and row.log_errors():
            label = f"{(row.network_bytes_per_s or 0) / 1e9:g} GB/s"
            if row.model not in models:
                label = "other models"
            elif row.num_gpus not in num_gpus:
                label = f"{row.num_gpus} GPUs"
            found.setdefault(label, []).append(row)
    return found


def _cells(row: PredictedRow) -> tuple[str, ...]:
    is_alone = row.network_bytes_per_s is None
    return (
        row.source + ("" if row.fitted else " *"),
        row.model,
        str(row.num_gpus),
        "" if row.network_bytes_per_s is None else f"{row.network_bytes_per_s / 1e9:g}",
        f"{row.context:,}",
        "" if is_alone else f"{row.tsp_s:.3f}",
        _or_blank(row.paper_tsp_s, "{:.3f}"),
        "" if is_alone else f"{row.kvr_e_s:.3f}",
        f"{row.kvr_s_s:.3f}",
        _or_blank(row.paper_kvr_s_s, "{:.3f}"),
        "" if is_alone else f"{row.speedup:.2f}",
        _or_blank(row.paper_speedup, "{:.2f}"),
        _or_blank(row.speedup_error, "{:+.1%}"),
    )


def _or_blank(value: float | None, form: str) -> str:
    return "" if value is None else form.format(value)


def _shares(shares: Sequence[float]) -> str:
    return "/".join(f"{share:.3f}" for share in shares)
