"""The plan stage: a partition's rows become a persisted plan."""

from __future__ import annotations

import array
import logging
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from batchllm_operator.errors import EmptyPartitionError, KeyColumnError, SpecError
from batchllm_operator.lake import LakeTable, Snapshot, open_table
from batchllm_operator.pipeline.stored_plan import StoredPlan, job_folder
from batchllm_operator.planner import (
    PrefixGroups,
    TokenTable,
    assign_shards,
    build_prefix_tree,
    group_prefill_tokens,
    maximize_reuse,
    order_groups,
)
from batchllm_operator.planner.plan import (
    ERROR_COLUMN,
    MANIFEST_FILE,
    ROWS_FILE,
    DataFile,
    PlanCounts,
    PlanManifest,
    ShardInfo,
    SnapshotFile,
    compute_plan_id,
    describe_file,
    shard_file,
    write_shard,
)
from batchllm_operator.progress import Progress
from batchllm_operator.prompts import (
    PromptRenderer,
    Tokenizer,
    first_occurrences,
    length_fault,
    load_tokenizer,
)
from batchllm_operator.spec import SPEC_VERSION, JobSpec

_log = logging.getLogger(__name__)
_MAX_NAMED: Final = 10

Ints = npt.NDArray[np.int64]


@dataclass(slots=True)
class _Rows:
    """What is gathered while the rows stream by."""

    num_rows: int = 0
    keys: list[pa.RecordBatch] = field(default_factory=list)
    row_idxs: array.array[int] = field(default_factory=lambda: array.array("q"))
    """Rows that can be prompted."""
    token_ids: array.array[int] = field(default_factory=lambda: array.array("i"))
    offsets: array.array[int] = field(default_factory=lambda: array.array("q", [0]))

    def tokens(self) -> TokenTable:
        return TokenTable(
            np.frombuffer(self.token_ids, dtype=np.int32),
            np.frombuffer(self.offsets, dtype=np.int64),
        )


@dataclass(frozen=True, slots=True)
class _Requests:
    """Distinct prompts, and the rows that each stands for."""

    tokens: TokenTable
    row_idxs: Ints
    """int64 [num_rows that can be prompted], the rows of request 0, of request 1, ..."""
    offsets: Ints
    """int64 [num_requests + 1] into `row_idxs`."""

    def rows_of(self, idx: int) -> Ints:
        return self.row_idxs[self.offsets[idx] : self.offsets[idx + 1]]


def plan_job(spec: JobSpec, ds: str) -> StoredPlan:
    """Plan the job for partition `ds`, and persist the plan in the output table's folder.

    Nothing is written there before the whole plan stands. Equal inputs give equal bytes
    in the same folder, so planning again is harmless.

    Raises:
        SpecError: input and output are the same table or one lies in the other; or the spec
            names a column that the table lacks.
        TableError: the table or a column of it isn't there; the output partition is foreign.
        KeyColumnError: keys aren't unique or are null; names up to ten.
        ModelError: the tokenizer can't be loaded.
        EmptyPartitionError: there are no rows and the spec says `on_empty: fail`.
    """
    source, target = f"{spec.input.uri}/", f"{spec.output.uri}/"
    if source.startswith(target) or target.startswith(source):
        raise SpecError(
            f"output.uri: {spec.output.uri} and the input table {spec.input.uri} must be apart:"
            " one would be read or overwritten as a part of the other"
        )
    if not ds:
        raise SpecError("ds: is empty; name a partition, such as 2026-01-31")
    table = open_table(spec.input.uri, spec.input.partition_column)
    snapshot = table.snapshot(ds)
    _check_columns(spec, table, snapshot)
    # A foreign partition in the way would stop the commit; better to know before the GPU runs.
    open_table(spec.output.uri, spec.input.partition_column).published_metadata(ds)
    with tempfile.TemporaryDirectory(prefix="batchllm-plan-") as spool:
        return _build(spec, ds, table, snapshot, Path(spool))


