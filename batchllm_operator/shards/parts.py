"""What attempts store of a shard's outputs: parts, with the ledger for restarts, and spills.

A part holds the outputs of one row group of the shard file. A spill holds what an attempt has
finished since its last one, of all open parts together, so that a stop loses none; only a later
attempt reads it, and writes the parts whole. A file is named by its content. Its entry, written
afterwards, says that it counts. Both are in the attempt's folder, and neither is ever replaced.
"""

from __future__ import annotations

import logging
import re
import tempfile
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from operator import attrgetter
from pathlib import Path
from typing import Annotated, Any, ClassVar, Final, Literal, TypeVar

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from pydantic import Field

from batchllm_operator.answers import raw_fields
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
# Halves the time to read thousands of parts, for 7 % more bytes: a part has too few numbers to be
# worth starting a decompressor, and texts seldom repeat.
_PARQUET_OPTIONS: Final[Mapping[str, Any]] = {
    "compression": {"generated_text": "zstd", "error.message": "zstd"},
    "use_dictionary": ["finish_reason", "error.kind", "error.message"],
    "write_statistics": False,
}
_PART_FIELD: Final = pa.field("part_idx", pa.int64(), nullable=False)
_OWN_NAMES: Final = frozenset(PART_SCHEMA.names)
_ROWS_AT_ONCE: Final = 1 << 13
_TOKENS_AT_ONCE: Final = 1 << 19  # some 2 MiB of text

Entry = TypeVar("Entry", bound="StoredOutputs")


def part_schema(spec: JobSpec) -> pa.Schema:
    return pa.schema([*PART_SCHEMA, *raw_fields(spec)])


@dataclass(slots=True)
class PartOutputs:
    """The finished outputs of a part, by request_idx."""

    outputs: dict[int, EngineOutput] = field(default_factory=dict)
    row_idxs: dict[int, list[int]] = field(default_factory=dict)
    """The rows of these requests; while the part is in an engine, of all of its requests."""
    engine_s: float = 0.0
    """Its share of the spills' seconds."""

    @property
    def counts(self) -> Counts:
        """Of the outputs, without seconds."""
        return Counts.of((out, len(self.row_idxs[idx])) for idx, out in self.outputs.items())


class StoredOutputs(StoredJson, Counts):
    """The entry of a file of outputs, which lies beside it in an attempt's folder."""

    prefix: ClassVar[str]
    """The first word of the file's name, of the entry's, and of the field with its number."""
    more_fields: ClassVar[tuple[pa.Field, ...]] = ()
    """Columns of the file beside those of the job's `part_schema`."""

    plan_id: str
    attempt: Count
    sha256: Annotated[str, Field(pattern="^[0-9a-f]{64}$")]

    @property
    def number(self) -> int:
        """Tells entries of this kind in an attempt's folder apart."""
        return int(getattr(self, f"{self.prefix}_idx"))

    @property
    def _stem(self) -> str:
        return f"{attempt_name(self.attempt)}/{self.prefix}-{self.number:05d}"

    @property
    def path(self) -> str:
        """The file's path in the shard's folder, which its content decides."""
        return f"{self._stem}-{self.sha256[:12]}.parquet"

    @property
    def entry_path(self) -> str:
        return f"{self._stem}.json"


class PartEntry(StoredOutputs):
    """The ledger entry of a part."""

    what = "ledger entry"
    version_field = "entry_version"
    prefix = "part"

    entry_version: Literal[1] = 1
    part_idx: Count


class SpillEntry(StoredOutputs):
    """The entry of a spill; `engine_s` counts until the spill."""

    what = "entry of a spill"
    version_field = "spill_version"
    prefix = "spill"
    more_fields = (_PART_FIELD,)

    spill_version: Literal[1] = 1
    shard_idx: Count
    spill_idx: Count
    parts: dict[Count, Count]
    """part_idx -> number of its requests in the file."""


