"""The sections of a job spec: input, model, sampling, output."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import datetime
from typing import Annotated, Any, Final, Literal
from zoneinfo import available_timezones

from pydantic import (
    AfterValidator,
    BeforeValidator,
    ByteSize,
    Field,
    SerializerFunctionWrapHandler,
    model_serializer,
)

from batchllm_operator.errors import SpecError
from batchllm_operator.spec.addresses import ModelPath, StagingUri, TableAddress, TableUri
from batchllm_operator.spec.conditions import Conditions
from batchllm_operator.spec.fields import (
    MAX_BYTES,
    MAX_COUNT,
    Count,
    Int64,
    Neutral,
    NonEmpty,
    OfOutput,
    OfPlan,
    Section,
    by_name,
    distinct,
)

TARGET_FILE_BYTES: Final = 512 << 20


def _as_list(value: object) -> object:
    if not isinstance(value, str | list | tuple):
        raise ValueError("must be text or a list of texts")
    return [value] if isinstance(value, str) else value


def _as_sampling(value: object) -> object:
    if isinstance(value, str) and value != "model":
        raise ValueError("must be model, which takes what the model suggests, or a section")
    return {"from_model": True} if value == "model" else value


MAX_SAMPLES: Final = 1024
MAX_LOGPROBS: Final = 20
"""As many as vLLM gives by default."""
_LIST: Final = BeforeValidator(_as_list, json_schema_input_type=str | tuple[str, ...])
Columns = Annotated[tuple[str, ...], _LIST]


def _known_zone(name: str) -> str:
    if name not in available_timezones():
        raise ValueError("isn't an IANA time zone that this machine knows")
    return name


def _as_carried(value: object) -> object:
    names = list(value) if isinstance(value, list | tuple | dict) else [value]
    texts = [*names, *(value.values() if isinstance(value, dict) else ())]
    if not all(isinstance(text, str) and text for text in texts):
        raise ValueError("must be a name, a list of names, or a mapping of names to names")
    return by_name(value) if isinstance(value, dict) else names


Carried = Annotated[
    tuple[str, ...] | dict[str, str],
    BeforeValidator(_as_carried, json_schema_input_type=str | tuple[str, ...] | dict[str, str]),
]
Adapters = Annotated[dict[NonEmpty, ModelPath], AfterValidator(by_name)]


class InputSpec(Section):
    """The table that the job reads."""

    uri: OfPlan[TableUri]
    """The table's address. A local path (relative to the spec file) or an address in a store
    (`s3://bucket/table`, `gs://bucket/table`, `az://container/table`,
    `abfss://container@account.dfs.core.windows.net/table`) is a Parquet dataset, or the Delta table
    that lies there; `delta+` before it insists on Delta.
    `iceberg://CATALOG/NAMESPACE.TABLE` is an Iceberg table of a catalog that pyiceberg's own
    configuration (`PYICEBERG_CATALOG__*`, `.pyiceberg.yaml`) says how to reach."""
    partition_column: OfPlan[str] = Field(default="ds", min_length=1)
    """Column that `--ds` selects a value of: of Parquet, a Hive-style folder
    (`uri/ds=2026-01-31/...`)."""
    partition: OfPlan[Annotated[dict[NonEmpty, NonEmpty], AfterValidator(by_name)]] = Field(
        default_factory=dict
    )
    """Where several columns, or times, name the input's partitions, what each holds: a text where
    Python's `strftime` puts parts of `--ds`, a date or time: `{year: "%Y", month: "%m", day: "%d"}`
    (`%-m` without zeros), or a constant. `partition_column` is the output's alone then."""
    partition_timezone: OfPlan[Annotated[str, AfterValidator(_known_zone)] | None] = None
    """IANA name of the time zone, such as `Europe/Berlin`, in which a day of an Iceberg table's
    timestamps begins; without it days are those of UTC. Times without a zone count as UTC."""
    key: OfPlan[Annotated[Columns, Field(min_length=1), distinct("column")]]
    """Column, or list of columns, that identifies a row within the partition."""
    filter: OfPlan[Conditions] = ()
    """What a row must meet to take part, as text (`"language == 'nl' and (votes > 3 or votes is
    null)"`) or as a list of conditions, which must all hold."""
    on_null: OfPlan[Literal["reject", "skip", "empty"]] = Field(
        default="reject", exclude_if=lambda value: value == "reject"
    )
    """A row with null in a column of its prompt fails (`reject`), isn't asked (`skip`: its `status`
    is `skipped`, which is no failure), or has the empty text there (`empty`)."""
    bytes_as_text: OfPlan[bool] = False
    """Read columns of bytes as text, as Parquet files have it that don't say what it is. A row
    whose text for the prompt isn't UTF-8 fails."""

    def places(self, ds: str) -> dict[str, str]:
        """The columns that name the partition `ds` in the input, with their values."""
        try:
            moment = datetime.fromisoformat(ds) if self.partition else None
        except ValueError as error:
            raise SpecError(f"input.partition: {ds!r} isn't a date or time, {error}") from error
        if moment is None:
            return {self.partition_column: ds}
        return {column: moment.strftime(form) for column, form in self.partition.items()}


