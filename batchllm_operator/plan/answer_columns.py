"""Checks of the form that a job's answers must have, before anything is generated."""

from __future__ import annotations

from batchllm_operator.answers import Answers
from batchllm_operator.engine import check_format
from batchllm_operator.errors import SpecError, TableError
from batchllm_operator.lake import LakeTable, check_names
from batchllm_operator.spec import JobSpec


def check_response_format(spec: JobSpec, output: LakeTable) -> None:
    """Check that a schema's properties can be columns of the output, and that the engine takes it.

    Raises:
        SpecError: names the property, or gives vLLM's reason.
    """
    if spec.response_format is None:
        return
    try:
        check_names(f"table {output.uri}", Answers.of(spec).fields, output.forbidden_in_names)
    except TableError as error:
        raise SpecError(f"response_format: {error}") from error
    check_format(spec)
