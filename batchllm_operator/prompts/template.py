"""Rows to prompt texts. A template places data and does nothing else."""

from __future__ import annotations

from dataclasses import dataclass
from string import Formatter
from typing import Final

import pyarrow as pa

from batchllm_operator.spec import PromptSpec

NULL_VALUE: Final = "null_value"
NOT_A_STRING: Final = "not_a_string"
NOT_UTF8: Final = "not_utf8"
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

        A row with a null, a non-string or broken text in one of those columns, or for which
        the template gives no text, gets an error (`code: explanation`) in place of a text.
        """
        values = {name: _to_python(batch.column(name)) for name in self._columns}
        texts: list[str | None] = []
        errors: list[str | None] = []
        for row_idx in range(batch.num_rows):
            row = {name: column[row_idx] for name, column in values.items()}
            error = self._fault(row)
            text = "" if error else self._render_row(row)
            if not text and not error:
                error = f"{EMPTY_PROMPT}: the template gives this row no text"
            texts.append(None if error else self._head + text)
            errors.append(error)
        return RenderedPrompts(texts, errors)

    def _fault(self, row: dict[str, object]) -> str | None:
        for name, value in row.items():
            if value is None:
                return f"{NULL_VALUE}: column {name!r} is null"
            if isinstance(value, UnicodeDecodeError):
                return f"{NOT_UTF8}: column {name!r} isn't valid UTF-8: {value.reason}"
            if not isinstance(value, str):
                return f"{NOT_A_STRING}: column {name!r} holds {type(value).__name__}, not a string"
        return None

    def _render_row(self, row: dict[str, object]) -> str:
        pieces = []
        for literal, name in self._pieces:
            pieces.append(literal)
            if name is not None:
                pieces.append(str(row[name]))
        return "".join(pieces)


def _to_python(column: pa.Array) -> list[object]:
    """The column's values; in place of a text that isn't UTF-8, the error that says so."""
    try:
        return list(column.to_pylist())
    except UnicodeDecodeError:
        return [_value(scalar) for scalar in column]


def _value(scalar: pa.Scalar) -> object:
    try:
        return scalar.as_py()
    except UnicodeDecodeError as error:
        return error
