"""The plan stage: a partition's rows become a persisted plan."""

from __future__ import annotations

import errno
import logging
import os
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from batchllm_operator.errors import EmptyPartitionError, SpecError, StorageError
from batchllm_operator.lake import LakeTable, Snapshot, open_table
from batchllm_operator.pipeline.estimate import Target, estimate_cost, find_target, work_costs
from batchllm_operator.pipeline.group_lengths import hash_prefixes, write_groups
from batchllm_operator.pipeline.keys import check_keys
from batchllm_operator.pipeline.memory import MemoryBudget
from batchllm_operator.pipeline.output_lengths import (
    Learned,
    estimate_output_tokens,
    learn_output_lengths,
)
from batchllm_operator.pipeline.rows import Rows, read_rows
from batchllm_operator.pipeline.stored_plan import StoredPlan, check_publisher, job_folder
from batchllm_operator.planner import (
    Advance,
    Phase,
    PrefixGroups,
    PrefixSearch,
    PromptStore,
    RankedPrompts,
    Requests,
    assign_shards,
    choose_prefixes,
    group_prefill_tokens,
    imbalance,
    make_requests,
    num_processed_tokens,
    order_groups_by_subtree,
    split_large_groups,
)
from batchllm_operator.planner.plan import (
    GROUPS_FILE,
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
from batchllm_operator.prompts import TokenIdsDifferError, Tokenizer, load_tokenizer
from batchllm_operator.spec import SPEC_VERSION, JobSpec

_log = logging.getLogger(__name__)
_WORTH_A_WARNING: Final = 1.2  # imbalance
_PROMPTS_FILE: Final = "prompts.bin"
_STEPS: Final = ("tree built", "prefixes chosen", "outputs estimated", "groups ordered")
_FULL: Final = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})


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
    tokenizer = load_tokenizer(spec, ds)
    try:
        return _build_in_spool(spec, ds, table, snapshot, tokenizer)
    except TokenIdsDifferError as error:  # it won't happen again
        _log.warning("%s: planning starts again", error)
        return _build_in_spool(spec, ds, table, snapshot, tokenizer)


def _build_in_spool(
    spec: JobSpec, ds: str, table: LakeTable, snapshot: Snapshot, tokenizer: Tokenizer
) -> StoredPlan:
    """Build the plan with a folder for temporary files, which is gone afterwards.

    Raises:
        TokenIdsDifferError: see `Tokenizer.encode`.
    """
    with tempfile.TemporaryDirectory(prefix="batchllm-plan-") as spool, _full_disk_named(spool):
        return _build(spec, ds, table, snapshot, tokenizer, Path(spool))


@contextmanager
def _full_disk_named(spool: str) -> Iterator[None]:
    """Say of a full disk which one it is, and how to use another."""
    try:
        yield
    except OSError as error:
        if error.errno not in _FULL:
            raise
        raise StorageError(
            f"{spool}: no room for the plan's temporary files ({os.strerror(error.errno)}); they"
            " are removed again; free some space, or set TMPDIR to a folder on a larger disk"
        ) from error


