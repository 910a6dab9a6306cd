"""A whole job spec: its sections, and the rules between them."""

import hashlib
import json
from collections.abc import Iterator
from typing import Annotated, Final, Literal

from pydantic import AfterValidator, BeforeValidator, Field, model_validator

from batchllm_operator.secrets.finding import find_secrets
from batchllm_operator.spec.execution import EngineSpec, PlannerSpec
from batchllm_operator.spec.fields import (
    Decides,
    Neutral,
    NonEmpty,
    OfOutput,
    OfPlan,
    Section,
    by_name,
)
from batchllm_operator.spec.limits import check_values, shown
from batchllm_operator.spec.prompt import PromptSpec
from batchllm_operator.spec.response_format import JsonSchemaFormat, ResponseFormat
from batchllm_operator.spec.sections import (
    EmbeddingSpec,
    InputSpec,
    ModelSpec,
    OutputSpec,
    Sampling,
    SamplingSpec,
)

SPEC_VERSION: Final = 1
Task = Literal["generate", "classify", "embed", "pool"]
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


class JobSpec(Section):
    """A job: rows of a table in, one answer for each row out."""

    spec_version: OfPlan[Literal[1]]
    """Version of this format; 1."""
    name: OfPlan[str] = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_\-]{0,99}$")
    """The job's name: letters, digits, `_` and `-`. Plans and reports are filed under it."""
    input: InputSpec
    """The table that the job reads."""
    prompt: PromptSpec
    """How a row becomes a prompt."""
    model: ModelSpec
    """The model that generates."""
    sampling: Sampling = SamplingSpec()
    """How tokens are chosen; greedy by default. `model` in place of fields: as the model suggests
    it, see `from_model`."""
    task: OfOutput[Task] = "generate"
    """`generate` a text, or an answer without decoding: `classify`, which chooses one of `labels`
    by the probabilities of their answers, one token each; `embed`, a vector for each
    row; or `pool`, the scores of a model with a classification or reward head. `sampling` is left
    out then."""
    labels: OfOutput[Labels] = Field(default_factory=dict)
    """Labels of `classify`: a list, or a mapping of each label to the text with which the model
    would answer (such as `" yes"`, with a space, after a prompt that ends without one). From 2 to
    128, whose answers are different tokens. Output columns have them by name."""
    label_values: OfPlan[dict[NonEmpty, float]] = Field(default_factory=dict)
    """A number for each label: the output column `score` is their mean, weighted by the labels'
    probabilities. Without `labels`, its names are the labels."""
    calibrate: OfPlan[Literal["prior"] | None] = None
    """`prior` takes out what the model prefers whatever the text is: commit divides each row's
    probabilities of the labels by their means over the table, and scales them to add up to 1
    (batch calibration, Zhou et al. 2023, https://arxiv.org/abs/2309.17249). The model's own are in
    `raw_probabilities`. It moves labels towards equal shares: not for tables where one label is
    truly rare, or for few rows."""
    response_format: OfOutput[ResponseFormat | None] = None
    """The form of the answers, which the engine enforces as it generates: `json_schema`, whose
    properties become columns; `choice`, one of some texts; or `regex`. An answer without it (cut
    off by `max_tokens`) is a row error, `invalid_output`, and its text is kept."""
    retry_invalid: OfPlan[int] = Field(default=0, ge=0, le=10)
    """How often a row is generated again, with another seed, while its answer is `invalid_output`.
    Needs a `response_format`, and a `temperature` above 0."""
    embedding: EmbeddingSpec = EmbeddingSpec()
    """The vectors of `embed`."""
    output: OutputSpec
    """The table that the job writes."""
    engine: EngineSpec = EngineSpec()
    """Settings of the inference engine."""
    planner: PlannerSpec = PlannerSpec()
    """How the work is cut."""
    on_empty: Neutral[Literal["fail", "commit"]] = "fail"
    """A partition that has no rows or isn't there: `fail` (exit code 3), or `commit` an empty
    partition."""
    max_failed_fraction: Neutral[float] = Field(default=0.05, ge=0.0, le=1.0)
    """If a larger share of the rows has an error instead of a text, no plan is made, a run stops,
    and the commit is refused. Raising it and planning again keeps what was generated."""
    reuse_outputs: OfPlan[bool] = False
    """Take outputs from what the job has committed before, where a row's prompt, the model and the
    sampling are the same: from the partition itself, or the latest before it (by name). Only with
    greedy sampling."""

    @model_validator(mode="before")
    @classmethod
    def _check_values(cls, data: object) -> object:
        check_values(data)
        for where in find_secrets(data):
            raise ValueError(
                f"{shown(where)} looks like a secret; specs are stored with every plan, so take"
                " credentials from the environment or an Airflow connection instead"
            )
        return data

    @model_validator(mode="before")
    @classmethod
    def _fill_task(cls, data: object) -> object:
        """Add what a task implies: one token (the least that a spec can say) unless it generates;
        of `classify`, labels."""
        if not isinstance(data, dict) or data.get("task") not in ("classify", "embed", "pool"):
            return data
        values = data.get("label_values")
        implied: dict[str, object] = {"sampling": {"max_tokens": 1}}
        if data["task"] == "classify" and isinstance(values, dict):
            implied["labels"] = list(values)
        return implied | data

    def _faults(self) -> Iterator[str]:
        yield from _task_faults(self)
        columns = [("input.key", column) for column in self.input.key]
        columns += [("output.carry", column) for column in self.carried]
        for field, column in columns:
            if column in self.output_columns:
                new = "rename it in a view of the input"
                if field == "output.carry":
                    new = f"give it another name there, such as {{{column}: source_{column}}}"
                yield (
                    f"{field}: column {column!r} can't be a key or carried over: the job writes a"
                    f" column of that name; {new}"
                )
            if column == self.input.partition_column:
                yield (
                    f"{field}: column {column!r} is the partition column, which is always kept;"
                    " leave it out"
                )
        sources = dict(zip(self.input.key, self.input.key, strict=True))
        for source, name in zip(self.output.carry, self.carried, strict=True):
            if sources.setdefault(name, source) != source:
                yield f"output.carry: two columns of the output would be named {shown(name)!r}"
        if self.reuse_outputs and not self.sampling.is_greedy:
            yield (
                "reuse_outputs needs greedy sampling (sampling.temperature: 0): a sampled text is"
                " one of many, and reusing it would sample once for all days"
            )
        if self.planner.runahead == "on" and (reason := self.reason_against_chains):
            yield f"planner.runahead is on, but {reason}"

    @property
    def identity(self) -> str:
        """SHA-256 (hex) of all settings that decide the plan; see `OfPlan`."""
        settings = json.dumps(self.settings(Decides.PLAN), sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(settings.encode()).hexdigest()

    @property
    def is_pooled(self) -> bool:
        """Whether the answer is a vector of the prompt, and no token is generated."""
        return self.task in ("embed", "pool")

    @property
    def output_columns(self) -> tuple[str, ...]:
        """Columns that the job itself writes, in their order; keys and carried columns may not use
        these names."""
        form = self.response_format
        properties = form.columns if isinstance(form, JsonSchemaFormat) else ()
        columns = ("generated_text", *properties, *_answer_columns(self), *_AFTER)
        return tuple(name for name in columns if not (self.is_pooled and name in _OF_TEXTS))

    @property
    def ends_answers(self) -> bool:
        """Whether the model ends its answers, so that one that a limit ends lacks a part.

        In a form (`response_format`) an answer is whole, or invalid.
        """
        is_free = self.task == "generate" and self.response_format is None
        return is_free and not self.sampling.ignore_eos

    @property
    def decodes(self) -> bool:
        """Whether answers take steps after the one that ends prefill, which gives a token too."""
        return self.task == "generate"

    @property
    def carried(self) -> tuple[str, ...]:
        """Names in the output of the columns that are carried over."""
        carry = self.output.carry
        return tuple(carry.values() if isinstance(carry, dict) else carry)

    @property
    def kept_columns(self) -> dict[str, str]:
        """Input columns in the output table, by their names there, the key first."""
        names = (*self.input.key, *self.carried)
        return dict(zip(names, (*self.input.key, *self.output.carry), strict=True))

    @property
    def input_columns(self) -> tuple[str, ...]:
        """Distinct input columns that the job reads; the partition column only if it is used."""
        columns = [*self.kept_columns.values(), *self.prompt.columns]
        columns += self.planner.estimate_columns
        if self.model.adapter_column is not None:
            columns.append(self.model.adapter_column)
        return tuple(dict.fromkeys(columns))

    @property
    def reason_against_chains(self) -> str | None:
        """The setting that keeps replicas from computing a prefix together, or None."""
        if self.model.adapters:
            return "model.adapters: a chain computes prefixes without an adapter"
        if self.is_pooled:
            return f"task {self.task}: a chain is for models that generate"
        return self.engine.reason_against_chains


def _task_faults(spec: JobSpec) -> Iterator[str]:
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