def _build(spec: JobSpec, ds: str, table: LakeTable, snapshot: Snapshot, spool: Path) -> StoredPlan:
    tokenizer = load_tokenizer(spec)
    rows = _read_rows(spec, table, snapshot, tokenizer, spool / ROWS_FILE)
    where = f"table {table.uri}, partition {ds!r}"
    if rows.num_rows == 0:
        if spec.on_empty == "fail":
            raise EmptyPartitionError(f"{where}: has no rows (on_empty: fail)")
        _log.warning("%s has no rows: an empty partition will be committed", where)
    _check_keys(rows.keys, spec.input.key, where)
    num_rejected = rows.num_rows - len(rows.row_idxs)
    if num_rejected:
        _log.warning(
            "%d of %d rows can't be prompted; see %s", num_rejected, rows.num_rows, ROWS_FILE
        )

    requests = _deduplicate(rows, merge=spec.sampling.is_greedy)
    tree = build_prefix_tree(requests.tokens)
    groups = maximize_reuse(tree)
    shards = _write_shards(spec, requests, groups, spool)
    counts = PlanCounts(
        num_rows=rows.num_rows,
        num_rejected_rows=num_rejected,
        num_duplicate_rows=len(rows.row_idxs) - len(requests.tokens),
        num_requests=len(requests.tokens),
        num_groups=len(groups),
        num_shared_groups=int(np.count_nonzero(groups.sizes > 1)),
        num_logical_tokens=len(rows.token_ids),
        num_planned_tokens=sum(shard.num_prefill_tokens for shard in shards),
        num_optimal_tokens=tree.num_distinct_prefix_tokens,
    )
    files = {name: describe_file(spool / name) for name in [ROWS_FILE, *(s.file for s in shards)]}
    manifest = PlanManifest(
        plan_id=compute_plan_id(spec, ds, files),
        spec_version=SPEC_VERSION,
        spec=spec,
        spec_identity=spec.identity,
        ds=ds,
        input_uri=table.uri,
        input_files=tuple(
            SnapshotFile(name=f.name, size_bytes=f.size_bytes, version=f.version)
            for f in snapshot.files
        ),
        tokenizer_fingerprint=tokenizer.fingerprint,
        max_model_len=tokenizer.max_model_len,
        counts=counts,
        planned_saving_ratio=counts.planned_saving_ratio,
        optimal_saving_ratio=counts.optimal_saving_ratio,
        files=files,
        shards=shards,
    )
    return _persist(manifest, files, spool)


def _check_columns(spec: JobSpec, table: LakeTable, snapshot: Snapshot) -> None:
    """Every column that the spec names must be there; say which field names it."""
    places = {
        "prompt.template": spec.prompt.columns,
        "input.key": spec.input.key,
        "output.carry": spec.output.carry,
        "input.filter": tuple(term.column for term in spec.input.filter),
    }
    for place, columns in places.items():
        for column in columns:
            if column not in snapshot.schema.names:
                raise SpecError(
                    f"{place}: table {table.uri} has no column {column!r}; it has"
                    f" {', '.join(snapshot.schema.names)}"
                )


def _read_rows(
    spec: JobSpec, table: LakeTable, snapshot: Snapshot, tokenizer: Tokenizer, path: Path
) -> _Rows:
    """Stream the rows into token ids, and their keys and faults into `path`."""
    schema = pa.schema(
        [
            *(snapshot.schema.field(name) for name in spec.kept_columns),
            pa.field(ERROR_COLUMN, pa.string()),
        ]
    )
    renderer = PromptRenderer(spec.prompt)
    rows = _Rows()
    with (
        pq.ParquetWriter(path, schema, compression="zstd") as writer,
        Progress("read and tokenize", sum(file.num_rows for file in snapshot.files)) as progress,
    ):
        for batch in table.scan(snapshot, spec.input_columns, spec.input.filter):
            if batch.num_rows == 0:
                continue
            rendered = renderer.render(batch)
            errors = _tokenize(rendered.texts, rendered.errors, tokenizer, rows)
            columns = [batch.column(name) for name in spec.kept_columns]
            writer.write_table(
                pa.Table.from_arrays([*columns, pa.array(errors, pa.string())], schema=schema)
            )
            rows.keys.append(_select_keys(batch, spec.input.key))
            rows.num_rows += batch.num_rows
            progress.advance(batch.num_rows, f"{len(rows.token_ids)} tokens")
        progress.complete()  # a filter leaves rows out
    return rows


def _select_keys(batch: pa.RecordBatch, key: tuple[str, ...]) -> pa.RecordBatch:
    """The key columns, decoded: dictionaries of two batches can't be compared by code."""
    columns = [batch.column(name) for name in key]
    return pa.RecordBatch.from_arrays(
        [c.dictionary_decode() if pa.types.is_dictionary(c.type) else c for c in columns],
        names=list(key),
    )


def _tokenize(
    texts: list[str | None], errors: list[str | None], tokenizer: Tokenizer, rows: _Rows
) -> list[str | None]:
    """Add the prompts of a batch to `rows`; return its errors, too long prompts included."""
    errors = list(errors)
    idxs = [idx for idx, text in enumerate(texts) if text is not None]
    encoded = tokenizer.encode([text for text in texts if text is not None])
    for idx, token_ids in zip(idxs, encoded, strict=True):
        errors[idx] = length_fault(len(token_ids), tokenizer.max_model_len)
        if errors[idx] is None:
            rows.row_idxs.append(rows.num_rows + idx)
            rows.token_ids.extend(token_ids)
            rows.offsets.append(len(rows.token_ids))
    return errors