@dataclass(frozen=True, slots=True)
class ShardFiles:
    """Writes and reads the outputs of a plan's shard; `schema` is the job's `part_schema`."""

    folder: Folder
    plan_id: str
    shard_idx: int
    schema: pa.Schema

    @classmethod
    def of(cls, plan: StoredPlan, shard_idx: int) -> ShardFiles:
        folder, schema = plan.run_folder(shard_idx), part_schema(plan.manifest.spec)
        return cls(folder, plan.manifest.plan_id, shard_idx, schema)

    def write_part(self, attempt: Attempt, part_idx: int, part: PartOutputs) -> PartEntry:
        """Write a part with at least one output, then its ledger entry; raises like `_write`."""
        fields = {"part_idx": part_idx}
        return self._write(PartEntry, fields, attempt, {part_idx: part}, part.engine_s)

    def write_spill(
        self, attempt: Attempt, spill_idx: int, parts: Mapping[int, PartOutputs], engine_s: float
    ) -> None:
        """Write outputs by part_idx, at least one, then their entry; raises like `_write`.

        `spill_idx` is a number that the attempt hasn't used.
        """
        sizes = {part_idx: len(part.outputs) for part_idx, part in parts.items()}
        fields = {"shard_idx": self.shard_idx, "spill_idx": spill_idx, "parts": sizes}
        self._write(SpillEntry, fields, attempt, parts, engine_s)

    def _write(
        self,
        kind: type[Entry],
        fields: Mapping[str, Any],
        attempt: Attempt,
        parts: Mapping[int, PartOutputs],
        engine_s: float,
    ) -> Entry:
        """Write a file of outputs, then the entry by which it counts, each in one step.

        `kind` and its own `fields` are the entry's. Raises `FencedError`: a later attempt has
        begun, or another process has written the entry.
        """
        rows = [
            (part_idx, part.row_idxs[request_idx], part.outputs[request_idx])
            for part_idx, part in parts.items()
            for request_idx in sorted(part.outputs)
        ]
        counts = Counts.of(((output, len(row_idxs)) for _, row_idxs, output in rows), engine_s)
        fields = {**fields, "plan_id": self.plan_id, "attempt": attempt.number, **dict(counts)}
        with tempfile.TemporaryDirectory(prefix="batchllm-part-") as spool:
            path = Path(spool) / "part.parquet"
            table = _table_of(rows, pa.schema([*self.schema, *kind.more_fields]))
            pq.write_table(table, path, **_PARQUET_OPTIONS)
            entry = kind(sha256=describe_file(path).sha256, **fields)
            self.folder.publish_file(path, entry.path)
        attempt.check_current()
        if not self.folder.create(entry.entry_path, entry.to_bytes()):
            raise FencedError(
                f"{self.folder.uri}/{entry.entry_path}: another process has written it, as if it"
                " were the same attempt; does this storage know conditional writes (If-None-Match)?"
            )
        return entry

    def ledger(self) -> dict[int, PartEntry]:
        """The trusted parts by part_idx, of all attempts together; raises like `_entries`.

        For each part this is the entry of the latest attempt.
        """
        entries = self._entries(PartEntry, {"plan_id": self.plan_id})
        return dict(sorted({entry.part_idx: entry for entry in entries}.items()))

    def spilled(self, written: Container[int]) -> dict[int, PartOutputs]:
        """The spilled outputs by part_idx, of all attempts together; raises like `_entries`.

        Of a request that was spilled twice, the output of the latest attempt counts. Those of parts
        that are `written` are left out.
        """
        belongs = {"plan_id": self.plan_id, "shard_idx": self.shard_idx}
        parts: dict[int, PartOutputs] = {}
        for entry in self._entries(
            SpillEntry, belongs, lambda entry: any(idx not in written for idx in entry.parts)
        ):
            for part_idx, num_requests in entry.parts.items():
                if part_idx not in written:
                    part = parts.setdefault(part_idx, PartOutputs())
                    part.engine_s += entry.engine_s * num_requests / max(entry.num_requests, 1)
            file = pa.BufferReader(self.folder.read_bytes(entry.path))
            for row in pq.read_table(file).to_pylist():
                if (part_idx := row[_PART_FIELD.name]) in parts:
                    output = _output_of(row, self.schema)
                    parts[part_idx].outputs[output.request_idx] = output
                    parts[part_idx].row_idxs[output.request_idx] = row["row_idxs"]
        return parts

    def _entries(
        self,
        kind: type[Entry],
        belongs: Mapping[str, object],
        is_wanted: Callable[[Entry], bool] = lambda entry: True,
    ) -> list[Entry]:
        """The entries whose files have their checksums, by attempt and number.

        An entry that is damaged or belongs elsewhere, or whose file is absent or altered, doesn't
        count, with a warning; one of another version or program is a `PlanError`. The files of
        those that aren't wanted aren't checked.
        """
        folder = self.folder
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
                continue
            how = "was altered" if entry.path in checksums else "is missing"
            _log.warning("%s/%s doesn't count: it %s", folder.uri, entry.path, how)
        return sorted(whole, key=lambda entry: (entry.attempt, entry.number))


def _table_of(rows: Sequence[tuple[int, list[int], EngineOutput]], schema: pa.Schema) -> pa.Table:
    part_idxs, row_idxs, outputs = zip(*rows, strict=True)
    texts = [output.text for output in outputs]
    columns = {_PART_FIELD.name: part_idxs, "row_idxs": row_idxs, "generated_text": texts}
    for name in (name for name in schema.names if name not in columns):
        is_own = name in _OWN_NAMES
        columns[name] = [getattr(o, name) if is_own else o.raw.get(name) for o in outputs]
    return pa.table(columns, schema=schema)


def _output_of(row: Mapping[str, Any], schema: pa.Schema) -> EngineOutput:
    """The reverse of `_table_of`, for a row of a table of `schema`."""
    names = set(schema.names)
    raw = {name: row[name] for name in names - _OWN_NAMES if row.get(name) is not None}
    fields = {name: row[name] for name in _OWN_NAMES - {"row_idxs", "generated_text"}}
    if fields["error"] is not None:
        fields["error"] = RowError(**fields["error"])
    return EngineOutput(text=row["generated_text"], raw=raw, **fields)


@dataclass(frozen=True, slots=True)
class ShardParts:
    """What attempts have stored of a shard so far: its ledger and, if asked for, spilled parts."""

    folder: Folder
    entries: Sequence[PartEntry]
    spilled: Sequence[PartOutputs] = ()

    @classmethod
    def read(cls, plan: StoredPlan, shard_idx: int, *, with_spilled: bool = False) -> ShardParts:
        """Raises `PlanError` if an entry is of another version."""
        files = ShardFiles.of(plan, shard_idx)
        ledger, spilled = files.ledger(), dict[int, PartOutputs]()
        if with_spilled and len(ledger) < plan.shard(shard_idx).num_parts:
            spilled = files.spilled(ledger)
        return cls(files.folder, list(ledger.values()), list(spilled.values()))

    @property
    def counts(self) -> Counts:
        """Of all finished outputs."""
        return Counts.total([*self.entries, *(part.counts for part in self.spilled)])

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
        for spilled in self.spilled:
            for request_idx, output in spilled.outputs.items():
                if output.error is not None:
                    yield output.error, spilled.row_idxs[request_idx]
