"""Kinds of answers: what the engine gives, the columns that it becomes, and what can't be used."""

from batchllm_operator.answers.answers import Answers as Answers
from batchllm_operator.answers.answers import plan_answers as plan_answers
from batchllm_operator.answers.answers import raw_fields as raw_fields
from batchllm_operator.answers.kind import NOTHING_PLANNED as NOTHING_PLANNED
from batchllm_operator.answers.kind import FakePrompt as FakePrompt
from batchllm_operator.answers.kind import PlannedAnswers as PlannedAnswers