def _build(
    spec: JobSpec,
    ds: str,
    table: LakeTable,
    snapshot: Snapshot,
    tokenizer: Tokenizer,
    spool: Path,
) -> StoredPlan:
    target = find_target(spec)
    budget = MemoryBudget.from_now(spec.planner.memory_budget_bytes)
    num_rows = sum(file.num_rows for file in snapshot.files)
    if not spec.input.filter:  # which may leave any number of rows out
        budget.check(num_rows)
    with PromptStore(spool / _PROMPTS_FILE) as prompts:
        rows = Rows(prompts, PrefixSearch(spool, memory=budget.search_memory(num_rows)))
        read_rows(spec, table, snapshot, tokenizer, rows, spool / ROWS_FILE)
        where = f"table {table.uri}, partition {ds!r}"
        if table.snapshot(ds).files != snapshot.files:
            raise StorageError(f"{where}: changed while it was read; plan again")
        _check_rows(spec, rows, where)
        budget.check(len(prompts), rows.search.min_merge_bytes)
        requests, ranked = _find_prefixes(spec, rows)
        check_keys(
            spool / ROWS_FILE,
            spec.input.key,
            where,
            spool,
            budget.search_memory(len(prompts), while_read=False),
            _shown("keys"),
        )
        learned = learn_output_lengths(spec, ds)
        chosen = _choose(spec, requests, ranked, learned, target)
        shards, unevenness = _write_shards(spec, requests, chosen, target, spool)
    counts = PlanCounts(
        num_rows=rows.num_rows,
        num_rejected_rows=rows.num_rejected,
        num_duplicate_rows=len(prompts) - len(requests),
        num_requests=len(requests),
        num_groups=len(chosen.groups),
        num_shared_groups=int(np.count_nonzero(chosen.groups.sizes > 1)),
        num_logical_tokens=prompts.num_tokens,
        num_planned_tokens=num_processed_tokens(chosen.groups, requests.lengths),
        num_optimal_tokens=chosen.num_optimal_tokens,
        num_algorithm_1_saved_tokens=chosen.num_algorithm_1_saved_tokens,
        num_exact_saved_tokens=chosen.num_exact_saved_tokens,
    )
    names = [ROWS_FILE, *(shard.file for shard in shards)]
    if spec.planner.learns_output_tokens:
        write_groups(spool / GROUPS_FILE, chosen.prefix_hashes)
        names.append(GROUPS_FILE)
    files = {name: describe_file(spool / name) for name in names}
    by_length = learned.by_length if learned is not None else None
    manifest = PlanManifest(
        plan_id=compute_plan_id(spec, ds, tokenizer.model_version, files, by_length),
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
        learned=by_length,
        estimate=estimate_cost(target, requests, chosen.output_tokens, chosen.groups, len(shards)),
        imbalance=unevenness,
        files=files,
        shards=shards,
    )
    return _persist(manifest, files, spool)


def _shown(unit: str) -> Phase:
    """Shows the progress of a search's phases."""

    @contextmanager
    def phase(name: str, total: int) -> Iterator[Advance]:
        with Progress(f"{name} {unit}", total, unit=unit) as progress:
            yield progress.advance

    return phase


def _find_prefixes(spec: JobSpec, rows: Rows) -> tuple[Requests, RankedPrompts]:
    """Sort the prompts, and make those that are equal one request."""
    ranked = rows.search.finish(rows.prompts, _shown("prompts"))
    return make_requests(
        rows.prompts,
        ranked,
        rows.row_idxs(),
        rows.output_tokens(),
        merge=spec.sampling.is_greedy,
    )


def _check_rows(spec: JobSpec, rows: Rows, where: str) -> None:
    """Refuse an empty partition if it is to fail; warn of what the user will want to know now."""
    if rows.num_rows == 0:
        if spec.on_empty == "fail":
            raise EmptyPartitionError(f"{where}: has no rows (on_empty: fail)")
        _log.warning("%s has no rows: an empty partition will be committed", where)
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


@dataclass(frozen=True, slots=True, eq=False)
class _Chosen:
    """The groups in the order of the plan, and what was known of their tree."""

    groups: PrefixGroups
    output_tokens: npt.NDArray[np.int64]
    """int64 [num_requests], estimates."""
    prefix_hashes: npt.NDArray[np.int64]
    """int64 [num_groups, 2], see `hash_prefixes`; of no group if nothing is to be learned."""
    num_optimal_tokens: int
    num_algorithm_1_saved_tokens: int
    num_exact_saved_tokens: int