def _check_keys(batches: list[pa.RecordBatch], key: tuple[str, ...], where: str) -> None:
    if not batches:
        return
    keys = pa.Table.from_batches(batches)
    for name in key:
        nulls = np.flatnonzero(keys.column(name).is_null().to_numpy())
        if len(nulls):
            raise KeyColumnError(
                f"{where}: key column {name!r} is null in {len(nulls)} rows, such as row"
                f" {', '.join(map(str, nulls[:_MAX_NAMED]))} (counted from 0)"
            )
    try:
        counted = keys.group_by(list(key), use_threads=False).aggregate([([], "count_all")])
    except pa.ArrowNotImplementedError as error:
        raise KeyColumnError(f"{where}: key {', '.join(key)} can't be compared: {error}") from error
    repeated = counted.filter(pa.compute.greater(counted["count_all"], 1))
    if repeated.num_rows:
        named = ", ".join(
            " / ".join(repr(row[name]) for name in key)
            for row in repeated.slice(0, _MAX_NAMED).to_pylist()
        )
        more = (
            f" and {repeated.num_rows - _MAX_NAMED} more" if repeated.num_rows > _MAX_NAMED else ""
        )
        raise KeyColumnError(
            f"{where}: key ({', '.join(key)}) isn't unique: {named}{more} occur more than once"
        )


def _deduplicate(rows: _Rows, *, merge: bool) -> _Requests:
    """One request per distinct prompt if `merge`, else one per row."""
    tokens, row_idxs = rows.tokens(), np.frombuffer(rows.row_idxs, dtype=np.int64)
    if not merge:
        return _Requests(tokens, row_idxs, np.arange(len(row_idxs) + 1, dtype=np.int64))
    first = first_occurrences(tokens)
    kept = np.flatnonzero(first == np.arange(len(first)))
    by_request = np.argsort(first, kind="stable")  # rows of a request adjacent, in input order
    ends = np.searchsorted(first[by_request], kept, side="right")
    offsets = np.concatenate([[0], ends]).astype(np.int64)
    return _Requests(tokens.take(kept), row_idxs[by_request], offsets)


def _write_shards(
    spec: JobSpec, requests: _Requests, groups: PrefixGroups, spool: Path
) -> tuple[ShardInfo, ...]:
    """Order the groups (Eq. 4), deal them out to shards, and write these."""
    if len(groups) == 0:
        return ()
    lengths = requests.tokens.lengths
    output_tokens = np.full(
        len(lengths), spec.planner.estimated_output_tokens or spec.sampling.max_tokens, np.int64
    )
    groups = groups.take(order_groups(groups, lengths, output_tokens))
    prefill = group_prefill_tokens(groups, lengths)
    decode = np.add.reduceat(output_tokens[groups.member_idxs], groups.offsets[:-1])
    shard_of_group = assign_shards(
        (prefill + decode).astype(np.float64), min(spec.planner.num_shards, len(groups))
    )
    shards: list[ShardInfo] = []
    num_before = 0
    for shard_idx in range(int(shard_of_group.max()) + 1):
        group_ids = np.flatnonzero(shard_of_group == shard_idx)
        chosen = groups.take(group_ids)
        row_idxs = [requests.rows_of(idx) for idx in chosen.member_idxs]
        name = shard_file(shard_idx)
        num_parts = write_shard(
            spool / name,
            requests.tokens,
            request_idx_start=num_before,
            prompt_idxs=chosen.member_idxs,
            group_ids=np.repeat(group_ids, chosen.sizes),
            num_prefix_tokens=np.repeat(chosen.num_prefix_tokens, chosen.sizes),
            row_idxs=row_idxs,
            part_rows=spec.planner.part_rows,
        )
        num_before += chosen.num_prompts
        shards.append(
            ShardInfo(
                file=name,
                num_groups=len(chosen),
                num_requests=chosen.num_prompts,
                num_rows=sum(map(len, row_idxs)),
                num_parts=num_parts,
                num_prefill_tokens=int(prefill[group_ids].sum()),
            )
        )
    return tuple(shards)


def _persist(manifest: PlanManifest, files: Mapping[str, DataFile], spool: Path) -> StoredPlan:
    """Copy the data files into the plan's folder, then the manifest, which completes it."""
    folder = job_folder(manifest.spec, manifest.ds).child(f"plan-{manifest.plan_id}")
    for name in files:
        folder.publish_file(spool / name, name)
    folder.write_bytes(MANIFEST_FILE, manifest.to_bytes())
    return StoredPlan(folder, manifest)
