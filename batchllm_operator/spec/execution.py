"""The sections of a job spec on execution: the engine, and how the work is cut."""

from collections.abc import Iterator, Mapping
from typing import Annotated, Final, Literal

from pydantic import (
    BeforeValidator,
    ByteSize,
    Discriminator,
    Field,
    JsonValue,
    Tag,
    field_validator,
)

from batchllm_operator.spec.addresses import LocalFile
from batchllm_operator.spec.fields import (
    MAX_BYTES,
    MAX_COUNT,
    Neutral,
    NonEmpty,
    OfOutput,
    OfPlan,
    Section,
)

_FIELDS_OF_MODEL: Final = {
    **dict.fromkeys(("model", "tokenizer"), "model.path"),
    **{name: f"model.{name}" for name in ("revision", "trust_remote_code", "reasoning_parser")},
}


_Switch = Annotated[
    Literal["auto", "on", "off"],
    BeforeValidator(  # in YAML, a bare on is true
        lambda value: ("off", "on")[value] if isinstance(value, bool) else value,
        json_schema_input_type=Literal["auto", "on", "off"] | bool,
    ),
]


class EngineSpec(Section):
    """Settings of the inference engine. Unset ones are chosen for the device."""

    backend: OfOutput[Literal["vllm", "fake"]] = "vllm"
    """`fake` makes up outputs, and needs of the model its configuration and tokenizer only: for
    trying out the pipeline. With no model at all, `extra_args: {byte_tokens: true}` takes the bytes
    of a prompt for its tokens."""
    max_model_len: OfPlan[int | None] = Field(default=None, ge=2, le=MAX_COUNT)
    """Most tokens of a prompt and its output together; unset: what the model allows. More than the
    model allows is refused."""
    dtype: OfOutput[Literal["auto", "bfloat16", "float16", "float32"]] = "auto"
    """Type of weights and activations."""
    batch_invariant: OfOutput[bool] = False
    """Let no text depend on which requests share a step, by vLLM's slower kernels for that. Only on
    NVIDIA GPUs and with `attention: stock`; a model for which vLLM has no such kernels doesn't
    start."""
    block_size: Neutral[int | None] = Field(default=None, ge=1, le=MAX_COUNT)
    """Tokens per KV-cache block."""
    max_num_seqs: Neutral[int | None] = Field(default=None, ge=1, le=MAX_COUNT)
    """Most requests that run at a time."""
    max_num_batched_tokens: Neutral[int | None] = Field(default=None, ge=1, le=MAX_COUNT)
    """The most tokens of one engine step. The chunk size may be less, if a profile of the device
    says that smaller steps are as fast."""
    gpu_memory_utilization: Neutral[float | None] = Field(default=None, gt=0.0, le=1.0)
    """Share of the GPU's memory that the engine may take."""
    kv_cache_memory_bytes: Neutral[int | None] = Field(default=None, ge=1, le=MAX_BYTES)
    """Size of the KV cache, in place of a share of the memory."""
    tensor_parallel_size: Neutral[int] = Field(default=1, ge=1, le=MAX_COUNT)
    """GPUs that one engine spans."""
    replicas: Neutral[int] = Field(default=1, ge=1, le=64)
    """Engines that a run starts, each with `tensor_parallel_size` GPUs of its own. They share the
    shards; all may compute a very long prefix together (`planner.runahead`)."""
    scheduler: Neutral[Literal["batchllm", "stock"]] = "batchllm"
    """The scheduler of engine steps: our group scheduler, or vLLM's own, to compare."""
    attention: Neutral[Literal["batchllm", "stock"]] = "stock"
    """Who computes attention: our backend, which reads a prefix that running requests share once
    a step, or vLLM's own. Ours runs on CUDA, ROCm and, slowly, CPU; a model that it doesn't take
    is refused. It has yet to be timed on a GPU, so vLLM's own is the default."""
    profile: Neutral[bool | None] = None
    """Measure steps of the device once, before the first request, for the chunk size and for
    how prefill is spread; what was measured is kept in `_batchllm/profiles`, beside the plans.
    Unset: on for GPUs, off for CPU. Only our scheduler makes use of it."""
    enforce_eager: Neutral[bool | None] = None
    """Skip compilation and CUDA graphs; unset: on for CPU, off for GPUs."""
    extra_args: OfOutput[Mapping[str, JsonValue]] = Field(default_factory=dict)
    """Any other engine argument of vLLM, by its Python name."""

    def _faults(self) -> Iterator[str]:
        if self.batch_invariant and self.attention == "batchllm":
            yield (
                "batch_invariant: goes with attention: stock; ours adds in an order that depends on"
                " the step"
            )

    @property
    def reason_against_chains(self) -> str | None:
        """The setting that keeps replicas from computing a prefix together (ADR 24), or None."""
        if self.backend == "fake":
            return "engine.backend is fake"
        if self.replicas == 1:
            return "engine.replicas is 1: a chain takes two at least"
        if self.tensor_parallel_size > 1:
            return "a replica must be one GPU: engine.tensor_parallel_size is above 1"
        for name in ("kv_transfer_config", "speculative_config", "pipeline_parallel_size"):
            if name in self.extra_args:
                return f"engine.extra_args has {name}"
        return None

    @field_validator("extra_args")
    @classmethod
    def _check_extra_args(cls, value: Mapping[str, JsonValue]) -> Mapping[str, JsonValue]:
        fields = {name: f"engine.{name}" for name in cls.model_fields} | _FIELDS_OF_MODEL
        for name in sorted(value.keys() & fields.keys()):
            raise ValueError(f"{name!r} has a field of its own: {fields[name]}")
        stages = value.get("pipeline_parallel_size", 1)  # needed where vLLM may be missing
        if not isinstance(stages, int) or isinstance(stages, bool) or stages < 1:
            raise ValueError("'pipeline_parallel_size' must be a whole number of at least 1")
        return value