def _choose(
    spec: JobSpec,
    requests: Requests,
    ranked: RankedPrompts,
    learned: Learned | None,
    target: Target | None,
) -> _Chosen:
    """Choose the groups, cut those too large for one shard, and put all in scheduling order.

    The order is that of Eq. 4.
    """
    with Progress("choose and order groups", len(_STEPS), unit="steps") as progress:
        tree = ranked.tree(requests.lengths)
        progress.advance(1, _STEPS[0])
        choice = choose_prefixes(tree)
        groups = choice.groups
        progress.advance(1, _STEPS[1])
        prefix_hashes = np.zeros((0, 2), dtype=np.int64)
        if spec.planner.learns_output_tokens:
            prefix_hashes = hash_prefixes(requests, groups)
        output_tokens = estimate_output_tokens(spec, requests, learned, groups, prefix_hashes)
        progress.advance(1, _STEPS[2])
        if len(groups):
            parts = _split(spec, groups, requests, output_tokens, target)
            order = order_groups_by_subtree(parts, tree, output_tokens)
            if len(prefix_hashes):  # parts of a group are neighbours, in the group's place
                group_of_part = np.searchsorted(groups.offsets, parts.offsets[:-1], "right") - 1
                prefix_hashes = prefix_hashes[group_of_part][order]
            groups = parts.take(order)
        progress.advance(1, _STEPS[3])
    return _Chosen(
        groups,
        output_tokens,
        prefix_hashes,
        tree.num_distinct_prefix_tokens,
        choice.algorithm_1_saved_tokens,
        choice.exact_saved_tokens,
    )


def _split(
    spec: JobSpec,
    groups: PrefixGroups,
    requests: Requests,
    output_tokens: npt.NDArray[np.int64],
    target: Target | None,
) -> PrefixGroups:
    members, prefixes = work_costs(target, groups, requests.lengths, output_tokens)
    return split_large_groups(groups, members, prefixes, spec.planner.num_shards)


def _write_shards(
    spec: JobSpec,
    requests: Requests,
    chosen: _Chosen,
    target: Target | None,
    spool: Path,
) -> tuple[tuple[ShardInfo, ...], float]:
    """Deal the groups, in their order, out to shards of about equal work, and write these.

    Returns:
        The shards, and their imbalance.
    """
    groups = chosen.groups
    if len(groups) == 0:
        return (), 1.0
    prefill = group_prefill_tokens(groups, requests.lengths)
    costs, prefix_costs = work_costs(target, groups, requests.lengths, chosen.output_tokens)
    costs = np.add.reduceat(costs[groups.member_idxs], groups.offsets[:-1]) + prefix_costs
    num_shards = min(spec.planner.num_shards, len(groups))
    shard_of_group = assign_shards(costs, num_shards)
    worst = imbalance(costs, shard_of_group, num_shards)
    if worst > _WORTH_A_WARNING:
        _log.warning("the largest shard has %.2f times the average work", worst)
    shards: list[ShardInfo] = []
    num_before = 0
    with Progress("write shards", groups.num_prompts, unit="requests") as progress:
        for shard_idx in range(int(shard_of_group.max()) + 1):
            group_ids = np.flatnonzero(shard_of_group == shard_idx)
            taken = groups.take(group_ids)
            name = shard_file(shard_idx)
            num_parts = write_shard(
                spool / name,
                requests,
                request_idx_start=num_before,
                request_idxs=taken.member_idxs,
                group_ids=np.repeat(group_ids, taken.sizes),
                num_prefix_tokens=np.repeat(taken.num_prefix_tokens, taken.sizes),
                part_rows=spec.planner.part_rows,
                written=progress.advance,
            )
            num_before += taken.num_prompts
            shards.append(
                ShardInfo(
                    file=name,
                    num_groups=len(taken),
                    num_requests=taken.num_prompts,
                    num_rows=int(requests.num_rows[taken.member_idxs].sum()),
                    num_parts=num_parts,
                    num_prefill_tokens=int(prefill[group_ids].sum()),
                    predicted_gpu_s=float(costs[group_ids].sum()) / 1e9 if target else None,
                )
            )
    return tuple(shards), worst


def _persist(manifest: PlanManifest, files: Mapping[str, DataFile], spool: Path) -> StoredPlan:
    """Copy the data files into the plan's folder, then the manifest, which completes it."""
    folder = job_folder(manifest.spec, manifest.ds).child(f"plan-{manifest.plan_id}")
    num_bytes = sum(file.size_bytes for file in files.values())
    with Progress("publish the plan", num_bytes, unit="bytes") as progress:
        for name, file in files.items():
            folder.publish_file(spool / name, name)
            progress.advance(file.size_bytes)
    folder.write_bytes(MANIFEST_FILE, manifest.to_bytes())
    plan = StoredPlan(folder, manifest)
    plan.mark_current()
    return plan
