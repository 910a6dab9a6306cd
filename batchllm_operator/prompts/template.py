"""Rows to prompt texts. A template places data and does nothing else."""

from __future__ import annotations

from dataclasses import dataclass
from string import Formatter
from typing import Final

import pyarrow as pa

from batchllm_operator.prompts.values import Fault, Text, texts
from batchllm_operator.spec import PromptSpec

NULL_VALUE: Final = "null_value"
EMPTY_PROMPT: Final = "empty_prompt"


@dataclass(frozen=True, slots=True)
class RenderedPrompts:
    """Texts of a batch of rows; exactly one of `texts[i]` and `errors[i]` is None."""

    texts: list[str | None]
    errors: list[str | None]


class PromptRenderer:
    """Renders the template of a spec over batches of rows."""

    def __init__(self, prompt: PromptSpec) -> None:
        # The system text goes before the template here only if no chat template will place it.
        self._head = "" if prompt.chat_template else (prompt.system or "")
        self._columns = prompt.columns
        self._pieces = [
            (literal, name) for literal, name, _, _ in Formatter().parse(prompt.template)
        ]

    def render(self, batch: pa.RecordBatch) -> RenderedPrompts:
        """Render each row of `batch`, which must hold all columns of the template.

        Each column is of a type that `has_text`. A row with a null or a value without a text in
        one of them, or for which the template gives no text, gets an error (`code: explanation`)
        in place of a text.
        """
        values = {name: texts(batch.column(name)) for name in self._columns}
        prompts: list[str | None] = []
        errors: list[str | None] = []
        for row_idx in range(batch.num_rows):
            row = {name: column[row_idx] for name, column in values.items()}
            error = self._fault(row)
            text = "" if error else self._render_row(row)
            if not text and not error:
                error = f"{EMPTY_PROMPT}: the template gives this row no text"
            prompts.append(None if error else self._head + text)
            errors.append(error)
        return RenderedPrompts(prompts, errors)

    def _fault(self, row: dict[str, Text]) -> str | None:
        for name, value in row.items():
            if value is None:
                return f"{NULL_VALUE}: column {name!r} is null"
            if isinstance(value, Fault):
                return f"{value.code}: column {name!r} {value.reason}"
        return None

    def _render_row(self, row: dict[str, Text]) -> str:
        pieces = []
        for literal, name in self._pieces:
            pieces.append(literal)
            if name is not None:
                pieces.append(str(row[name]))
        return "".join(pieces)