class ModelSpec(Section):
    """The model that generates."""

    path: OfPlan[ModelPath]
    """Folder with the model (starting with `/`, `./`, `../` or `~/`; relative to the
    spec file) or the model's name on the Hugging Face hub."""
    revision: OfPlan[str | None] = None
    """Branch, tag or commit on the hub."""
    trust_remote_code: OfOutput[bool] = False
    """Run Python code that the model's repository brings along. Off unless you vouch for it."""
    reasoning_parser: OfOutput[NonEmpty | None] = None
    """vLLM's parser for how this model reasons, such as `qwen3` or `deepseek_r1`: what the model
    thinks goes to the column `reasoning`, and `generated_text` is the answer alone."""
    adapters: OfPlan[Adapters] = Field(default_factory=dict)
    """LoRA adapters of the model by name: for each, a folder or a name on the hub, as in `path`."""
    adapter: OfPlan[NonEmpty | None] = None
    """The adapter, of `adapters`, of all rows."""
    adapter_column: OfPlan[NonEmpty | None] = None
    """Input column of text with the name of each row's adapter. Null and empty: the model itself;
    an unknown name is a row error."""

    def _faults(self) -> Iterator[str]:
        if self.adapter is not None and self.adapter_column is not None:
            yield "adapter is for all rows, adapter_column for each: give one of them"
        chosen = self.adapter is not None or self.adapter_column is not None
        if chosen and not self.adapters:
            yield "adapter and adapter_column choose from adapters, which are missing"
        if self.adapters and not chosen:
            yield "adapters: choose one as adapter, or by row in adapter_column"
        if self.adapter is not None and self.adapter not in self.adapters:
            yield "adapter: isn't the name of one of adapters"


class RepetitionSpec(Section):
    """When an answer repeats itself."""

    tokens: OfOutput[int] = Field(ge=1, le=1024)
    """The most tokens of the piece that repeats."""
    times: OfOutput[int] = Field(ge=2, le=1024)
    """How often the piece stands there in a row."""


