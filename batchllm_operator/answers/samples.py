"""Several answers to one prompt."""

from __future__ import annotations

from typing import Any, Final

import pyarrow as pa

from batchllm_operator.answers import fakes
from batchllm_operator.answers.kind import AnswerKind, FakePrompt
from batchllm_operator.spec import JobSpec

TEXTS_FIELD: Final = pa.field("generated_texts", pa.list_(pa.string()))
"""All answers of a row; `generated_text` is the first of them."""


class SampleAnswers(AnswerKind):
    """A list of texts, which parts keep as it is published."""

    raw_fields = fields = (TEXTS_FIELD,)

    @classmethod
    def is_asked(cls, spec: JobSpec) -> bool:
        return spec.sampling.n > 1

    def read(self, output: Any) -> dict[str, Any]:
        return {TEXTS_FIELD.name: [completion.text for completion in output.outputs]}

    def fake(self, prompt: FakePrompt) -> dict[str, Any]:
        ids = prompt.token_ids
        prompts = [ids, *([*ids, -sample] for sample in range(1, self._spec.sampling.n))]
        texts = [fakes.fake_text(each, prompt.num_characters) for each in prompts]
        return {TEXTS_FIELD.name: texts}
