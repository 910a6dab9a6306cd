"""What the engine says of a request, and the columns that the output table gets of it."""

from batchllm_operator.answers.answers import Answers

__all__ = ["Answers"]
