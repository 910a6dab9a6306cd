"""The kinds of a job's answers, as one."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import starmap
from typing import TYPE_CHECKING, Any, Final

import pyarrow as pa

from batchllm_operator.answers import fakes
from batchllm_operator.answers.generated import (
    ChoiceAnswers,
    LogprobAnswers,
    ReasoningAnswers,
    ResponseAnswers,
    SampleAnswers,
)
from batchllm_operator.answers.kind import (
    NOTHING_PLANNED,
    AnswerKind,
    FakePrompt,
    Parts,
    PlannedAnswers,
)
from batchllm_operator.answers.labels import LabelAnswers, LabelMass
from batchllm_operator.answers.typed import TypedAnswers
from batchllm_operator.answers.vectors import VectorAnswers
from batchllm_operator.row_error import RowError
from batchllm_operator.spec import JobSpec

if TYPE_CHECKING:
    from batchllm_operator.prompts import Tokenizer

KINDS: Final[tuple[type[AnswerKind], ...]] = (
    *(LabelAnswers, VectorAnswers, TypedAnswers, ChoiceAnswers),
    *(SampleAnswers, ReasoningAnswers, ResponseAnswers, LogprobAnswers),
)
"""All kinds. A new one is a class of this room, and its fields and rules in `spec/`."""


@dataclass(frozen=True, slots=True)
class Answers:
    """The kinds of a job's answers; see `AnswerKind` for the methods of its names."""

    kinds: tuple[AnswerKind, ...]

    @classmethod
    def of(cls, spec: JobSpec, planned: PlannedAnswers = NOTHING_PLANNED) -> Answers:
        """The kinds that a spec asks for; a SpecError refuses a schema that can't be columns."""
        return cls(tuple(kind(spec, planned) for kind in KINDS if kind.is_asked(spec)))

    @classmethod
    def of_all(
        cls, spec: JobSpec, planned: Sequence[PlannedAnswers] | None = None
    ) -> tuple[Answers, ...]:
        """The kinds of each of a job's questions, for each of which planning has found something
        out."""
        questions = spec.questions
        known = [NOTHING_PLANNED] * len(questions) if planned is None else planned
        return tuple(starmap(cls.of, zip(questions, known, strict=True)))

    @property
    def raw_fields(self) -> list[pa.Field]:
        """Fields of a part, beside those of a text."""
        return [field for kind in self.kinds for field in kind.raw_fields]

    @property
    def fields(self) -> list[pa.Field]:
        """Columns of the output table, beside those of a text."""
        return [field for kind in self.kinds for field in kind.fields]

    def over(self, parts: Parts) -> Answers:
        return Answers(tuple(kind.over(parts) for kind in self.kinds))

    def columns(self, outputs: pa.Table) -> dict[str, pa.Array]:
        return _joined(kind.columns(outputs) for kind in self.kinds)

    def fault(self, text: str, raw: Mapping[str, Any]) -> RowError | None:
        faults = (kind.fault(text, raw) for kind in self.kinds)
        return next((fault for fault in faults if fault is not None), None)

    def read(self, output: Any) -> dict[str, Any]:
        return _joined(kind.read(output) for kind in self.kinds)

    def fake(self, prompt: FakePrompt) -> tuple[str, dict[str, Any]]:
        """The fake engine's text and values of `raw_fields`."""
        texts = [kind.fake_text(prompt) for kind in self.kinds]
        texts.append(fakes.fake_text(prompt.token_ids, prompt.num_characters))
        text = next(text for text in texts if text is not None)
        return text, _joined(kind.fake(prompt) for kind in self.kinds)

    def watches(self) -> list[LabelMass]:
        """What watches the answers of a run, and warns early of doubtful ones."""
        return [kind.watch() for kind in self.kinds if isinstance(kind, LabelAnswers)]


def raw_fields(spec: JobSpec) -> list[pa.Field]:
    """Fields of a part, beside those of a text, for the answers to all of a job's questions."""
    every = (field for answers in Answers.of_all(spec) for field in answers.raw_fields)
    return list({field.name: field for field in every}.values())


def plan_answers(spec: JobSpec, tokenizer: Tokenizer) -> PlannedAnswers:
    """What planning finds out about a job's answers.

    Raises:
        SpecError: the model can't give such answers.
        ModelError: a file of the model can't be read, or lacks something.
    """
    plans = (kind.plan(spec, tokenizer) for kind in KINDS if kind.is_asked(spec))
    return PlannedAnswers(**_joined(plans))


def _joined(mappings: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    return {name: value for mapping in mappings for name, value in mapping.items()}
