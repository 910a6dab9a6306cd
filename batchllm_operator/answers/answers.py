"""All that a job asks for beside a text, as one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import pyarrow as pa

from batchllm_operator.answers.labels import LabelColumns
from batchllm_operator.answers.logprobs import LogprobColumns
from batchllm_operator.answers.reasoning import ReasoningColumns
from batchllm_operator.answers.samples import SampleColumns
from batchllm_operator.answers.structured import ChosenText, JsonColumns
from batchllm_operator.answers.vectors import VectorColumns
from batchllm_operator.spec import JobSpec, JsonSchemaFormat


class Kind(Protocol):
    """One thing that a job may ask for. Its columns are derived when rows are committed."""

    @property
    def raw_fields(self) -> Sequence[pa.Field]:
        """What parts keep of it, beside a text: as the engine says it."""

    @property
    def fields(self) -> Sequence[pa.Field]:
        """Columns of the output table, named as in `JobSpec.output_columns`."""

    def columns(self, outputs: pa.Table) -> dict[str, pa.Array]:
        """The columns `fields`, by name, and others that it replaces; null without an answer.

        Args:
            outputs: rows with the columns of a part and `raw_fields`.
        """

    def fault(self, text: str, raw: Mapping[str, Any]) -> str | None:
        """The row error (`code: explanation`) of an answer that can't be used, or None.

        Args:
            text: the answer's.
            raw: its `raw_fields` by name.
        """


@runtime_checkable
class Summarized(Protocol):
    """A kind that reports say something of. Both name columns that it derives, or of a part."""

    @property
    def counted(self) -> Sequence[str]:
        """Columns of texts of which there are few: rows are counted by them."""

    @property
    def averaged(self) -> Sequence[str]:
        """Columns of numbers, of which there is a mean."""


@dataclass(frozen=True, slots=True)
class Answers:
    """The kinds of a job's answers."""

    kinds: tuple[Kind, ...]

    @classmethod
    def of(
        cls,
        spec: JobSpec,
        *,
        vector_size: int | None = None,
        score_labels: Sequence[str] = (),
        label_prior: Sequence[float] | None = None,
    ) -> Answers:
        """Those that a spec asks for; parts need no more, columns what the plan found, too.

        Args:
            vector_size: numbers of an embedding.
            score_labels: names of the scores of a pooling head.
            label_prior: mean probabilities of the labels, for the columns of a job that calibrates.

        Raises:
            SpecError: a schema can't be columns; see `JsonColumns`.
        """
        kinds: list[Kind] = []
        if spec.task == "classify":
            kinds.append(LabelColumns(spec, label_prior))
        if spec.task == "embed" or spec.task == "pool":
            kinds.append(VectorColumns(spec.task, vector_size, score_labels))
        if isinstance(spec.response_format, JsonSchemaFormat):
            kinds.append(JsonColumns.of(spec.response_format))
        elif spec.response_format is not None:
            kinds.append(ChosenText(spec.response_format))
        if spec.sampling.n > 1:
            kinds.append(SampleColumns())
        if spec.model.reasoning_parser is not None:
            kinds.append(ReasoningColumns())
        if spec.sampling.logprobs is not None:
            kinds.append(LogprobColumns(spec.sampling.logprobs))
        return cls(tuple(kinds))

    @property
    def summarized(self) -> tuple[Summarized, ...]:
        """The kinds that reports say something of."""
        return tuple(kind for kind in self.kinds if isinstance(kind, Summarized))

    @property
    def raw_fields(self) -> list[pa.Field]:
        """Fields of a part, beside those of a text."""
        return [field for kind in self.kinds for field in kind.raw_fields]

    @property
    def fields(self) -> list[pa.Field]:
        """Columns of the output table, beside those of a text."""
        return [field for kind in self.kinds for field in kind.fields]

    def columns(self, outputs: pa.Table) -> dict[str, pa.Array]:
        """See `Kind.columns`."""
        return {name: each for kind in self.kinds for name, each in kind.columns(outputs).items()}

    def fault(self, text: str, raw: Mapping[str, Any]) -> str | None:
        """See `Kind.fault`."""
        found = (kind.fault(text, raw) for kind in self.kinds)
        return next((fault for fault in found if fault is not None), None)
