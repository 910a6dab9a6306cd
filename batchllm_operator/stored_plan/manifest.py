"""The persisted plan: a manifest that names, checks and explains the plan's data files.

Nothing here touches storage: bytes and local files in, bytes and local files out.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Final, Literal

import pyarrow as pa
from pydantic import Field, model_validator

from batchllm_operator.answers import PlannedAnswers
from batchllm_operator.cost.gpu import GPU
from batchllm_operator.cost.model_shape import ModelShape
from batchllm_operator.errors import DamagedFileError
from batchllm_operator.prefixes.sharing import PlanSharing
from batchllm_operator.spec import JobSpec
from batchllm_operator.stored_plan.counts import Count, Frozen, PlanCounts, PromptCounts
from batchllm_operator.stored_plan.shard_files import shard_file
from batchllm_operator.stored_plan.stored_json import StoredJson

MANIFEST_FILE: Final = "manifest.json"
ROWS_FILE: Final = "rows.parquet"
GROUPS_FILE: Final = "groups.parquet"
FINGERPRINTS_FILE: Final = "fingerprints.parquet"
"""The prompt's fingerprint for each row of the partition, if outputs are reused."""
REUSED_FILE: Final = "reused.parquet"
"""Outputs that the plan takes from an earlier commit, with the schema of parts."""
ERROR_COLUMN: Final = "error"
"""Column of rows.parquet, parts and output tables."""
ERROR_FIELD: Final = pa.field(
    ERROR_COLUMN, pa.struct([("kind", pa.string()), ("message", pa.string())])
)
"""A `RowError`; null where there is none."""
GROUPS_SCHEMA: Final = pa.schema(
    [pa.field("prefix_hash", pa.int64()), pa.field("upper_prefix_hash", pa.int64())]
)
"""One row per group, in plan order: hashes by which a later plan recognises its prefix, or null."""


def errors_field(spec: JobSpec) -> pa.Field:
    """The column of rows.parquet beside those that the job keeps: with several prompts, a list of
    an error for each."""
    return ERROR_FIELD.with_type(pa.list_(ERROR_FIELD.type)) if spec.prompts else ERROR_FIELD


def errors_of(rows: pa.RecordBatch | pa.Table) -> pa.Array:
    """The errors of rows.parquet by ask."""
    errors = rows[ERROR_COLUMN]
    errors = errors.combine_chunks() if isinstance(errors, pa.ChunkedArray) else errors
    return errors.flatten() if pa.types.is_list(errors.type) else errors


class DataFile(Frozen):
    """Size and checksum of a file of the plan."""

    size_bytes: Count
    sha256: str


class SpreadGroup(Frozen):
    """A group whose prefix all replicas of a run compute together."""

    group_id: Count
    split: tuple[Annotated[int, Field(ge=1, lt=1 << 31)], ...]
    """Tokens in each replica's chunk of the prefix (KV-Runahead); in a group of one request, of its
    prompt without the last token."""


class ReplicaPlacement(Frozen):
    """How the replicas of a run share a shard (ADR 24); predictions are in seconds."""

    num_replicas: int = Field(ge=2)
    spread: tuple[SpreadGroup, ...] = ()
    """Ascending, before all other groups of the shard."""
    makespan_s: float
    without_chains_s: float
    """Makespan of the best placement without chains."""
    measure: bool = False
    """Whether to measure the link between replicas, because it is unknown and chains may pay."""

    @model_validator(mode="after")
    def _check_splits(self) -> ReplicaPlacement:
        if any(len(group.split) != self.num_replicas for group in self.spread):
            raise ValueError("a split isn't for these replicas")
        if len(set(self.first_groups)) < len(self.first_groups):
            raise ValueError("a group is placed twice")
        return self

    @property
    def first_groups(self) -> list[int]:
        """Groups to start with, in order."""
        return [group.group_id for group in self.spread]


class ShardInfo(Frozen):
    """One shard: the work of one GPU task."""

    file: str
    num_groups: Count
    num_requests: Count
    num_rows: Count
    num_parts: Count
    """Row groups of the shard file; each becomes one output part."""
    num_prefill_tokens: Count
    predicted_gpu_s: float | None = None
    """Its share of the estimate, to which all shards add up. None without an estimate."""
    replicas: ReplicaPlacement | None = None
    """How the replicas of a run share it; None for one replica, or if a placement gains nothing."""

    @property
    def is_chained(self) -> bool:
        """Whether replicas compute prefixes of it together, or are to measure whether that pays."""
        return self.replicas is not None and bool(self.replicas.spread or self.replicas.measure)


