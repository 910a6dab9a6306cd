"""Output parts and their ledger: what makes a shard's run restartable.

A part holds the outputs of one row group of the shard file. Its file is named by its
content, so that two writers of one part can't spoil each other's; its ledger entry, written
after it, says which file counts.
"""

from __future__ import annotations

import logging
import re
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final, Literal

import pyarrow as pa
import pyarrow.parquet as pq
from pydantic import BaseModel, ConfigDict, ValidationError

from batchllm_operator.engine import EngineOutput
from batchllm_operator.lake import Folder
from batchllm_operator.planner.plan import describe_file

_log = logging.getLogger(__name__)
_ENTRY_NAME: Final = re.compile(r"part-(\d{5,})\.json")

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


class PartEntry(BaseModel):
    """The ledger entry of a part."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    entry_version: Literal[1] = 1
    plan_id: str
    part_idx: int
    file: str
    sha256: str
    num_requests: int
    num_rows: int
    num_failed_rows: int
    num_logical_tokens: int
    """Prompt tokens of the rows that got a text, duplicates included."""
    num_prompt_tokens: int
    """Prompt tokens of the requests that got a text."""
    num_cached_tokens: int
    num_output_tokens: int
    engine_s: float
    """Seconds from the part before it (or the start of the stream) to this one."""


def write_part(
    folder: Folder,
    plan_id: str,
    part_idx: int,
    outputs: Sequence[EngineOutput],
    row_idxs: Mapping[int, Sequence[int]],
    engine_s: float,
) -> PartEntry:
    """Write a part's file, then its ledger entry, each in one step.

    Args:
        folder: the shard's run folder.
        plan_id: the plan that the part belongs to.
        part_idx: row group of the shard file.
        outputs: one for each request of the part, in any order.
        row_idxs: for each request_idx, the rows that it stands for.
        engine_s: see `PartEntry`.
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
        pq.write_table(pa.table(columns, schema=PART_SCHEMA), path, compression="zstd")
        sha256 = describe_file(path).sha256
        name = f"part-{part_idx:05d}-{sha256[:12]}.parquet"
        folder.publish_file(path, name)
    answered = [(o, len(r)) for o, r in zip(outputs, rows, strict=True) if o.error is None]
    num_rows = sum(map(len, rows))
    entry = PartEntry(
        plan_id=plan_id,
        part_idx=part_idx,
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
    folder.write_bytes(f"part-{part_idx:05d}.json", entry.model_dump_json(indent=1).encode())
    return entry


def read_ledger(folder: Folder, plan_id: str) -> dict[int, PartEntry]:
    """The parts of plan `plan_id` that are finished and whole, by part_idx, in order.

    An entry that can't be read, that belongs to another plan, or whose file is absent or
    altered, doesn't count; a warning says so, and the part will be generated again.
    """
    entries: dict[int, PartEntry] = {}
    for name in folder.find():
        if not (match := _ENTRY_NAME.fullmatch(name)):
            continue
        try:
            entry = PartEntry.model_validate_json(folder.read_bytes(name))
            whole = folder.sha256(entry.file) == entry.sha256
        except (ValidationError, FileNotFoundError) as error:
            _log.warning("%s/%s doesn't count: %s", folder.uri, name, type(error).__name__)
            continue
        if not whole or (entry.part_idx, entry.plan_id) != (int(match[1]), plan_id):
            reason = "belongs elsewhere" if whole else f"{entry.file} was altered"
            _log.warning("%s/%s doesn't count: %s", folder.uri, name, reason)
            continue
        entries[entry.part_idx] = entry
    return dict(sorted(entries.items()))
