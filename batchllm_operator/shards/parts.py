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
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Any, Final, Literal, TypeVar

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from pydantic import Field

from batchllm_operator.answers import Answers
from batchllm_operator.engine import EngineOutput
from batchllm_operator.errors import FencedError, PlanError
from batchllm_operator.row_error import RowError
from batchllm_operator.shards.attempts import Attempt, attempt_name
from batchllm_operator.spec import JobSpec
from batchllm_operator.storage import Folder, hash_files, read_files
from batchllm_operator.stored_plan.counts import Count, Counts
from batchllm_operator.stored_plan.manifest import ERROR_FIELD, describe_file
from batchllm_operator.stored_plan.stored_json import StoredJson

_log = logging.getLogger(__name__)
_ENTRY_PATH: Final = re.compile(r"attempt-[0-9]{5,}/part-[0-9]{5,}\.json")

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


Entry = TypeVar("Entry", bound="StoredOutputs")


def part_schema(spec: JobSpec) -> pa.Schema:
    """The schema of a job's parts."""
    return pa.schema([*PART_SCHEMA, *Answers.of(spec).raw_fields])


class StoredOutputs(StoredJson, Counts):
    """The entry of a file of outputs, which lies beside it in an attempt's folder."""

    plan_id: str
    attempt: Count
    """The attempt whose folder it is in."""
    sha256: Annotated[str, Field(pattern="^[0-9a-f]{64}$")]
    """Of the file."""

    @property
    @abstractmethod
    def stem(self) -> str:
        """The beginning of the file's name, and the entry's name."""

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

    entry_version: Literal[1] = 1
    part_idx: Count

    @property
    def stem(self) -> str:
        return f"part-{self.part_idx:05d}"


def write_part(
    attempt: Attempt,
    plan_id: str,
    part_idx: int,
    outputs: Sequence[EngineOutput],
    row_idxs: Mapping[int, Sequence[int]],
    engine_s: float,
    schema: pa.Schema = PART_SCHEMA,
) -> PartEntry:
    """Write a part's file, then its ledger entry, each in one step.

    `outputs` has one output for each request of the part, in any order, at least one; for the
    other arguments see `write_outputs`.

    Raises:
        FencedError: a later attempt has begun; no entry is written, but the file may be.
    """
    in_order = sorted(outputs, key=lambda output: output.request_idx)
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
    """Write a file of outputs, then the entry by which it counts; neither replaces one.

    Args:
        kind, fields: of the entry.
        row_idxs: the rows of each request_idx.
        engine_s: see `Counts`.
        schema: of the file; the job's `part_schema`, and `columns`.
        columns: further columns.

    Raises:
        FencedError: a later attempt has begun, or another process has written the entry.
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
    """The trusted parts of a shard, by part_idx, of all attempts together.

    For each part this is the entry of the latest attempt whose file has its checksum. Entries that
    are unreadable, belong elsewhere, or whose file is absent or altered don't count, with a
    warning.
    """
    trusted: dict[int, PartEntry] = {}
    contents = read_files(folder, filter(_ENTRY_PATH.fullmatch, folder.find()))
    candidates: dict[int, list[PartEntry]] = {}
    for path, data in contents.items():
        if (entry := parse_entry(PartEntry, folder, path, data, plan_id)) is not None:
            candidates.setdefault(entry.part_idx, []).append(entry)
    for entries in candidates.values():
        entries.sort(key=lambda entry: entry.attempt)
    while candidates:
        latest = [entries.pop() for entries in candidates.values()]
        trusted |= {entry.part_idx: entry for entry in whole_files(folder, latest)}
        candidates = {idx: e for idx, e in candidates.items() if e and idx not in trusted}
    return dict(sorted(trusted.items()))


def parse_entry(
    kind: type[Entry], folder: Folder, path: str, data: bytes, plan_id: str
) -> Entry | None:
    """The entry at `path`; None, with a warning, if it can't be read or belongs elsewhere."""
    try:
        entry = kind.from_bytes(data, source=f"{folder.uri}/{path}")
    except PlanError as error:
        _log.warning("%s; it doesn't count", error)
        return None
    if (entry.plan_id, entry.entry_path) != (plan_id, path):
        _log.warning("%s/%s doesn't count: it belongs elsewhere", folder.uri, path)
        return None
    return entry


def whole_files(folder: Folder, entries: Iterable[Entry]) -> list[Entry]:
    """Entries whose file has its checksum; warns of the others."""
    entries = list(entries)
    found = hash_files(folder, (entry.path for entry in entries))
    whole = []
    for entry in entries:
        if found.get(entry.path) == entry.sha256:
            whole.append(entry)
        else:
            how = "was altered" if entry.path in found else "is missing"
            _log.warning("%s/%s doesn't count: it %s", folder.uri, entry.path, how)
    return whole


def errors_in(table: pa.Table) -> Iterator[tuple[RowError, list[int]]]:
    """The error and the rows of each failed request in a table of outputs."""
    failed = table.filter(pc.is_valid(table["error"]))
    errors = (RowError(**error) for error in failed["error"].to_pylist())
    yield from zip(errors, failed["row_idxs"].to_pylist(), strict=True)
