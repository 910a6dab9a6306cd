"""Output parts and their ledger: what makes a shard's run restartable.

A part holds the outputs of one row group of the shard file. Its file is named by its
content; its ledger entry, written after it, says which file counts. Both lie in the folder of
the attempt that made them, and neither is ever replaced.
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
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from batchllm_operator.artifacts.attempts import Attempt, attempt_name
from batchllm_operator.artifacts.manifest import describe_file
from batchllm_operator.engine import EngineOutput
from batchllm_operator.errors import FencedError
from batchllm_operator.lake import Folder, hash_files, read_files

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
"""One row per request; output columns are named as in the output table."""
# A commit reads thousands of parts, which so takes half the time, for 7 % more bytes: texts seldom
# repeat, and numbers of a part are too few to be worth the start of a decompressor.
_PARQUET_OPTIONS: Final[Mapping[str, Any]] = {
    "compression": {"generated_text": "zstd", "error": "zstd"},
    "use_dictionary": ["finish_reason", "error"],
    "write_statistics": False,
}


Count = Annotated[int, Field(ge=0, lt=1 << 63)]


class PartEntry(BaseModel):
    """The ledger entry of a part."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    entry_version: Literal[1, 2] = 2
    """Version 1, of releases without attempts, has neither `attempt` nor the range."""
    plan_id: str
    part_idx: Count
    attempt: Count = 0
    """Whose folder it lies in; 0 for the shard's own."""
    first_request_idx: Count | None = None
    last_request_idx: Count | None = None
    """The part's requests, both inclusive: `request_idx` counts through all shards."""
    file: str
    """Name in the attempt's folder."""
    sha256: Annotated[str, Field(pattern="^[0-9a-f]{64}$")]
    num_requests: Count
    num_rows: Count
    num_failed_rows: Count
    num_logical_tokens: Count
    """Prompt tokens of the rows that got a text, duplicates included."""
    num_prompt_tokens: Count
    """Prompt tokens of the requests that got a text."""
    num_cached_tokens: Count
    num_output_tokens: Count
    engine_s: Annotated[float, Field(ge=0)]
    """Seconds from the part before it (or the start of the stream) to this one."""

    @property
    def path(self) -> str:
        """Where the part's file lies, relative to the shard's run folder."""
        return _path(self.attempt, self.file)


def write_part(
    attempt: Attempt,
    plan_id: str,
    part_idx: int,
    outputs: Sequence[EngineOutput],
    row_idxs: Mapping[int, Sequence[int]],
    engine_s: float,
) -> PartEntry:
    """Write a part's file, then its ledger entry, each in one step.

    Args:
        attempt: who has generated it.
        plan_id: the plan that the part belongs to.
        part_idx: row group of the shard file.
        outputs: one for each request of the part, in any order; at least one.
        row_idxs: for each request_idx, the rows that it stands for.
        engine_s: see `PartEntry`.

    Raises:
        FencedError: a later attempt has begun: there is no entry, whatever became of the file.
    """
    outputs = sorted(outputs, key=lambda output: output.request_idx)
    rows = [list(row_idxs[output.request_idx]) for output in outputs]
    columns = {
        "request_idx": [o.request_idx for o in outputs],
        "row_idxs": rows,
        "generated_text": [o.text for o in outputs],
        "finish_reason": [o.finish_reason for o in outputs],
        "num_prompt_tokens": [o.num_prompt_tokens for o in outputs],
        "num_cached_tokens": [o.num_cached_tokens for o in outputs],
        "num_output_tokens": [o.num_output_tokens for o in outputs],
        "error": [o.error for o in outputs],
    }
    with tempfile.TemporaryDirectory(prefix="batchllm-part-") as spool:
        path = Path(spool) / "part.parquet"
        table = pa.table(columns, schema=PART_SCHEMA)
        pq.write_table(table, path, **_PARQUET_OPTIONS)
        sha256 = describe_file(path).sha256
        name = _file_name(part_idx, sha256)
        attempt.folder.publish_file(path, name)
    answered = [(o, len(r)) for o, r in zip(outputs, rows, strict=True) if o.error is None]
    num_rows = sum(map(len, rows))
    entry = PartEntry(
        plan_id=plan_id,
        part_idx=part_idx,
        attempt=attempt.number,
        first_request_idx=outputs[0].request_idx,
        last_request_idx=outputs[-1].request_idx,
        file=name,
        sha256=sha256,
        num_requests=len(outputs),
        num_rows=num_rows,
        num_failed_rows=num_rows - sum(count for _, count in answered),
        num_logical_tokens=sum(count * o.num_prompt_tokens for o, count in answered),
        num_prompt_tokens=sum(o.num_prompt_tokens for o, _ in answered),
        num_cached_tokens=sum(o.num_cached_tokens for o, _ in answered),
        num_output_tokens=sum(o.num_output_tokens for o, _ in answered),
        engine_s=round(engine_s, 3),
    )
    attempt.check_current()
    entry_name, data = f"part-{part_idx:05d}.json", entry.model_dump_json(indent=1).encode()
    if not attempt.folder.create(entry_name, data):
        raise FencedError(
            f"{attempt.folder.uri}/{entry_name}: another process has written it, as if it were the"
            " same attempt; does this storage know conditional writes (If-None-Match)?"
        )
    return entry


def read_ledger(
    folder: Folder, plan_id: str, known: Mapping[int, PartEntry] | None = None
) -> dict[int, PartEntry]:
    """The parts of a shard that can be trusted, by part_idx: of all attempts together.

    For each part that is the entry of the latest attempt whose file has its checksum. Entries
    that can't be read, that belong elsewhere, or whose file is absent or altered don't count; a
    warning says so.

    Args:
        folder: the shard's run folder.
        plan_id: the plan that the parts have to be of.
        known: what was found before; these parts aren't looked at again.
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
    """The entry at `path`, if it says what its place says."""
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
    """Those whose file is what was written, by part_idx."""
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


def _path(attempt: int, name: str) -> str:
    return f"{attempt_name(attempt)}/{name}" if attempt else name
