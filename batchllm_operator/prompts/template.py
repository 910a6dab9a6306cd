"""Renders rows into prompt texts. A template only places data."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from itertools import chain, product
from string import Formatter
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from batchllm_operator.model import ChatTemplate
from batchllm_operator.prompts.control_tokens import ControlTokens
from batchllm_operator.prompts.values import TextColumn, text_column
from batchllm_operator.row_error import RowError
from batchllm_operator.spec import PromptSpec
from batchllm_operator.spec.prompt import FIELD_ORDERS

NULL_VALUE: Final = "null_value"
EMPTY_PROMPT: Final = "empty_prompt"
_FIELDS: Final = "fields"
_Piece = tuple[str, str | None]
"""A text, and the column after it."""


class RenderedPrompts(NamedTuple):
    """Texts of a batch of rows: each row has either a text or an error."""

    texts: pa.LargeStringArray
    """[num_rows], null for a row with an error."""
    errors: dict[int, RowError]
    """By row of the batch, ascending."""
    control_rows: frozenset[int] = frozenset()
    """Rows whose values spell a control token of the model."""

    @property
    def idxs(self) -> npt.NDArray[np.int64]:
        """The rows that have texts: int64 [num_texts]."""
        return np.flatnonzero(self.texts.is_valid().to_numpy(zero_copy_only=False))

    def present(self) -> list[str]:
        """All texts that aren't null, in order."""
        return list(self.texts.drop_null().to_numpy(zero_copy_only=False))

    def with_errors(self, errors: Mapping[int, RowError]) -> RenderedPrompts:
        """The same, with errors in place of the texts of some rows."""
        if not errors:
            return self
        is_wrong = np.zeros(len(self.texts), dtype=np.bool_)
        is_wrong[list(errors)] = True
        texts = pc.if_else(pa.array(is_wrong), pa.scalar(None, pa.large_string()), self.texts)
        return self._replace(texts=texts, errors=dict(sorted({**self.errors, **errors}.items())))


class PromptRenderer:
    """Renders the template of a spec over batches of rows, for a model with control tokens.

    The prompts may go through its chat template, each as a user's message. With `fills_nulls`, null
    is the empty text.
    """

    def __init__(
        self,
        prompt: PromptSpec,
        control: ControlTokens | None = None,
        chat: ChatTemplate | None = None,
        fills_nulls: bool = False,
    ) -> None:
        assert prompt.template is not None
        self._fills_nulls = fills_nulls
        self._chat, self._chat_head = chat, system_message(prompt)
        head = "" if prompt.chat_template else (prompt.system or "")
        self._head_bytes = len(head.encode())
        self._columns = prompt.columns
        self._pieces: list[_Piece] = [(head, None)] if head else []
        self._pieces += _pieces_of(prompt.template)
        self._fields = () if prompt.fields is None else prompt.fields.templates
        self._control = control or ControlTokens()
        self._within = self._control.columns_within(self._neighbours())

    def render(self, batch: pa.RecordBatch) -> RenderedPrompts:
        """Render each row of `batch`, which must hold all columns of the template, that `has_text`.

        It may also have the order of each row's fields, under `FIELD_ORDERS`.

        A row gets an error in place of a text if one of its values is null or has no text, or if
        the whole text is empty. A ModelError tells of a chat template that refuses a text.
        """
        values: dict[str, TextColumn] = {}
        control_rows: set[int] = set()
        for name in self._columns:
            texts, within = text_column(batch.column(name)), name in self._within
            texts = texts.filled() if self._fills_nulls else texts
            values[name], spelling = self._control.in_column(texts, within=within)
            control_rows |= spelling
        texts = self._join(values, batch)
        errors = {row: _fault(values, row) for row in _rows_where(texts.is_null())}
        is_empty = pc.equal(pc.binary_length(texts), self._head_bytes).fill_null(False)
        error = RowError(EMPTY_PROMPT, "the template gives this row no text")
        empty = dict.fromkeys(_rows_where(is_empty), error)
        rendered = RenderedPrompts(texts, errors, frozenset(control_rows)).with_errors(empty)
        return rendered if self._chat is None else self._as_chats(rendered, self._chat)

    def _neighbours(self) -> Iterator[_Piece]:
        """The pieces, with each field after each."""
        for literal, name in self._pieces:
            if name != _FIELDS or not self._fields:
                yield literal, name
                continue
            yield literal, None
            for pair in product(map(_pieces_of, self._fields), repeat=2):
                yield from chain.from_iterable(pair)

    def _as_chats(self, rendered: RenderedPrompts, chat: ChatTemplate) -> RenderedPrompts:
        chats = [
            [*self._chat_head, {"role": "user", "content": text}] for text in rendered.present()
        ]
        texts = iter(chat.render(chats) if chats else ())
        is_valid = rendered.texts.is_valid().to_pylist()
        array = pa.array([next(texts) if v else None for v in is_valid], pa.large_string())
        return rendered._replace(texts=array)

    def _join(self, values: dict[str, TextColumn], batch: pa.RecordBatch) -> pa.LargeStringArray:
        """All pieces of each row as one text, null if one of them is null."""

        def joined(pieces: Iterable[_Piece]) -> pa.LargeStringArray:
            parts: list[pa.Scalar | pa.Array] = [pa.repeat(empty, batch.num_rows)]
            for literal, name in pieces:
                if literal:
                    parts.append(pa.scalar(literal, pa.large_string()))
                if name == _FIELDS and self._fields:
                    fields = [joined(_pieces_of(field)) for field in self._fields]
                    parts += _in_order(fields, batch)
                elif name is not None:
                    parts.append(values[name].texts)
            return pc.binary_join_element_wise(*parts, empty, null_handling="emit_null")

        empty = pa.scalar("", pa.large_string())
        return joined(self._pieces)


def _pieces_of(template: str) -> list[_Piece]:
    return [(literal, name) for literal, name, *_ in Formatter().parse(template)]


def _in_order(fields: list[pa.Array], batch: pa.RecordBatch) -> list[pa.Array]:
    """The texts of each row's first field, second field, ..., by its order if the batch has one."""
    if FIELD_ORDERS not in batch.schema.names:
        return fields
    orders = batch.column(FIELD_ORDERS).flatten().to_numpy().reshape(-1, len(fields))
    return [pc.choose(pa.array(numbers), *fields) for numbers in orders.T]


def system_message(prompt: PromptSpec) -> list[dict[str, str]]:
    """The beginning of each chat."""
    return [] if prompt.system is None else [{"role": "system", "content": prompt.system}]


def _rows_where(is_chosen: pa.Array) -> list[int]:
    rows: list[int] = np.flatnonzero(is_chosen.to_numpy(zero_copy_only=False)).tolist()
    return rows


def _fault(values: dict[str, TextColumn], row: int) -> RowError:
    """The fault of the first column without a text in this row."""
    for name, column in values.items():
        if (fault := column.faults.get(row)) is not None:
            return fault.of(name)
        if not column.texts[row].is_valid:
            return RowError(NULL_VALUE, f"column {name!r} is null")
    raise AssertionError(row)
