"""What a model thinks before it answers."""

from __future__ import annotations

from typing import Any, Final

import pyarrow as pa

from batchllm_operator.answers import fakes
from batchllm_operator.answers.kind import AnswerKind, FakePrompt
from batchllm_operator.spec import JobSpec

REASONING_FIELD: Final = pa.field("reasoning", pa.string())
"""Null where the model hasn't reasoned; all of the text where it was cut off before the answer."""


class ReasoningAnswers(AnswerKind):
    """The reasoning apart from the text, which is the answer alone.

    vLLM's parser takes the two apart; see `ReasoningSplitter`.
    """

    raw_fields = fields = (REASONING_FIELD,)

    @classmethod
    def is_asked(cls, spec: JobSpec) -> bool:
        return spec.model.reasoning_parser is not None

    def fake(self, prompt: FakePrompt) -> dict[str, Any]:
        return {REASONING_FIELD.name: "reasoning of " + fakes.fake_text(prompt.token_ids)}