class OutputEstimate(Section):
    """Where a request's estimated output length comes from: exactly one of these."""

    column: OfPlan[NonEmpty | None] = None
    """Integer column of the input that holds it; null means `sampling.max_tokens`."""
    learned: OfPlan[Literal[True] | None] = None
    """The mean of outputs to prompts of about that length, in the latest partition before the
    planned one (by name) that this job has published; `sampling.max_tokens` if there is none.
    What was learned is part of the plan: if that partition is published again, planning again
    gives another plan."""

    def _faults(self) -> Iterator[str]:
        if (self.column is None) == (self.learned is None):
            yield "give a number, {column: NAME} or {learned: true}"


def _estimate_kind(value: object) -> str:
    return "source" if isinstance(value, Mapping | OutputEstimate) else "number"


OutputTokens = Annotated[
    Annotated[int, Field(ge=1, le=MAX_COUNT), Tag("number")]
    | Annotated[OutputEstimate, Tag("source")],
    Discriminator(_estimate_kind),  # one error instead of one per kind
]


class LimitsSpec(Section):
    """What a run may use."""

    output_tokens: Neutral[int | None] = Field(default=None, ge=1, le=MAX_BYTES)
    """Tokens generated, with those of rows that are generated again."""
    gpu_hours: Neutral[float | None] = Field(default=None, gt=0.0, le=1e9)
    """Hours that attempts hold GPUs, with engine starts."""
    cost: Neutral[float | None] = Field(default=None, gt=0.0, le=1e9)
    """US dollars for these hours, at the price of `planner.target_gpu`."""


class SparkSpec(Section):
    """The Spark session that plans and commits, if there is none yet (spark-submit, a notebook)."""

    conf: Neutral[Mapping[str, str]] = Field(default_factory=dict)
    """Spark's own settings by name, such as `spark.master`. With `spark.remote`, the session is one
    of Spark Connect."""


class PlannerSpec(Section):
    """How the work is cut."""

    engine: Neutral[Literal["local", "spark"]] = "local"
    """Who plans and commits: one process, or Spark, for tables that one machine can't hold. The
    outputs are the same; the cuts into shards differ a little."""
    spark: SparkSpec = SparkSpec()
    """For `engine: spark`."""

    num_shards: OfPlan[int | None] = Field(
        default=None, ge=1, le=100_000
    )  # 5 digits in names of files
    """Pieces of the job, each generated by one process at a time; fewer are made where there are
    fewer requests. Unset: as many as make each about two minutes of predicted work on
    `target_gpu`, or a million tokens without a prediction; at most 1,000."""
    estimated_output_tokens: OfPlan[OutputTokens | None] = None
    """Output length to plan with: a number, `{column: NAME}` or `{learned: true}`; unset:
    `sampling.max_tokens`, which is also the most."""
    target_gpu: Neutral[NonEmpty | None] = "H100"
    """GPU whose time and price `plan` predicts, and by whose time it balances shards; null
    for no prediction. Built in: A100, H100, H200, MI300X."""
    gpu_table: Neutral[LocalFile | None] = None
    """TOML file (relative to the spec file) of GPUs that `target_gpu` can name, in place of the
    built-in `cost/gpus.toml`: rates, achievable shares, prices."""
    part_rows: OfPlan[int] = Field(default=500, ge=1, le=MAX_COUNT)
    """Requests per output part, the unit that commit reads. Parts end where a group ends, unless
    the group alone is larger."""
    memory_budget_bytes: Neutral[ByteSize] = Field(default=ByteSize(2 << 30), ge=1, le=MAX_BYTES)
    """Most memory that `plan` takes, as a number of bytes or text like `4GiB`; the rest goes to
    temporary files. It takes some hundred bytes for each row, and says how much if the budget
    is too small."""
    runahead: Neutral[_Switch] = "auto"
    """Whether a very long prefix may be computed by all `engine.replicas` together (KV-Runahead),
    where that is predicted to pay. `auto`: once a run has measured how fast they hand KV on. `on`:
    also by `link_bytes_per_s`, and refused if neither is known. It needs replicas of one GPU
    each."""
    link_bytes_per_s: Neutral[float | None] = Field(default=None, ge=1.0, le=1e15)
    """Rate at which a replica hands KV to the next, in place of a measured one; only with
    `runahead: on`."""

    def _faults(self) -> Iterator[str]:
        if self.link_bytes_per_s is not None and self.runahead != "on":
            yield ("link_bytes_per_s goes with runahead: on; with auto, what counts is measured")

    @property
    def estimate_columns(self) -> tuple[str, ...]:
        estimate = self.estimated_output_tokens
        if isinstance(estimate, OutputEstimate) and estimate.column is not None:
            return (estimate.column,)
        return ()

    @property
    def learns_output_tokens(self) -> bool:
        """Whether output lengths come from an earlier partition's outputs."""
        estimate = self.estimated_output_tokens
        return isinstance(estimate, OutputEstimate) and estimate.learned is True