class SamplingSpec(Section):
    """How tokens are chosen. The default is greedy: the likeliest token each time.

    `model` in place of all fields is `from_model: true`.
    """

    from_model: OfOutput[bool] = False
    """Whether values that aren't given are those of the model's `generation_config.json`, as vLLM's
    server takes them: `temperature`, `top_p`, `top_k`, `min_p`, the penalties, and `max_new_tokens`
    as `max_tokens`. A model that doesn't say has vLLM's own: a `temperature` of 1."""
    max_tokens: OfOutput[int] = Field(default=128, ge=1, le=MAX_COUNT)
    """Most tokens generated for a row. An output ends earlier where prompt and output together have
    as many as the model allows (`engine.max_model_len`)."""
    min_tokens: OfOutput[Count] = 0
    """Fewest tokens generated before a stop is honoured."""
    temperature: OfOutput[float] = Field(default=0.0, ge=0.0)
    """0 is greedy; exact duplicate prompts are then generated once."""
    top_p: OfOutput[float] = Field(default=1.0, gt=0.0, le=1.0)
    """Sample from the smallest set of tokens with this much probability."""
    top_k: OfOutput[Count] = 0
    """Sample from this many likeliest tokens; 0 is all of them."""
    min_p: OfOutput[float] = Field(default=0.0, ge=0.0, le=1.0)
    """Leave out tokens with less than this share of the likeliest one's probability."""
    seed: OfOutput[Int64 | None] = None
    """Seed of each request's sampling; needed for repeatable outputs when not greedy."""
    repetition_penalty: OfOutput[float] = Field(default=1.0, gt=0.0)
    """Above 1 discourages tokens that occurred before."""
    presence_penalty: OfOutput[float] = Field(default=0.0, ge=-2.0, le=2.0)
    """Above 0 discourages tokens that the output has."""
    frequency_penalty: OfOutput[float] = Field(default=0.0, ge=-2.0, le=2.0)
    """Above 0 discourages tokens the more, the more often the output has them."""
    stop: OfOutput[Annotated[tuple[NonEmpty, ...], _LIST]] = ()
    """Strings at which generation ends; not part of the output."""
    stop_token_ids: OfOutput[tuple[Count, ...]] = ()
    """Token ids at which generation ends."""
    stop_repetition: OfOutput[RepetitionSpec | None] = None
    """End an answer that repeats itself, by vLLM's detection: its `finish_reason` and its `status`
    are `repetition`."""
    ignore_eos: OfOutput[bool] = False
    """Go on to `max_tokens` whatever the model says; for benchmarks."""
    n: OfOutput[int] = Field(default=1, ge=1, le=MAX_SAMPLES)
    """Answers to each row, in the column `generated_texts`; more than one needs a `temperature`.
    Their prompt is computed once."""
    logprobs: OfOutput[int | None] = Field(default=None, ge=0, le=MAX_LOGPROBS)
    """Adds the columns `mean_logprob` and `token_logprobs`, of the tokens that were generated; with
    1 or more `top_logprobs` too, of as many likeliest tokens in each place."""

    @model_serializer(mode="wrap")
    def _without_open_fields(self, handler: SerializerFunctionWrapHandler) -> dict[str, Any]:
        return {name: value for name, value in handler(self).items() if not self._is_open(name)}

    def _is_open(self, name: str) -> bool:
        """Whether the model will say the value of a field."""
        return self.from_model and name not in self.model_fields_set

    def _faults(self) -> Iterator[str]:
        if self.min_tokens > self.max_tokens and not self._is_open("max_tokens"):
            yield "min_tokens is above max_tokens"
        if self.n > 1 and self.is_greedy:
            yield ("n: greedy sampling gives the same answer each time; set a temperature above 0")
        if self.n > 1 and self.logprobs is not None:
            yield "logprobs: are given for one answer a row, so leave out n or logprobs"

    @property
    def is_greedy(self) -> bool:
        """Whether equal prompts give equal outputs, so that duplicates are generated once."""
        return self.temperature == 0.0 and not self._is_open("temperature")


Sampling = Annotated[
    SamplingSpec,
    BeforeValidator(_as_sampling, json_schema_input_type=SamplingSpec | Literal["model"]),
]


class EmbeddingSpec(Section):
    """What an embedding is like."""

    normalize: OfOutput[bool] = True
    """Whether each has the length 1, so that a dot product is a cosine. It holds whatever the
    model's own files say."""
    dimensions: OfOutput[int | None] = Field(default=None, ge=1, le=MAX_COUNT)
    """Keep so many of its first numbers; only for models that are trained for it (Matryoshka).
    Unset: all."""


class OutputSpec(Section):
    """The table that the job writes."""

    uri: OfPlan[TableUri]
    """The table's address, in any of the input's forms; the first commit creates the table, which
    is partitioned by the same column as the input."""
    staging_uri: Neutral[StagingUri | None] = None
    """Folder under whose `_batchllm/` the job keeps plans, parts and reports: a local path
    (relative to the spec file) or an address in a store. Unset: the output table's own folder,
    where readers skip that name. An Iceberg table has no folder of ours, so there it is
    required."""
    carry: OfPlan[Carried] = ()
    """Input columns to carry over into the output, besides the key: a list or, for new names, a
    mapping of each to its name there, such as `{model: source_model}`."""
    add_columns: Neutral[bool] = False
    """Whether columns that the output table lacks are added to it; else they are an error. A
    column that the job no longer writes is null from then on."""
    target_file_bytes: Neutral[ByteSize] = Field(
        default=ByteSize(TARGET_FILE_BYTES), ge=1 << 20, le=MAX_BYTES
    )
    """The most that a data file of an Iceberg or Delta table may have, as a number of bytes or text
    like `256MiB`; larger partitions are several files. A plain Parquet partition is one file,
    whatever its size."""

    def _faults(self) -> Iterator[str]:
        if self.staging_uri is None and TableAddress.parse(self.uri).folder is None:
            yield (
                "an Iceberg table's folder belongs to its catalog: name a folder for the job's"
                " plans and parts, as staging_uri"
            )

    @property
    def staging_folder(self) -> str:
        """Path or URI of the folder that contains `_batchllm/`."""
        folder = self.staging_uri or TableAddress.parse(self.uri).folder
        assert folder is not None  # checked above
        return folder
