"""Output parts and their ledger: what makes a shard's run restartable.

A part holds the outputs of one row group of the shard file. Its file is named by its content; its
ledger entry, written afterwards, says which file counts. Both are in the attempt's folder, and
neither is ever replaced.
"""

from __future__ import annotations

import logging
import re
import tempfile
from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from operator import attrgetter
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Any, ClassVar, Final, Literal, TypeVar

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from pydantic import Field

from batchllm_operator.answers import Answers, PlannedAnswers
from batchllm_operator.engine import EngineOutput
from batchllm_operator.errors import DamagedFileError, FencedError
from batchllm_operator.row_error import RowError
from batchllm_operator.shards.attempts import Attempt, attempt_name
from batchllm_operator.spec import JobSpec
from batchllm_operator.storage import Folder, hash_files, read_files
from batchllm_operator.stored_plan.counts import Count, Counts
from batchllm_operator.stored_plan.manifest import ERROR_FIELD, describe_file
from batchllm_operator.stored_plan.stored_json import StoredJson
from batchllm_operator.stored_plan.stored_plan import StoredPlan
from batchllm_operator.streams import ahead, batches_of

_log = logging.getLogger(__name__)

STATUS_COLUMN: Final = "status"
PART_SCHEMA: Final = pa.schema(
    [
        pa.field("request_idx", pa.int64(), nullable=False),
        pa.field("row_idxs", pa.list_(pa.int64()), nullable=False),
        pa.field("generated_text", pa.string()),
        pa.field("finish_reason", pa.string()),
        pa.field("num_prompt_tokens", pa.int32()),
        pa.field("num_cached_tokens", pa.int32()),
        pa.field("num_output_tokens", pa.int32()),
        ERROR_FIELD,
    ]
)
"""One row per request; output columns are named as in the output table. Those of
`Answers.raw_fields` are added."""
# Halves the time to read thousands of parts in a commit, for 7 % more bytes: texts seldom repeat,
# and a part has too few numbers to be worth starting a decompressor.
_PARQUET_OPTIONS: Final[Mapping[str, Any]] = {
    "compression": {"generated_text": "zstd", "error.message": "zstd"},
    "use_dictionary": ["finish_reason", "error.kind", "error.message"],
    "write_statistics": False,
}
_ROWS_AT_ONCE: Final = 1 << 13
_TOKENS_AT_ONCE: Final = 1 << 19  # some 2 MiB of text

Entry = TypeVar("Entry", bound="StoredOutputs")


def part_schema(spec: JobSpec) -> pa.Schema:
    """The schema of a job's parts."""
    return pa.schema([*PART_SCHEMA, *Answers.of(spec).raw_fields])


def output_schema(spec: JobSpec, rows_schema: pa.Schema, planned: PlannedAnswers) -> pa.Schema:
    """Columns of the output table: key, the job's own, carried ones.

    `rows_schema` holds the key and the carried columns.
    """
    own = {field.name: field for field in (*PART_SCHEMA, *Answers.of(spec, planned).fields)}
    carried = [name for name in spec.kept_columns if name not in spec.input.key]
    return pa.schema(
        [
            *(rows_schema.field(name).remove_metadata() for name in spec.input.key),
            *(own.get(name, pa.field(name, pa.string())) for name in spec.output_columns),
            *(rows_schema.field(name).remove_metadata() for name in carried),
        ]
    )


class StoredOutputs(StoredJson, Counts):
    """The entry of a file of outputs, which lies beside it in an attempt's folder."""

    prefix: ClassVar[str]
    """The first word of the file's name, and of the entry's."""

    plan_id: str
    attempt: Count
    sha256: Annotated[str, Field(pattern="^[0-9a-f]{64}$")]
    """Of the file."""

    @property
    @abstractmethod
    def number(self) -> int:
        """Tells entries of this kind in an attempt's folder apart."""

    @property
    def stem(self) -> str:
        """The beginning of the file's name, and the entry's name."""
        return f"{self.prefix}-{self.number:05d}"

    @property
    def file(self) -> str:
        """The file's name, which its content decides."""
        return f"{self.stem}-{self.sha256[:12]}.parquet"

    @property
    def path(self) -> str:
        """The file's path in the shard's folder."""
        return f"{attempt_name(self.attempt)}/{self.file}"

    @property
    def entry_path(self) -> str:
        return f"{attempt_name(self.attempt)}/{self.stem}.json"


class PartEntry(StoredOutputs):
    """The ledger entry of a part."""

    what = "ledger entry"
    version_field = "entry_version"
    prefix = "part"

    entry_version: Literal[1] = 1
    part_idx: Count

    @property
    def number(self) -> int:
        return self.part_idx


def write_part(
    attempt: Attempt,
    plan_id: str,
    part_idx: int,
    outputs: Sequence[EngineOutput],
    row_idxs: Mapping[int, Sequence[int]],
    engine_s: float,
    schema: pa.Schema = PART_SCHEMA,
) -> PartEntry:
    """Write a part's file, then its ledger entry; see `write_outputs`.

    `outputs` has one output for each request of the part, in any order, at least one.
    """
    in_order = sorted(outputs, key=attrgetter("request_idx"))
    fields = {"plan_id": plan_id, "part_idx": part_idx}
    return write_outputs(PartEntry, fields, attempt, in_order, row_idxs, engine_s, schema)


