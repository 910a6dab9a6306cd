"""Output lengths of a committed plan by group, from which later plans learn (ADR 10)."""

import logging
import tempfile
from collections.abc import Sequence
from hashlib import blake2b
from pathlib import Path
from typing import Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from batchllm_operator.errors import PlanError
from batchllm_operator.prefixes import NO_HASH
from batchllm_operator.shards.joining import FinishedRound
from batchllm_operator.shards.parts import ShardParts
from batchllm_operator.spec import JobSpec
from batchllm_operator.stored_plan.manifest import GROUPS_FILE, GROUPS_SCHEMA
from batchllm_operator.stored_plan.parquet_files import PlanFile
from batchllm_operator.stored_plan.shard_files import SHARD_SCHEMA
from batchllm_operator.stored_plan.stored_plan import StoredPlan

LENGTHS_FILE: Final = "lengths.parquet"
LENGTHS_SCHEMA: Final = pa.schema(
    [
        pa.field("prefix_hash", pa.int64(), nullable=False),
        pa.field("num_rows", pa.int64(), nullable=False),
        pa.field("num_output_tokens", pa.int64(), nullable=False),
    ]
)
"""A row for each hash in `GROUPS_FILE`, ascending: rows of its groups with an answer, at least one,
and tokens of their outputs."""
_IDS: Final = pa.schema([SHARD_SCHEMA.field("request_idx"), SHARD_SCHEMA.field("group_id")])
_log = logging.getLogger(__name__)


def question_salts(spec: JobSpec) -> list[int]:
    """What tells the groups' hashes of each question apart, by its prompt's name: an exclusive or
    with it leaves a hash in its range."""
    names = (blake2b(name.encode(), digest_size=8).digest() for name in spec.prompts)
    return [int.from_bytes(name) >> 2 for name in names] or [0]


def write_lengths(rounds: Sequence[FinishedRound]) -> None:
    """Write `LENGTHS_FILE` of the last round's plan, if plans keep hashes of their groups.

    Only estimates depend on it, so a damaged file of a plan costs no more than a warning.
    """
    plan = rounds[-1].plan
    if GROUPS_FILE not in plan.manifest.files:
        return
    try:
        tables = [_lengths(each.plan, each.shards) for each in rounds]
    except (PlanError, OSError, pa.ArrowException, IndexError) as error:
        _log.warning("later plans can't learn output lengths by group: %s", error)
        return
    with tempfile.TemporaryDirectory(prefix="batchllm-lengths-") as folder:
        path = Path(folder) / LENGTHS_FILE
        # A question's hashes are those of one round.
        table = pa.concat_tables(tables).sort_by("prefix_hash")
        pq.write_table(table, path, compression="zstd")
        plan.folder.publish_file(path, LENGTHS_FILE)


def _lengths(plan: StoredPlan, shards: Sequence[ShardParts]) -> pa.Table:
    num_groups, salts = plan.manifest.counts.num_groups, question_salts(plan.manifest.spec)
    num_rows, num_tokens = np.zeros((2, len(salts), num_groups), dtype=np.int64)
    for shard_idx, shard in enumerate(shards):
        info = plan.shard(shard_idx)
        # The checksum isn't verified: most of the file is prompts, which aren't read.
        with plan.folder.open_file(info.file, read_ahead=False) as file:
            where = f"plan {plan.folder.uri}: {info.file}"
            stored = PlanFile(file, where, _IDS, info.num_requests).read(columns=_IDS.names)
        first_request, group_ids = stored["request_idx"][0].as_py(), stored["group_id"].to_numpy()
        for part in shard.parts(["request_idx", "row_idxs", "num_output_tokens", "error"]):
            answered = part.filter(pc.is_null(part["error"]))
            groups = group_ids[answered["request_idx"].to_numpy() - first_request]
            sizes = pc.list_value_length(answered["row_idxs"]).to_numpy().astype(np.int64)
            asked = pc.list_element(answered["row_idxs"], 0).to_numpy() % len(salts)
            np.add.at(num_rows, (asked, groups), sizes)
            added = sizes * answered["num_output_tokens"].to_numpy()
            np.add.at(num_tokens, (asked, groups), added)
    with plan.open_parquet(GROUPS_FILE, GROUPS_SCHEMA, num_groups) as file:
        stored = [column.combine_chunks() for column in file.read().columns]
    hashes = np.stack([column.fill_null(NO_HASH).to_numpy() for column in stored])
    # By column of hashes, question and group.
    is_known = (hashes[:, np.newaxis] != NO_HASH) & (num_rows > 0)
    salted = hashes[:, np.newaxis] ^ np.array(salts)[:, np.newaxis]
    distinct, idxs = np.unique(salted[is_known], return_inverse=True)
    columns = [distinct]
    for of_groups in (num_rows, num_tokens):
        of_known = np.broadcast_to(of_groups, is_known.shape)[is_known]
        sums = np.bincount(idxs, of_known, len(distinct))
        columns.append(sums.astype(np.int64))
    return pa.table(columns, schema=LENGTHS_SCHEMA)