class CostEstimate(Frozen):
    """The job's predicted cost on the spec's `target_gpu`; formulas in `cost.roofline`."""

    gpu: GPU
    model: ModelShape
    num_saved_tokens: int
    """Prefill tokens that sharing and duplicates save: logical - planned."""
    num_output_tokens: int
    """Estimated, of all requests."""
    prefill_s: float
    decode_s: float
    attention_bytes: float
    """Bytes of KV that decoding reads."""
    num_steps: float
    gpu_s: float
    cost_usd: float
    unshared_gpu_s: float
    """`gpu_s` if each row's prompt were computed alone."""
    unshared_cost_usd: float
    assumptions: tuple[str, ...]

    @property
    def saved_gpu_s(self) -> float:
        return self.unshared_gpu_s - self.gpu_s

    @property
    def saved_cost_usd(self) -> float:
        return self.unshared_cost_usd - self.cost_usd


class LengthBucket(Frozen):
    """Counts of outputs for prompts in a range of lengths."""

    question: Count = Field(default=0, exclude_if=lambda question: not question)
    """Of the spec's questions."""
    min_prompt_tokens: Count
    """A power of two; the bucket ends before the next."""
    num_rows: Count
    num_output_tokens: Count


class LearnedOutputs(Frozen):
    """Output lengths of an earlier partition."""

    ds: str
    plan_id: str
    buckets: tuple[LengthBucket, ...]
    """Those with rows, ascending."""
    num_known_prefixes: Count = 0
    """Number of that partition's group prefixes by which groups can be recognised."""

    @property
    def num_rows(self) -> int:
        return sum(bucket.num_rows for bucket in self.buckets)

    @property
    def mean_output_tokens(self) -> float:
        return sum(bucket.num_output_tokens for bucket in self.buckets) / self.num_rows


class RowFile(Frozen):
    """A file with one row per input row: key, carried columns, error."""

    file: str
    num_rows: Count


def _of_prompts() -> Any:
    """A field that is stored for jobs of several prompts only."""
    return Field(default=(), exclude_if=lambda value: not value)


