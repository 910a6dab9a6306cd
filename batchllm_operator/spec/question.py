"""How a prompt is answered: of a job, or of each of its prompts."""

from collections.abc import Iterator
from typing import Annotated, Final, Literal

from pydantic import AfterValidator, BeforeValidator, Field, model_validator

from batchllm_operator.spec.conditions import Conditions
from batchllm_operator.spec.fields import NonEmpty, OfOutput, OfPlan, Section, by_name
from batchllm_operator.spec.prompt import PromptSpec
from batchllm_operator.spec.response_format import ResponseFormat
from batchllm_operator.spec.sections import Sampling, SamplingSpec

Task = Literal["generate", "classify", "embed", "pool"]
MAX_LABELS: Final = 128
"""As many as vLLM gives the log-probabilities of."""


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