def write_outputs(
    kind: type[Entry],
    fields: Mapping[str, Any],
    attempt: Attempt,
    outputs: Sequence[EngineOutput],
    row_idxs: Mapping[int, Sequence[int]],
    engine_s: float,
    schema: pa.Schema,
    columns: Mapping[str, Sequence[Any]] = MappingProxyType({}),
) -> Entry:
    """Write a file of outputs, then the entry by which it counts, each in one step.

    Args:
        kind, fields: of the entry.
        row_idxs: the rows of each request_idx.
        engine_s: see `Counts`.
        schema: of the file; the job's `part_schema`, and further `columns`.

    Raises:
        FencedError: a later attempt has begun, or another process has written the entry. The file
            may be written.
    """
    rows = [list(row_idxs[output.request_idx]) for output in outputs]
    counts = Counts.of(zip(outputs, map(len, rows), strict=True), engine_s)
    table = _table_of(outputs, {"row_idxs": rows, **columns}, schema)
    with tempfile.TemporaryDirectory(prefix="batchllm-part-") as spool:
        path = Path(spool) / "part.parquet"
        pq.write_table(table, path, **_PARQUET_OPTIONS)
        sha256 = describe_file(path).sha256
        entry = kind(attempt=attempt.number, sha256=sha256, **fields, **dict(counts))
        attempt.folder.publish_file(path, entry.file)
    attempt.check_current()
    name, data = f"{entry.stem}.json", entry.to_bytes()
    if not attempt.folder.create(name, data):
        raise FencedError(
            f"{attempt.folder.uri}/{name}: another process has written it, as if it were the"
            " same attempt; does this storage know conditional writes (If-None-Match)?"
        )
    return entry


def _table_of(
    outputs: Sequence[EngineOutput], columns: Mapping[str, Sequence[Any]], schema: pa.Schema
) -> pa.Table:
    """Outputs as a table of `schema`, which takes further `columns` from there."""
    columns = {"generated_text": [output.text for output in outputs], **columns}
    for name in schema.names:
        if name in columns:
            continue
        if name in PART_SCHEMA.names:
            columns[name] = [getattr(output, name) for output in outputs]
        else:
            columns[name] = [output.raw.get(name) for output in outputs]
    return pa.table(columns, schema=schema)


def read_ledger(folder: Folder, plan_id: str) -> dict[int, PartEntry]:
    """The trusted parts of a shard, by part_idx, of all attempts together; see `read_entries`.

    For each part this is the entry of the latest attempt.
    """
    entries = read_entries(PartEntry, folder, plan_id)
    return dict(sorted({entry.part_idx: entry for entry in entries}.items()))


def read_entries(
    kind: type[Entry],
    folder: Folder,
    plan_id: str,
    is_wanted: Callable[[Entry], bool] = lambda entry: True,
    **belongs: object,
) -> list[Entry]:
    """The entries of a shard whose files have their checksums, by attempt and number.

    An entry that is damaged or belongs elsewhere, or whose file is absent or altered, doesn't
    count, with a warning.

    Args:
        is_wanted: whether to check and return an entry.
        belongs: further fields, with the values that they have in an entry that belongs there.

    Raises:
        PlanError: an entry is of another version, or another program's.
    """
    belongs = {"plan_id": plan_id, **belongs}
    entry_path = re.compile(rf"attempt-[0-9]{{5,}}/{kind.prefix}-[0-9]{{5,}}\.json")
    entries = []
    for path, data in read_files(folder, filter(entry_path.fullmatch, folder.find())).items():
        try:
            entry = kind.from_bytes(data, source=f"{folder.uri}/{path}")
        except DamagedFileError as error:
            _log.warning("%s; it doesn't count", error)
            continue
        place = {name: getattr(entry, name) for name in belongs}
        if (place, entry.entry_path) != (belongs, path):
            _log.warning("%s/%s doesn't count: it belongs elsewhere", folder.uri, path)
        elif is_wanted(entry):
            entries.append(entry)
    checksums = hash_files(folder, (entry.path for entry in entries))
    whole = []
    for entry in entries:
        if checksums.get(entry.path) == entry.sha256:
            whole.append(entry)
        else:
            how = "was altered" if entry.path in checksums else "is missing"
            _log.warning("%s/%s doesn't count: it %s", folder.uri, entry.path, how)
    return sorted(whole, key=lambda entry: (entry.attempt, entry.number))


@dataclass(frozen=True, slots=True)
class ShardParts:
    """The parts that a shard has so far: its folder and its ledger."""

    folder: Folder
    entries: Sequence[PartEntry]

    def parts(self, columns: Sequence[str]) -> Iterator[pa.Table]:
        """Read the parts, small ones merged, a few ahead."""

        def read(entries: Sequence[PartEntry]) -> pa.Table:
            files = (self.folder.read_bytes(entry.path) for entry in entries)
            readers = (pq.ParquetFile(pa.BufferReader(file)) for file in files)
            return pa.concat_tables(file.read(list(columns), use_threads=False) for file in readers)

        rows = (_ROWS_AT_ONCE, attrgetter("num_rows"))
        tokens = (_TOKENS_AT_ONCE, attrgetter("num_output_tokens"))
        return ahead(batches_of(self.entries, rows, tokens), read)

    def failed(self) -> Iterator[tuple[RowError, list[int]]]:
        """The error and the rows of each failed request; reads the parts that have some."""
        entries = [entry for entry in self.entries if entry.num_failed_rows]
        for part in replace(self, entries=entries).parts(["row_idxs", "error"]):
            failed = part.filter(pc.is_valid(part["error"]))
            errors = (RowError(**error) for error in failed["error"].to_pylist())
            yield from zip(errors, failed["row_idxs"].to_pylist(), strict=True)


def stored_shards(plan: StoredPlan) -> list[ShardParts]:
    """The shards in order, each with the parts that it has so far; raises like `read_entries`."""
    folders = [plan.run_folder(shard_idx) for shard_idx in range(len(plan.manifest.shards))]
    plan_id = plan.manifest.plan_id
    return [ShardParts(folder, list(read_ledger(folder, plan_id).values())) for folder in folders]
