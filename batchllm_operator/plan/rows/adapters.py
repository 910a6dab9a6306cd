"""The adapter of each row, which is a part of its prompt's first token while a plan is made."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from batchllm_operator.errors import PlanError, SpecError
from batchllm_operator.model import check_adapters, find_adapters
from batchllm_operator.prefixes import PromptClasses, TokenTable
from batchllm_operator.prefixes.jit import Int64s
from batchllm_operator.prompts import RenderedPrompts, Tokenizer
from batchllm_operator.row_error import RowError
from batchllm_operator.spec import JobSpec, ModelSpec
from batchllm_operator.spec.limits import shown

UNKNOWN_ADAPTER: Final = "unknown_adapter"


@dataclass(frozen=True, slots=True)
class RowAdapters:
    """A job's adapters, as classes of prompts: 0 is the model itself, then in order of their names.

    Attributes:
        versions: of the adapters, in that order.
    """

    model: ModelSpec
    classes: PromptClasses
    versions: tuple[str, ...]
    tokenizer: Tokenizer

    @classmethod
    def of(cls, spec: JobSpec, tokenizer: Tokenizer) -> RowAdapters | None:
        """Those of a spec; None if it has none.

        Raises:
            SpecError: there are too many for this vocabulary.
            ModelError: see `find_adapters` and `check_adapters`.
        """
        if not spec.model.adapters:
            return None
        adapters = find_adapters(spec.model)
        chat = any(question.prompt.chat_template for question in spec.questions)
        check_adapters(spec.model, adapters, tokenizer.files, chat=chat)
        try:
            classes = PromptClasses(tokenizer.vocabulary_bound, 1 + len(adapters))
        except PlanError as error:
            raise SpecError(f"model.adapters: {error}") from error
        versions = tuple(adapter.version for adapter in adapters)
        return cls(spec.model, classes, versions, tokenizer)

    def encode(
        self, rendered: RenderedPrompts, rows: pa.RecordBatch
    ) -> tuple[RenderedPrompts, TokenTable]:
        """Row errors for unknown adapters; token ids of the other texts, marked with theirs."""
        numbers = self._numbers(rows)
        rendered = rendered.with_errors(self._unknown(rows, numbers))
        tokens = self.tokenizer.encode(rendered.present())
        return rendered, self.classes.mark(tokens, numbers[rendered.idxs])

    def take_out(self, tokens: TokenTable) -> tuple[TokenTable, pa.Array]:
        """The reverse of `mark`; with the name of each prompt's adapter, null for none."""
        unmarked, classes = self.classes.unmark(tokens)
        return unmarked, pa.array([None, *self.model.adapters], pa.string()).take(pa.array(classes))

    def decode(self, token_ids: Sequence[int]) -> str:
        """The text of the beginning of a prompt."""
        return self.tokenizer.decode([token_id % self.classes.bound for token_id in token_ids])

    def _numbers(self, rows: pa.RecordBatch) -> Int64s:
        """The class of each row's prompt, -1 for an unknown adapter: int64 [num_rows]."""
        names = ["", *self.model.adapters]
        if self.model.adapter is not None:
            return np.full(rows.num_rows, names.index(self.model.adapter), dtype=np.int64)
        given = rows.column(str(self.model.adapter_column)).cast(pa.large_string()).fill_null("")
        places = pc.index_in(given, value_set=pa.array(names, pa.large_string()))
        numbers: Int64s = places.fill_null(-1).cast(pa.int64()).to_numpy()
        return numbers

    def _unknown(self, rows: pa.RecordBatch, numbers: Int64s) -> dict[int, RowError]:
        """Row errors for adapters that aren't there."""
        unknown = np.flatnonzero(numbers < 0).tolist()
        if not unknown:
            return {}
        names = rows.column(str(self.model.adapter_column)).cast(pa.large_binary())
        given = {row: shown(names[row].as_py().decode(errors="replace")) for row in unknown}
        return {
            row: RowError(UNKNOWN_ADAPTER, f"model.adapters has no '{name}'")
            for row, name in given.items()
        }
