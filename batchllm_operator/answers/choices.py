"""Answers that are one of some texts, or match a pattern."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from batchllm_operator.answers import fakes
from batchllm_operator.answers.kind import AnswerKind, FakePrompt, PlannedAnswers
from batchllm_operator.row_error import RowError
from batchllm_operator.spec import ChoiceFormat, JobSpec, RegexFormat, matcher
from batchllm_operator.spec.tasks import INVALID_OUTPUT


class ChoiceAnswers(AnswerKind):
    """Texts in a form that has no columns of its own."""

    def __init__(self, spec: JobSpec, planned: PlannedAnswers) -> None:
        super().__init__(spec, planned)
        form = spec.response_format
        assert isinstance(form, ChoiceFormat | RegexFormat)
        self._form = form
        self._fits: Callable[[str], object]
        if isinstance(form, ChoiceFormat):
            self.counted = ("generated_text",)
            self._fits, self._reason = frozenset(form.choices).__contains__, "isn't a choice"
        else:
            self._fits = matcher(form.regex, whole=True)
            self._reason = "doesn't match the regex"

    @classmethod
    def is_asked(cls, spec: JobSpec) -> bool:
        return isinstance(spec.response_format, ChoiceFormat | RegexFormat)

    def fault(self, text: str, raw: Mapping[str, Any]) -> RowError | None:
        return None if self._fits(text) else RowError(INVALID_OUTPUT, self._reason)

    def fake_text(self, prompt: FakePrompt) -> str:
        """One of the choices; of a regex, digits."""
        digest = fakes.digest_of(prompt.token_ids)
        text = str(digest)
        if isinstance(self._form, ChoiceFormat):
            text = self._form.choices[digest % len(self._form.choices)]
        return fakes.cut(text) if prompt.is_invalid else text
