"""A whole job spec: its sections, and the rules between them."""

import hashlib
import json
import re
from collections.abc import Collection, Iterator
from functools import cached_property
from itertools import chain
from typing import Annotated, Any, Final, Literal, Self

from pydantic import AfterValidator, Field, model_validator

from batchllm_operator.secrets.finding import find_secrets
from batchllm_operator.spec import rounds
from batchllm_operator.spec.addresses import TableAddress
from batchllm_operator.spec.execution import EngineSpec, LimitsSpec, PlannerSpec
from batchllm_operator.spec.expect import Expectation, OnUnmet, unmet_faults
from batchllm_operator.spec.fields import Decides, Neutral, OfPlan, by_name
from batchllm_operator.spec.limits import check_values, shown
from batchllm_operator.spec.prompt import PromptSpec
from batchllm_operator.spec.question import OF_RUN, AnswerSpec, QuestionSpec
from batchllm_operator.spec.sections import (
    EmbeddingSpec,
    InputSpec,
    ModelSpec,
    OutputSpec,
    SamplingSpec,
)

SPEC_VERSION: Final = 1
_NO_PROMPT: Any = None  # of a job of several; each of its questions has one
_PROMPT_NAME: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,99}")


class JobSpec(AnswerSpec):
    """A job: rows of a table in, one answer for each row out."""

    spec_version: OfPlan[Literal[1]]
    """Version of this format; 1."""
    name: OfPlan[str] = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_\-]{0,99}$")
    """The job's name: letters, digits, `_` and `-`. Plans and reports are filed under it."""
    input: InputSpec
    """The table that the job reads."""
    prompt: PromptSpec = Field(default=_NO_PROMPT, exclude_if=lambda prompt: prompt is None)
    """How a row becomes a prompt; a job of several `prompts` has none."""
    prompts: OfPlan[Annotated[dict[str, QuestionSpec], AfterValidator(by_name)]] = Field(
        default_factory=dict, exclude_if=lambda prompts: not prompts
    )
    """In place of `prompt`: several, by name, all asked of each row. Each has the fields of
    `prompt`, and of `sampling`, `task`, `labels`, `label_values`, `calibrate`, `response_format`
    and `retry_invalid` its own. What prompts begin with alike is computed once for all. The answers
    are structs in output columns of the prompts' names. A template may place them, too:
    `{summary}` is the answer to that prompt, `{topic.probability}` a field of one, and the prompt
    is asked in a later round. `embed` and `pool` are for other jobs."""
    model: ModelSpec
    """The model that generates."""
    embedding: EmbeddingSpec = EmbeddingSpec()
    """The vectors of `embed`."""
    output: OutputSpec
    """The table that the job writes."""
    engine: EngineSpec = EngineSpec()
    """Settings of the inference engine."""
    planner: PlannerSpec = PlannerSpec()
    """How the work is cut."""
    limits: Neutral[LimitsSpec] = Field(default_factory=LimitsSpec)
    """What a run may use: all attempts of all workers, and of earlier rounds, together. A worker
    that sees a limit reached, fifteen seconds later at most, opens no further part of the output,
    finishes its open ones (for at most `run --drain-s`, if given) and ends with exit code 7.
    Raising the limit and planning again lets the next run go on."""
    on_empty: Neutral[Literal["fail", "commit"]] = "fail"
    """A partition that has no rows or isn't there: `fail` (exit code 3), or `commit` an empty
    partition."""
    max_failed_fraction: Neutral[float] = Field(default=0.05, ge=0.0, le=1.0)
    """If a larger share of the rows has an error instead of a text, no plan is made, a run stops,
    and the commit is refused. Raising it and planning again keeps what was generated."""
    expect: Neutral[Annotated[dict[str, Expectation], AfterValidator(by_name)]] = Field(
        default_factory=dict, exclude_if=lambda expect: not expect
    )
    """What must hold of the answers, by output column (`prompt.column` of several prompts). Where
    it doesn't, see `on_unmet`. All but the shares of `status` are of rows whose `status` is `ok` or
    `cut_off`."""
    on_unmet: Neutral[OnUnmet] = Field(default="fail", exclude_if=lambda value: value == "fail")
    """Where `expect` doesn't hold, `commit` publishes nothing and keeps what was generated (`fail`,
    exit code 4); publishes all but the rows at fault, which go to a table beside the output, named
    like it with `_quarantine` behind (`quarantine`; at most `max_failed_fraction` of the rows); or
    fails, with the answers on a branch of the Iceberg table (`branch`). `commit --accept`
    publishes."""
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

    def _faults(self) -> Iterator[str]:
        if (self.prompt is None) == (not self.prompts):
            yield "prompt: is missing, and required, or several prompts; not both"
            return
        if self.prompts:
            yield from self._prompts_faults()
        else:
            yield from _task_faults(self, (self.input.partition_column, *self.kept_columns))
        columns = [("input.key", column) for column in self.input.key]
        columns += [("output.carry", column) for column in self.carried]
        for field, column in columns:
            if column in (*self.output_columns, "error"):
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
        if self.reuse_outputs and not all(each.sampling.is_greedy for each in self.questions):
            yield (
                "reuse_outputs needs greedy sampling (sampling.temperature: 0): a sampled text is"
                " one of many, and reusing it would sample once for all days"
            )
        names = [*self.output_columns, *self.kept_columns]
        statuses = [f"{prompt}.status" for prompt in self.prompts] or ["status"]
        output = TableAddress.parse(self.output.uri)
        yield from unmet_faults(self.on_unmet, self.expect, output, names, statuses)
        if self.planner.runahead == "on" and (reason := self.reason_against_chains):
            yield f"planner.runahead is on, but {reason}"

    def _prompts_faults(self) -> Iterator[str]:
        for name, field in AnswerSpec.model_fields.items():
            if getattr(self, name) != field.get_default(call_default_factory=True):
                yield f"{name}: each of prompts has its own; give it there"
        if len(set(map(str.casefold, self.prompts))) < len(self.prompts):
            yield "prompts: two names differ by case only, which few readers tell apart"
        for (name, section), asked in zip(self.prompts.items(), self.questions, strict=True):
            where = f"prompts.{shown(name)}"
            if not _PROMPT_NAME.fullmatch(name):
                yield (
                    f"{where}: its name must be letters, digits and _, at most 100 of them, no"
                    " digit first: a column has it"
                )
            if name in (*OF_RUN, self.input.partition_column):
                yield f"{where}: is the name of another column of the output; choose another"
            if section.fields is not None:
                yield f"{where}.fields: is for a job of one prompt"
            if section.task in ("embed", "pool"):
                yield (
                    f"{where}.task: {section.task} takes an engine of its own; give it a job of its"
                    " own"
                )
            yield from (f"{where}.{fault}" for fault in _task_faults(asked, ()))
        columns = {
            n: each.answer_columns for n, each in zip(self.prompts, self.questions, strict=True)
        }
        yield from rounds.faults_of(self.prompts, columns)

    @property
    def questions(self) -> tuple[Self, ...]:
        """What is asked of each row: for each of `prompts` the job that would ask it alone, by
        name; of a job with `prompt`, the job.

        An *ask* is a row and a question: number row_idx * len(questions) + question.
        """
        return self._alone if self.prompts else (self,)

    @cached_property
    def _alone(self) -> tuple[Self, ...]:
        alone = (question.alone for question in self.prompts.values())
        return tuple(self.model_copy(update={"prompts": {}, **fields}) for fields in alone)

    def __copy__(self) -> Self:
        """For `model_copy`, which changes fields: without what is cached of them."""
        copied = super().__copy__()
        copied.__dict__.pop("_alone", None)
        return copied

    @property
    def rounds(self) -> tuple[tuple[int, ...], ...]:
        """Questions by the round in which they are asked; a later one needs answers of earlier
        rounds."""
        if not self.prompts:
            return ((0,),)
        numbers = {name: number for number, name in enumerate(self.prompts)}
        return tuple(tuple(numbers[n] for n in names) for names in rounds.rounds_of(self.prompts))

    @property
    def unit(self) -> str:
        """What is counted: rows or, with several prompts, answers."""
        return "answer" if self.prompts else "row"

    @property
    def keeps_fingerprints(self) -> bool:
        """Whether a plan stores a digest of each prompt."""
        return self.reuse_outputs or bool(self.prompts)

    @property
    def prompt_fields(self) -> tuple[str, ...]:
        """The field that has each question's prompt."""
        return tuple(f"prompts.{name}" for name in self.prompts) or ("prompt",)

    @property
    def identity(self) -> str:
        """SHA-256 (hex) of all settings that decide the plan; see `OfPlan`."""
        return self.identity_until(len(self.rounds))

    def identity_until(self, num_rounds: int) -> str:
        """The same of the plans of the first rounds: of later prompts only the names, and those of
        columns that not every job has, which parts may have."""
        settings, later = self.settings(Decides.PLAN), sum(self.rounds[num_rounds:], ())
        for number, (name, prompt) in enumerate(self.prompts.items()):
            if number in later:
                settings["prompts"][name] = list(prompt.own_columns())
        text = json.dumps(settings, sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(text.encode()).hexdigest()

    @property
    def output_columns(self) -> tuple[str, ...]:
        """Columns that the job itself writes, in their order; keys and carried columns may not use
        these names."""
        return (*(tuple(self.prompts) or self.answer_columns), *OF_RUN)

    @property
    def answer_columns(self) -> tuple[str, ...]:
        """Columns of the answers to a question; of several, fields of the prompt's column."""
        return self.columns_of_answers(reasons=self.model.reasoning_parser is not None)

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
        columns = [*self.kept_columns.values(), *chain.from_iterable(self.answer_sources.values())]
        columns += self.planner.estimate_columns
        if self.model.adapter_column is not None:
            columns.append(self.model.adapter_column)
        return tuple(dict.fromkeys(columns))

    @property
    def answer_sources(self) -> dict[str, tuple[str, ...]]:
        """Input columns in the prompts, by the output column that has the answers to them."""
        if self.prompts:
            return rounds.sources_of(self.prompts)
        return dict.fromkeys(self.answer_columns, self.prompt.columns)

    @property
    def reason_against_chains(self) -> str | None:
        """The setting that keeps replicas from computing a prefix together, or None."""
        if self.model.adapters:
            return "model.adapters: a chain computes prefixes without an adapter"
        if self.is_pooled:
            return f"task {self.task}: a chain is for models that generate"
        return self.engine.reason_against_chains


def _task_faults(spec: JobSpec, kept: Collection[str]) -> Iterator[str]:
    """The fields that don't go with the task; `kept` are columns beside those of the answers."""
    if spec.task == "classify":
        yield from spec.classify_faults()
    elif spec.labels or spec.label_values or spec.calibrate:
        yield "labels, label_values and calibrate are for task: classify"
    if spec.model.reasoning_parser is not None and (spec.task != "generate" or spec.sampling.n > 1):
        yield (
            "model.reasoning_parser: takes one text a row apart, so it is for task: generate with"
            " sampling.n: 1"
        )
    if spec.response_format is not None:
        yield from spec.faults_of_form(kept, reasons=spec.model.reasoning_parser is not None)
    if spec.retry_invalid and (spec.response_format is None or spec.sampling.is_greedy):
        yield (
            "retry_invalid: needs a response_format, and a sampling.temperature above 0 (greedy"
            " sampling would give the same answer again)"
        )
    if spec.request is not None and (spec.task != "generate" or spec.response_format is not None):
        yield "request: is for task: generate, and has a response_format of its own"
    if spec.input.on_null == "empty" and spec.prompt.messages is not None:
        yield "input.on_null: prompt.messages has no empty text; write reject or skip"
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
