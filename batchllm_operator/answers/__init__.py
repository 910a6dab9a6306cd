"""Kinds of answers: what the engine gives, the columns that it becomes, and what can't be used."""

from batchllm_operator.answers.answers import Answers, plan_answers, raw_fields
from batchllm_operator.answers.kind import NOTHING_PLANNED, FakePrompt, PlannedAnswers

__all__ = [
    "NOTHING_PLANNED",
    "Answers",
    "FakePrompt",
    "PlannedAnswers",
    "plan_answers",
    "raw_fields",
]
