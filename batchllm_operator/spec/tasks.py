"""What a job asks of the model: the rules of each task, and the columns that its answers fill."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Final, Literal

from pydantic import AfterValidator, BeforeValidator

from batchllm_operator.spec.fields import NonEmpty, by_name
from batchllm_operator.spec.limits import shown
from batchllm_operator.spec.response_format import JsonSchemaFormat
from batchllm_operator.spec.sections import EmbeddingSpec, SamplingSpec

if TYPE_CHECKING:
    from batchllm_operator.spec.model import JobSpec

Task = Literal["generate", "classify", "embed", "pool"]
INVALID_OUTPUT: Final = "invalid_output"
"""The kind of the row error of an answer that can't be used."""
MAX_LABELS: Final = 128
"""As many as vLLM gives the log-probabilities of."""
_AFTER: Final = (
    *("finish_reason", "num_prompt_tokens", "num_cached_tokens", "num_output_tokens"),
    *("status", "error", "model", "run_id"),
)
_OF_TEXTS: Final = frozenset({"generated_text", "finish_reason", "num_output_tokens"})
"""Columns that a vector hasn't."""


def _as_labels(value: object) -> object:
    """A list of labels is a mapping of each to itself."""
    if isinstance(value, list | tuple):
        if len(set(map(str, value))) < len(value):
            raise ValueError("names a label twice")
        return {label: label for label in value}
    return value


Labels = Annotated[
    dict[NonEmpty, NonEmpty],
    AfterValidator(by_name),
    BeforeValidator(_as_labels, json_schema_input_type=dict[str, str] | tuple[str, ...]),
]


def fill_task(data: dict[str, object]) -> dict[str, object]:
    """The fields of a spec, with what its task implies: one token (the least that a spec can say)
    unless it generates; of `classify`, labels."""
    if data.get("task") not in ("classify", "embed", "pool"):
        return data
    values = data.get("label_values")
    implied: dict[str, object] = {"sampling": {"max_tokens": 1}}
    if data["task"] == "classify" and isinstance(values, dict):
        implied["labels"] = list(values)
    return implied | data


def task_faults(spec: JobSpec) -> Iterator[str]:
    """The fields that don't go with the task."""
    if spec.task == "classify":
        yield from _of_classify(spec)
    elif spec.labels or spec.label_values or spec.calibrate:
        yield "labels, label_values and calibrate are for task: classify"
    if spec.model.reasoning_parser is not None and (spec.task != "generate" or spec.sampling.n > 1):
        yield (
            "model.reasoning_parser: takes one text a row apart, so it is for task: generate with"
            " sampling.n: 1"
        )
    if spec.response_format is not None:
        yield from _of_response_format(spec)
    if spec.retry_invalid and (spec.response_format is None or spec.sampling.is_greedy):
        yield (
            "retry_invalid: needs a response_format, and a sampling.temperature above 0 (greedy"
            " sampling would give the same answer again)"
        )
    if spec.task != "embed" and spec.embedding != EmbeddingSpec():
        yield "embedding is for task: embed"
    if not spec.is_pooled:
        return
    if spec.sampling != SamplingSpec(max_tokens=1):
        yield f"sampling: task {spec.task} generates no tokens; leave sampling out"
    if spec.prompt.answer_prefix is not None:
        yield f"prompt.answer_prefix: task {spec.task} has no answer that it can begin"
    if spec.planner.estimated_output_tokens is not None:
        yield (
            f"planner.estimated_output_tokens: task {spec.task} generates no tokens; leave it out"
        )


def _of_classify(spec: JobSpec) -> Iterator[str]:
    if not 2 <= len(spec.labels) <= MAX_LABELS:
        yield f"labels: task classify needs from 2 to {MAX_LABELS}"
    if len(set(spec.labels.values())) < len(spec.labels):
        yield "labels: two of them have the same answer"
    if len(set(map(str.casefold, spec.labels))) < len(spec.labels):
        yield "labels: two of them differ by case only, which few readers tell apart"
    if spec.label_values and set(spec.label_values) != set(spec.labels):
        yield "label_values: must have a number for each of labels, and no others"
    if spec.sampling != SamplingSpec(max_tokens=1):
        yield ("sampling: task classify reads the probabilities of one token; leave sampling out")


def _of_response_format(spec: JobSpec) -> Iterator[str]:
    if spec.task != "generate":
        yield "response_format: is for task: generate"
    if spec.sampling.n > 1:
        yield "response_format: is for one answer a row, so leave out sampling.n"
    if not isinstance(spec.response_format, JsonSchemaFormat):
        return
    others = ("generated_text", *_answer_columns(spec), *_AFTER)
    kept = (spec.input.partition_column, *spec.kept_columns)
    taken = {name.casefold() for name in (*others, *kept)}
    for name in spec.response_format.columns:
        if not name:
            yield "response_format: a property has an empty name; set prefix_columns"
        if name.casefold() in taken:
            yield (
                f"response_format: there is another column {shown(name)!r} (names that differ by"
                " case only are the same to many readers); set prefix_columns, such as answer_,"
                " or rename the property"
            )
        taken.add(name.casefold())


def output_columns(spec: JobSpec) -> tuple[str, ...]:
    """Columns that the job itself writes, in their order."""
    form = spec.response_format
    properties = form.columns if isinstance(form, JsonSchemaFormat) else ()
    columns = ("generated_text", *properties, *_answer_columns(spec), *_AFTER)
    return tuple(name for name in columns if not (spec.is_pooled and name in _OF_TEXTS))


def _answer_columns(spec: JobSpec) -> Iterator[str]:
    """Those that not every job has."""
    if spec.task == "classify":
        yield from ("label", "probability", "probabilities", "logit_margin", "label_mass")
        if spec.calibrate:
            yield "raw_probabilities"
        if spec.label_values:
            yield "score"
    if spec.task == "embed":
        yield "embedding"
    if spec.task == "pool":
        yield "scores"
    if spec.sampling.n > 1:
        yield "generated_texts"
    if spec.model.reasoning_parser is not None:
        yield "reasoning"
    if spec.sampling.logprobs is not None:
        yield from ("mean_logprob", "token_logprobs")
        if spec.sampling.logprobs:
            yield "top_logprobs"
