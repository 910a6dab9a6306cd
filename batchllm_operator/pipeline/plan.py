"""The plan stage: a partition's rows become a persisted plan."""

from __future__ import annotations

import logging
import tempfile
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from batchllm_operator.errors import EmptyPartitionError, SpecError, StorageError
from batchllm_operator.lake import LakeTable, Snapshot, open_table
from batchllm_operator.pipeline.estimate import Target, estimate_cost, find_target, work_costs
from batchllm_operator.pipeline.output_lengths import (
    estimate_output_tokens,
    learn_output_lengths,
)
from batchllm_operator.pipeline.rows import Requests, Rows, check_keys, deduplicate, read_rows
from batchllm_operator.pipeline.stored_plan import StoredPlan, check_publisher, job_folder
from batchllm_operator.planner import (
    PrefixGroups,
    PrefixTree,
    assign_shards,
    build_prefix_tree,
    choose_prefixes,
    group_prefill_tokens,
    imbalance,
    num_processed_tokens,
    order_groups_by_subtree,
    split_large_groups,
)
from batchllm_operator.planner.plan import (
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
from batchllm_operator.prompts import load_tokenizer
from batchllm_operator.spec import SPEC_VERSION, JobSpec

_log = logging.getLogger(__name__)
_WORTH_A_WARNING = 1.2  # imbalance


def plan_job(spec: JobSpec, ds: str) -> StoredPlan:
    """Plan the job for partition `ds`, and persist the plan in the output table's folder.

    Nothing is written there before the whole plan stands. Equal inputs give equal bytes
    in the same folder, so planning again is harmless.

    Raises:
        SpecError: input and output are the same table or one lies in the other; or the spec
            names a column that the table lacks.
        TableError: the table or a column of it isn't there, or the output partition holds
            what another job or program wrote.
        KeyColumnError: keys aren't unique or are null; names up to ten.
        ModelError: the tokenizer can't be loaded, or refuses a prompt.
        StorageError: the input changed while it was read.
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
    check_columns(spec, table, snapshot)
    # A partition in the way would stop the commit; better to know before the GPU runs.
    check_publisher(open_table(spec.output.uri, spec.input.partition_column), spec, ds)
    with tempfile.TemporaryDirectory(prefix="batchllm-plan-") as spool:
        return _build(spec, ds, table, snapshot, Path(spool))


def _build(spec: JobSpec, ds: str, table: LakeTable, snapshot: Snapshot, spool: Path) -> StoredPlan:
    tokenizer = load_tokenizer(spec, ds)
    target = find_target(spec)
    rows = read_rows(spec, table, snapshot, tokenizer, spool / ROWS_FILE)
    where = f"table {table.uri}, partition {ds!r}"
    if table.snapshot(ds).files != snapshot.files:
        raise StorageError(f"{where}: changed while it was read; plan again")
    _check_rows(spec, rows, where)
    requests = deduplicate(rows, merge=spec.sampling.is_greedy)
    tree = build_prefix_tree(requests.tokens)
    choice = choose_prefixes(tree)
    learned = learn_output_lengths(spec, ds)
    output_tokens = estimate_output_tokens(spec, requests, learned)
    groups = _arrange(spec, requests, output_tokens, tree, choice.groups, target)
    shards, unevenness = _write_shards(spec, requests, output_tokens, groups, target, spool)
    counts = PlanCounts(
        num_rows=rows.num_rows,
        num_rejected_rows=rows.num_rejected,
        num_duplicate_rows=len(rows.row_idxs) - len(requests.tokens),
        num_requests=len(requests.tokens),
        num_groups=len(groups),
        num_shared_groups=int(np.count_nonzero(groups.sizes > 1)),
        num_logical_tokens=len(rows.token_ids),
        num_planned_tokens=num_processed_tokens(groups, requests.tokens.lengths),
        num_optimal_tokens=tree.num_distinct_prefix_tokens,
        num_algorithm_1_saved_tokens=choice.algorithm_1_saved_tokens,
        num_exact_saved_tokens=choice.exact_saved_tokens,
    )
    files = {name: describe_file(spool / name) for name in [ROWS_FILE, *(s.file for s in shards)]}
    manifest = PlanManifest(
        plan_id=compute_plan_id(spec, ds, tokenizer.model_version, files, learned),
        spec_version=SPEC_VERSION,
        spec=spec,
        spec_identity=spec.identity,
        ds=ds,
        input_uri=table.uri,
        input_files=tuple(
            SnapshotFile(name=file.name, size_bytes=file.size_bytes, version=file.version)
            for file in snapshot.files
        ),
        tokenizer_fingerprint=tokenizer.fingerprint,
        model_version=tokenizer.model_version,
        max_model_len=tokenizer.max_model_len,
        counts=counts,
        planned_saving_ratio=counts.planned_saving_ratio,
        optimal_saving_ratio=counts.optimal_saving_ratio,
        learned=learned,
        estimate=estimate_cost(target, requests, output_tokens, groups, len(shards)),
        imbalance=unevenness,
        files=files,
        shards=shards,
    )
    return _persist(manifest, files, spool)


def _check_rows(spec: JobSpec, rows: Rows, where: str) -> None:
    """Refuse keys that don't identify rows; warn of what the user will want to know now."""
    if rows.num_rows == 0:
        if spec.on_empty == "fail":
            raise EmptyPartitionError(f"{where}: has no rows (on_empty: fail)")
        _log.warning("%s has no rows: an empty partition will be committed", where)
    check_keys(rows.keys, spec.input.key, where)
    if rows.num_rejected:
        _log.warning(
            "%d of %d rows can't be prompted; the reasons will be in the output's error column",
            rows.num_rejected,
            rows.num_rows,
        )
    if rows.num_rejected > spec.max_failed_fraction * rows.num_rows:
        _log.warning(
            "that is more than max_failed_fraction %s allows: commit will refuse this plan",
            spec.max_failed_fraction,
        )


def check_columns(spec: JobSpec, table: LakeTable, snapshot: Snapshot) -> None:
    """Every column that the spec names must be there; say which field names it."""
    places = {
        "prompt.template": spec.prompt.columns,
        "input.key": spec.input.key,
        "output.carry": spec.output.carry,
        "input.filter": tuple(term.column for term in spec.input.filter),
        "planner.estimated_output_tokens": spec.planner.estimate_columns,
    }
    for place, columns in places.items():
        for column in columns:
            if column not in snapshot.schema.names:
                raise SpecError(
                    f"{place}: table {table.uri} has no column {column!r}; it has"
                    f" {', '.join(snapshot.schema.names)}"
                )
    for column in spec.planner.estimate_columns:
        kind = snapshot.schema.field(column).type
        if not pa.types.is_integer(kind):
            raise SpecError(
                f"planner.estimated_output_tokens: column {column!r} of table {table.uri} holds"
                f" {kind}, not integers"
            )


def _arrange(
    spec: JobSpec,
    requests: Requests,
    output_tokens: npt.NDArray[np.int64],
    tree: PrefixTree,
    groups: PrefixGroups,
    target: Target | None,
) -> PrefixGroups:
    """Cut groups too large for one shard, and put all in scheduling order (Eq. 4)."""
    if len(groups) == 0:
        return groups
    lengths = requests.tokens.lengths
    member_costs, prefix_costs = work_costs(target, groups, lengths, output_tokens)
    groups = split_large_groups(groups, member_costs, prefix_costs, spec.planner.num_shards)
    return groups.take(order_groups_by_subtree(groups, tree, output_tokens))


def _write_shards(
    spec: JobSpec,
    requests: Requests,
    output_tokens: npt.NDArray[np.int64],
    groups: PrefixGroups,
    target: Target | None,
    spool: Path,
) -> tuple[tuple[ShardInfo, ...], float]:
    """Deal the groups, in their order, out to shards of about equal work, and write these.

    Returns:
        The shards, and their imbalance.
    """
    if len(groups) == 0:
        return (), 1.0
    prefill = group_prefill_tokens(groups, requests.tokens.lengths)
    costs, prefix_costs = work_costs(target, groups, requests.tokens.lengths, output_tokens)
    costs = np.add.reduceat(costs[groups.member_idxs], groups.offsets[:-1]) + prefix_costs
    num_shards = min(spec.planner.num_shards, len(groups))
    shard_of_group = assign_shards(costs, num_shards)
    worst = imbalance(costs, shard_of_group, num_shards)
    if worst > _WORTH_A_WARNING:
        _log.warning("the largest shard has %.2f times the average work", worst)
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
                predicted_gpu_s=float(costs[group_ids].sum()) / 1e9 if target else None,
            )
        )
    return tuple(shards), worst


def _persist(manifest: PlanManifest, files: Mapping[str, DataFile], spool: Path) -> StoredPlan:
    """Copy the data files into the plan's folder, then the manifest, which completes it."""
    folder = job_folder(manifest.spec, manifest.ds).child(f"plan-{manifest.plan_id}")
    for name in files:
        folder.publish_file(spool / name, name)
    folder.write_bytes(MANIFEST_FILE, manifest.to_bytes())
    plan = StoredPlan(folder, manifest)
    plan.mark_current()
    return plan
