"""What other orders of the template's columns would save on a sample, and its printed form."""

from __future__ import annotations

import json
from dataclasses import dataclass

from batchllm_operator.amounts import counted


@dataclass(frozen=True, slots=True)
class Alternative:
    """An order of the template's columns, and its saving on the sample."""

    template: str
    columns: tuple[str, ...]
    saving_ratio: float
    """That of one engine with unbounded memory."""
    is_given: bool
    """Whether this is the template of the spec."""


@dataclass(frozen=True, slots=True)
class Advice:
    """The orders that were compared."""

    num_sampled_rows: int
    num_rows: int
    """Rows of the partition before the filter."""
    alternatives: tuple[Alternative, ...]
    """By saving, descending; the given order comes first among equals."""


def format_advice(advice: Advice) -> str:
    """Lines for a terminal, without a trailing line break. Templates can be pasted into YAML."""
    lines = [
        f"saving ratios of column orders on the first {advice.num_sampled_rows:,} of"
        f" {counted(advice.num_rows, 'row')}; nothing was changed",
        " saving  template",
    ]
    for each in advice.alternatives:
        template = json.dumps(each.template, ensure_ascii=False)
        lines.append(
            f"{each.saving_ratio:7.1%}  {template}{'  (as given)' if each.is_given else ''}"
        )
    if len(advice.alternatives) == 1:
        lines.append("the template has no two columns that could change places")
    return "\n".join(lines)
