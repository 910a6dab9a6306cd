"""Output parts and their ledger: what makes a shard's run restartable.

A part holds the outputs of one row group of the shard file. Its file is named by its content; its
ledger entry, written afterwards, says which file counts. Both are in the attempt's folder, and
neither is ever replaced.
"""

from __future__ import annotations

import logging
import re
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Final, Literal

import pyarrow as pa
import pyarrow.parquet as pq
from pydantic import Field, ValidationError

from batchllm_operator.answers import Answers
from batchllm_operator.artifacts.attempts import Attempt, attempt_name
from batchllm_operator.artifacts.counts import Count, Counts
from batchllm_operator.artifacts.manifest import describe_file
from batchllm_operator.engine import EngineOutput
from batchllm_operator.errors import FencedError
from batchllm_operator.lake import Folder, hash_files, read_files
from batchllm_operator.spec import JobSpec

_log = logging.getLogger(__name__)
_ENTRY_PATH: Final = re.compile(r"(?:attempt-([0-9]{5,})/)?part-([0-9]{5,})\.json")

PART_SCHEMA: Final = pa.schema(
    [
        pa.field("request_idx", pa.int64(), nullable=False),
        pa.field("row_idxs", pa.list_(pa.int64()), nullable=False),
        pa.field("generated_text", pa.string()),
        pa.field("finish_reason", pa.string()),
        pa.field("num_prompt_tokens", pa.int32()),
        pa.field("num_cached_tokens", pa.int32()),
        pa.field("num_output_tokens", pa.int32()),
        pa.field("error", pa.string()),
    ]
)
"""One row per request; output columns are named as in the output table. Those of
`Answers.raw_fields` are added."""
# Halves the time to read thousands of parts in a commit, for 7 % more bytes: texts seldom repeat,
# and a part has too few numbers to be worth starting a decompressor.
_PARQUET_OPTIONS: Final[Mapping[str, Any]] = {
    "compression": {"generated_text": "zstd", "error": "zstd"},
    "use_dictionary": ["finish_reason", "error"],
    "write_statistics": False,
}


def part_schema(spec: JobSpec) -> pa.Schema:
    """The schema of a job's parts."""
    return pa.schema([*PART_SCHEMA, *Answers.of(spec).raw_fields])


class PartEntry(Counts):
    """The ledger entry of a part."""

    entry_version: Literal[1, 2] = 2
    """Version 1, of releases without attempts, has neither `attempt` nor the requests' range."""
    plan_id: str
    part_idx: Count
    attempt: Count = 0
    """The attempt whose folder it is in; 0 for the shard's own."""
    first_request_idx: Count | None = None
    last_request_idx: Count | None = None
    """The part's requests, both inclusive: `request_idx` counts through all shards."""
    file: str
    """File name in the attempt's folder."""
    sha256: Annotated[str, Field(pattern="^[0-9a-f]{64}$")]

    @property
    def path(self) -> str:
        return f"{attempt_name(self.attempt)}/{self.file}" if self.attempt else self.file


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

    `outputs` has one output for each request of the part, in any order, at least one; `row_idxs`
    has the rows of each request_idx. For `engine_s` see `Counts`; `schema` is the job's
    `part_schema`.

    Raises:
        FencedError: a later attempt has begun; no entry is written, but the file may be.
    """
    outputs = sorted(outputs, key=lambda output: output.request_idx)
    rows = [list(row_idxs[output.request_idx]) for output in outputs]
    with tempfile.TemporaryDirectory(prefix="batchllm-part-") as spool:
        path = Path(spool) / "part.parquet"
        pq.write_table(_table(outputs, rows, schema), path, **_PARQUET_OPTIONS)
        sha256 = describe_file(path).sha256
        name = _file_name(part_idx, sha256)
        attempt.folder.publish_file(path, name)
    counts = Counts.of(zip(outputs, map(len, rows), strict=True), engine_s)
    entry = PartEntry(
        plan_id=plan_id,
        part_idx=part_idx,
        attempt=attempt.number,
        first_request_idx=outputs[0].request_idx,
        last_request_idx=outputs[-1].request_idx,
        file=name,
        sha256=sha256,
        **dict(counts),
    )
    attempt.check_current()
    entry_name, data = f"part-{part_idx:05d}.json", entry.model_dump_json(indent=1).encode()
    if not attempt.folder.create(entry_name, data):
        raise FencedError(
            f"{attempt.folder.uri}/{entry_name}: another process has written it, as if it were the"
            " same attempt; does this storage know conditional writes (If-None-Match)?"
        )
    return entry


def _table(outputs: Sequence[EngineOutput], rows: list[list[int]], schema: pa.Schema) -> pa.Table:
    columns = {"row_idxs": rows, "generated_text": [output.text for output in outputs]}
    for name in schema.names:
        if name in columns:
            continue
        if name in PART_SCHEMA.names:
            columns[name] = [getattr(output, name) for output in outputs]
        else:
            columns[name] = [output.raw.get(name) for output in outputs]
    return pa.table(columns, schema=schema)


def read_ledger(
    folder: Folder, plan_id: str, known: Mapping[int, PartEntry] | None = None
) -> dict[int, PartEntry]:
    """The trusted parts of a shard, by part_idx, of all attempts together.

    For each part this is the entry of the latest attempt whose file has its checksum. Entries that
    are unreadable, belong elsewhere, or whose file is absent or altered don't count, with a
    warning. `known` parts aren't checked again.
    """
    trusted = dict(known or {})
    matches = filter(None, map(_ENTRY_PATH.fullmatch, folder.find()))
    contents = read_files(folder, (m[0] for m in matches if int(m[2]) not in trusted))
    candidates: dict[int, list[PartEntry]] = {}
    for path, data in contents.items():
        if (entry := _parse(folder, path, data, plan_id)) is not None:
            candidates.setdefault(entry.part_idx, []).append(entry)
    for entries in candidates.values():
        entries.sort(key=lambda entry: entry.attempt)
    while candidates:
        latest = {part_idx: entries.pop() for part_idx, entries in candidates.items()}
        trusted |= _whole(folder, latest.values())
        candidates = {idx: e for idx, e in candidates.items() if e and idx not in trusted}
    return dict(sorted(trusted.items()))


def _parse(folder: Folder, path: str, data: bytes, plan_id: str) -> PartEntry | None:
    """The entry at `path`, if it matches its path."""
    match = _ENTRY_PATH.fullmatch(path)
    assert match is not None, "only paths of entries are read"
    try:
        entry = PartEntry.model_validate_json(data)
    except ValidationError:
        _log.warning("%s/%s doesn't count: it can't be read", folder.uri, path)
        return None
    expected = (plan_id, int(match[1] or 0), int(match[2]), _file_name(int(match[2]), entry.sha256))
    if (entry.plan_id, entry.attempt, entry.part_idx, entry.file) != expected:
        _log.warning("%s/%s doesn't count: it belongs elsewhere", folder.uri, path)
        return None
    return entry


def _whole(folder: Folder, entries: Iterable[PartEntry]) -> dict[int, PartEntry]:
    """Entries whose file has its checksum, by part_idx."""
    entries = list(entries)
    found = hash_files(folder, (entry.path for entry in entries))
    whole = {}
    for entry in entries:
        if found.get(entry.path) == entry.sha256:
            whole[entry.part_idx] = entry
        else:
            how = "was altered" if entry.path in found else "is missing"
            _log.warning("%s/%s doesn't count: it %s", folder.uri, entry.path, how)
    return whole


def _file_name(part_idx: int, sha256: str) -> str:
    return f"part-{part_idx:05d}-{sha256[:12]}.parquet"
