"""How a prompt is answered: of a job, or of each of its prompts."""

from collections.abc import Collection, Iterator
from typing import Annotated, Final, Literal

from pydantic import AfterValidator, BeforeValidator, Field, model_validator

from batchllm_operator.spec.conditions import Conditions
from batchllm_operator.spec.fields import NonEmpty, OfOutput, OfPlan, Section, by_name
from batchllm_operator.spec.limits import shown
from batchllm_operator.spec.prompt import PromptSpec
from batchllm_operator.spec.response_format import JsonSchemaFormat, ResponseFormat
from batchllm_operator.spec.sections import Sampling, SamplingSpec

Task = Literal["generate", "classify", "embed", "pool"]
MAX_LABELS: Final = 128
"""As many as vLLM gives the log-probabilities of."""
OF_RUN: Final = ("model", "run_id")
"""Columns of the output table that are no answer's."""
_AFTER: Final = (
    *("finish_reason", "num_prompt_tokens", "num_cached_tokens", "num_output_tokens"),
    *("status", "error"),
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


class AnswerSpec(Section):
    """How a prompt is answered."""

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
    request: OfOutput[NonEmpty | None] = None
    """Parameters of a request to OpenAI's API, as JSON text with its `url`, which replace what
    `sampling` says of them; the column `response` is the body of its answer. `batchllm run-batch`
    sets it."""

    @property
    def answer_column(self) -> str:
        """The column that is the answer itself."""
        return "label" if self.task == "classify" else "generated_text"

    def columns_of_answers(self, *, reasons: bool) -> tuple[str, ...]:
        """Columns of the answers, in their order; `reasons` if the model's reasoning has one."""
        form = self.response_format
        properties = form.columns if isinstance(form, JsonSchemaFormat) else ()
        columns = ("generated_text", *properties, *self.own_columns(reasons=reasons), *_AFTER)
        return tuple(name for name in columns if not (self.is_pooled and name in _OF_TEXTS))

    def own_columns(self, *, reasons: bool = False) -> Iterator[str]:
        """Those that not every answer has, without a form's properties."""
        if self.task == "classify":
            yield from ("label", "probability", "probabilities", "logit_margin", "label_mass")
            if self.calibrate:
                yield "raw_probabilities"
            if self.label_values:
                yield "score"
        if self.task == "embed":
            yield "embedding"
        if self.task == "pool":
            yield "scores"
        if self.sampling.n > 1:
            yield "generated_texts"
        if reasons:
            yield "reasoning"
        if self.request is not None:
            yield "response"
        if self.sampling.logprobs is not None:
            yield from ("mean_logprob", "token_logprobs")
            if self.sampling.logprobs:
                yield "top_logprobs"

    @property
    def is_pooled(self) -> bool:
        """Whether the answer is a vector of the prompt, and no token is generated."""
        return self.task in ("embed", "pool")

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

    def classify_faults(self) -> Iterator[str]:
        """What is wrong with the fields of task classify."""
        if not 2 <= len(self.labels) <= MAX_LABELS:
            yield f"labels: task classify needs from 2 to {MAX_LABELS}"
        if len(set(self.labels.values())) < len(self.labels):
            yield "labels: two of them have the same answer"
        if len(set(map(str.casefold, self.labels))) < len(self.labels):
            yield "labels: two of them differ by case only, which few readers tell apart"
        if self.label_values and set(self.label_values) != set(self.labels):
            yield "label_values: must have a number for each of labels, and no others"
        if self.sampling != SamplingSpec(max_tokens=1):
            yield "sampling: task classify reads one token's probabilities; leave sampling out"

    def faults_of_form(self, kept: Collection[str], *, reasons: bool) -> Iterator[str]:
        """What is wrong with `response_format`; `kept` are columns beside those of the answers."""
        if self.task != "generate":
            yield "response_format: is for task: generate"
        if self.sampling.n > 1:
            yield "response_format: is for one answer a row, so leave out sampling.n"
        if not isinstance(self.response_format, JsonSchemaFormat):
            return
        others = ("generated_text", *self.own_columns(reasons=reasons), *_AFTER, *OF_RUN, *kept)
        taken = set(map(str.casefold, others))
        for name in self.response_format.columns:
            if not name:
                yield "response_format: a property has an empty name; set prefix_columns"
            if name.casefold() in taken:
                yield (
                    f"response_format: there is another column {shown(name)!r} (names that differ"
                    " by case only are the same to many readers); set prefix_columns, such as"
                    " answer_, or rename the property"
                )
            taken.add(name.casefold())

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


class QuestionSpec(PromptSpec, AnswerSpec):
    """One of several prompts: how a row becomes it, and how it is answered."""

    when: OfPlan[Conditions] = ()
    """Of which rows it is asked, in the form of `input.filter`: by columns of the input, and by
    answers to other prompts, such as `"topic == 'sport' and topic.probability > 0.5"`. Of other
    rows its `status` is `skipped`; so it is where an answer that it needs has failed."""

    @property
    def alone(self) -> dict[str, object]:
        """Fields of a job that would ask it alone."""
        prompt = {name: getattr(self, name) for name in PromptSpec.model_fields}
        answer = {name: getattr(self, name) for name in AnswerSpec.model_fields}
        return {"prompt": PromptSpec.model_construct(**prompt), **answer}