class PlanManifest(StoredJson):
    """Everything about a plan but its data. Equal inputs give equal bytes."""

    what = "plan"
    version_field = "plan_version"
    cure = "make the plan again"

    plan_version: Literal[1] = 1
    plan_id: str = Field(pattern=r"^[0-9a-f]{16}$")
    spec: JobSpec
    ds: str = Field(min_length=1)
    round_idx: Count = Field(default=0, exclude_if=lambda idx: not idx)
    """Position in `JobSpec.rounds` of the round that it asks."""
    before: str | None = Field(default=None, exclude_if=lambda plan_id: plan_id is None)
    """Id of the plan of the round before; None in the first round."""
    retries: str | None = Field(default=None, exclude_if=lambda plan_id: plan_id is None)
    """Id of the plan whose failed rows it asks again, directly or of such a plan."""
    input_version: str
    """State of the table that was read, such as `delta:<version>`."""
    input_columns: dict[str, str] = Field(default_factory=dict, exclude_if=lambda names: not names)
    """Arrow types of the columns that the job reads, by name; not of values inside columns."""
    tokenizer_fingerprint: str
    model_version: str
    """The hub's commit (`commit:...`) or a digest of the model's folder."""
    adapter_versions: tuple[str, ...] = ()
    """Those of `model.adapters`, in the order of their names: as `model_version`."""
    answers: PlannedAnswers = PlannedAnswers()
    answers_by_prompt: tuple[PlannedAnswers, ...] = _of_prompts()
    """With several prompts, in place of `answers`; as `prompt_counts` in the order of names."""
    prompt_counts: tuple[PromptCounts, ...] = _of_prompts()
    max_model_len: Count
    counts: PlanCounts
    num_repeated_tokens: Count = Field(default=0, exclude_if=lambda num: not num)
    """Prompt tokens that the round before computes, and this one again, as KV ends with a round."""
    learned: LearnedOutputs | None = None
    """The earlier outputs for the estimate, if the spec asks for it and there are any."""
    estimate: CostEstimate | None = None
    """None if no GPU is named, or the model's shape is unknown."""
    sharing: PlanSharing
    imbalance: float = 1.0
    """Predicted work of the largest shard / that of the average shard."""
    files: Mapping[str, DataFile]
    row_parts: tuple[Count, ...] = ()
    """Rows of each file of rows, in plans with several; stored for them only."""
    shards: tuple[ShardInfo, ...]

    @model_validator(mode="after")
    def _check_files(self) -> PlanManifest:
        """Check that the manifest names the expected files: paths are never taken from it."""
        shards = [shard_file(idx) for idx in range(len(self.shards))]
        expected = [*(rows.file for rows in self.row_files), *shards]
        if self.spec.keeps_fingerprints and not self.row_parts:  # plans of Spark have none
            expected.append(FINGERPRINTS_FILE)
        if self.spec.reuse_outputs:
            expected.append(REUSED_FILE)
        if (self.before is None) != (self.round_idx == 0):
            raise ValueError("the first round, and no other, has no plan before it")
        if [shard.file for shard in self.shards] != shards:
            raise ValueError("shards have other files than theirs")
        if sum(rows.num_rows for rows in self.row_files) != self.num_rows:
            raise ValueError("files of rows don't have all rows")
        if not self.files.keys() >= set(expected):
            raise ValueError("files of the plan aren't named")
        return self

    @property
    def num_rows(self) -> int:
        """Rows of the table, whatever the number of prompts."""
        return self.counts.num_rows // len(self.spec.questions)

    @property
    def counts_by_prompt(self) -> dict[str, PromptCounts]:
        """Of a job of several prompts, by their names."""
        return dict(zip(self.spec.prompts, self.prompt_counts, strict=True))

    @property
    def planned_answers(self) -> tuple[PlannedAnswers, ...]:
        """What planning has found out about the answers to each question."""
        return self.answers_by_prompt or (self.answers,)

    @property
    def row_files(self) -> tuple[RowFile, ...]:
        """The files of rows, in the order of the rows."""
        if not self.row_parts:
            return (RowFile(file=ROWS_FILE, num_rows=self.num_rows),)
        return tuple(
            RowFile(file=rows_file(idx), num_rows=num) for idx, num in enumerate(self.row_parts)
        )

    @property
    def run_id(self) -> str:
        return f"{self.spec.name}/{self.ds}/{self.plan_id}"

    def to_bytes(self) -> bytes:
        """The stored form: JSON with a digest of itself."""
        body = self.model_dump(mode="json")
        return _dump({**body, "manifest_sha256": _digest(body)})

    @classmethod
    def opened(cls, fields: dict[str, Any], where: str) -> dict[str, Any]:
        """Check the digest."""
        digest = fields.pop("manifest_sha256", None)
        try:
            is_whole = digest == _digest(fields)
        except (ValueError, RecursionError):  # a lone surrogate, which UTF-8 can't encode
            is_whole = False
        if not is_whole:
            raise DamagedFileError(
                f"{where}: the manifest is corrupted: its checksum doesn't hold; {cls.cure}"
            )
        return fields


def rows_file(idx: int) -> str:
    """One of several files of rows; see `PlanManifest.row_files`."""
    return f"rows-{idx:05d}.parquet"


def compute_plan_id(
    spec: JobSpec,
    ds: str,
    model_version: str,
    files: Mapping[str, DataFile],
    learned: LearnedOutputs | None = None,
    adapter_versions: Sequence[str] = (),
    before: Sequence[str] = (),
) -> str:
    """16 hex digits that identify the spec, the model and the data."""
    content = {name: file.sha256 for name, file in files.items()}
    settings = spec.identity_until(len(before) + 1)
    identity: dict[str, Any] = {"spec": settings, "ds": ds, "model": model_version}
    identity["files"] = content
    if learned is not None:
        identity["learned"] = learned.model_dump(mode="json")
    if adapter_versions:
        identity["adapters"] = adapter_versions
    if before:
        identity["before"] = before
    return _digest(identity)[:16]


def describe_file(path: Path) -> DataFile:
    """Size and checksum of a local file."""
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    return DataFile(size_bytes=path.stat().st_size, sha256=digest)


def _digest(body: Mapping[str, Any]) -> str:
    return hashlib.sha256(_dump(body)).hexdigest()


def _dump(body: Mapping[str, Any]) -> bytes:
    return (json.dumps(body, sort_keys=True, indent=1, ensure_ascii=False) + "\n").encode()
