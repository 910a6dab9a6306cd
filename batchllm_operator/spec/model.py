"""A whole job spec: its sections, and the rules between them."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from typing import Final, Literal

from pydantic import Field, model_validator

from batchllm_operator.secrets.finding import find_secrets
from batchllm_operator.spec.execution import EngineSpec, PlannerSpec
from batchllm_operator.spec.fields import Decides, Neutral, NonEmpty, OfOutput, OfPlan, Section
from batchllm_operator.spec.limits import check_values, shown
from batchllm_operator.spec.prompt import PromptSpec
from batchllm_operator.spec.response_format import ResponseFormat
from batchllm_operator.spec.sections import (
    EmbeddingSpec,
    InputSpec,
    ModelSpec,
    OutputSpec,
    Sampling,
    SamplingSpec,
)
from batchllm_operator.spec.tasks import (
    Labels,
    Task,
    fill_task,
    output_columns,
    task_faults,
)

SPEC_VERSION: Final = 1
MAX_RETRIES: Final = 10


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
    retry_invalid: OfPlan[int] = Field(default=0, ge=0, le=MAX_RETRIES)
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
        return fill_task(data) if isinstance(data, dict) else data

    def _faults(self) -> Iterator[str]:
        yield from task_faults(self)
        columns = [("input.key", column) for column in self.input.key]
        columns += [("output.carry", column) for column in self.output.carry]
        for field, column in columns:
            if column in self.output_columns:
                yield (
                    f"{field}: column {column!r} can't be a key or carried over: the job writes a"
                    " column of that name; rename it in a view of the input"
                )
            if column == self.input.partition_column:
                yield (
                    f"{field}: column {column!r} is the partition column, which is always kept;"
                    " leave it out"
                )
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
        return output_columns(self)

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
    def kept_columns(self) -> tuple[str, ...]:
        """Input columns in the output table, the key first, without duplicates."""
        return tuple(dict.fromkeys((*self.input.key, *self.output.carry)))

    @property
    def input_columns(self) -> tuple[str, ...]:
        """Distinct input columns that the job reads; the partition column only if it is used."""
        columns = [*self.kept_columns, *self.prompt.columns, *self.planner.estimate_columns]
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
