"""A kind of answer: all that the product knows of one thing that a job asks for, in one class."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Self

import pyarrow as pa
from pydantic import BaseModel, ConfigDict, Field

from batchllm_operator.row_error import RowError
from batchllm_operator.spec import JobSpec

if TYPE_CHECKING:
    from batchllm_operator.prompts import Tokenizer

Parts = Callable[[Sequence[str]], Iterable[pa.Table]]
"""Reads these columns of all parts of a plan, a table at a time."""


class PlannedAnswers(BaseModel):
    """What planning finds out about the answers of a job; the manifest stores it."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    label_token_ids: tuple[int, ...] = ()
    """The token of each label's answer, in the order of the spec's labels."""
    embedding_size: int | None = Field(default=None, ge=1)
    """Numbers of an embedding."""
    score_labels: tuple[str, ...] = ()
    """Names of the scores of a pooling head, in their order; empty if the model has none."""
    reason_against_sharing: str | None = None
    """Why each prompt is planned by itself; None if prompts share prefixes."""


NOTHING_PLANNED: Final = PlannedAnswers()


class FakePrompt(NamedTuple):
    """A prompt for which the fake engine makes up an answer."""

    token_ids: list[int]
    num_characters: int
    """Of a text."""
    is_invalid: bool = False
    """Whether the answer can't be used, if its kind has such answers."""


class AnswerKind(ABC):
    """One thing that a job asks for beside a text, or the form of its text.

    What parts keep of it (`raw_fields`) is what the engine gives; columns are derived when rows are
    committed. Names of columns also stand in `spec/question.py`, because a spec is checked where
    nothing else can be imported. Parts and faults need nothing that planning has found out.
    """

    raw_fields: Sequence[pa.Field] = ()
    """Columns of parts, beside those of a text."""
    fields: Sequence[pa.Field] = ()
    """Columns of the output table, named as in `JobSpec.output_columns`."""
    counted: Sequence[str] = ()
    """Columns of few distinct texts, by which the report counts rows."""
    averaged: Sequence[str] = ()
    """Columns of numbers whose means the report has."""

    def __init__(self, spec: JobSpec, planned: PlannedAnswers) -> None:
        self._spec, self._planned = spec, planned

    @classmethod
    @abstractmethod
    def is_asked(cls, spec: JobSpec) -> bool:
        """Whether a job asks for this kind."""

    @classmethod
    def plan(cls, spec: JobSpec, tokenizer: Tokenizer) -> dict[str, Any]:
        """Fields of `PlannedAnswers` that planning has to find out for a job that asks for it."""
        return {}

    def over(self, parts: Parts) -> Self:
        """The kind, for `columns`, with what it has to know of all parts."""
        return self

    def columns(self, outputs: pa.Table) -> dict[str, pa.Array]:
        """The columns `fields`, by name, and others that it replaces; null without an answer.

        `outputs` are rows with the columns of a part and `raw_fields`.
        """
        return {field.name: outputs[field.name] for field in self.fields}

    def fault(self, text: str, raw: Mapping[str, Any]) -> RowError | None:
        """The row error of an answer that can't be used, by its text and `raw_fields`, or None."""
        return None

    def read(self, output: Any) -> dict[str, Any]:
        """`raw_fields` by name of vLLM's finished `RequestOutput` or `PoolingRequestOutput`."""
        return {}

    def fake(self, prompt: FakePrompt) -> dict[str, Any]:
        """The fake engine's values of `raw_fields` by name."""
        return {}

    def fake_text(self, prompt: FakePrompt) -> str | None:
        """The fake engine's text, if this kind decides it."""
        return None

    def remarks(self, means: Mapping[str, float], texts: Counter[str]) -> dict[str, Any]:
        """Fields of the report's `AnswerSummary` beside counts and the means of `averaged`.

        `texts` counts rows by the model's own text; only of labels, whose texts are single tokens.
        """
        return {}
