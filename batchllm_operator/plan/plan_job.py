"""The plan stage: a partition's rows become a persisted plan."""

from __future__ import annotations

import errno
import logging
import os
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from datetime import date
from pathlib import Path
from typing import Any, Final

import numpy as np

from batchllm_operator.answers import NOTHING_PLANNED
from batchllm_operator.cost import Work
from batchllm_operator.errors import PlanError, SpecError, StorageError, TableError
from batchllm_operator.lake import Publication, joined, open_table
from batchllm_operator.plan.earlier_outputs import Reuse, find_indexes
from batchllm_operator.plan.estimate import estimate_work
from batchllm_operator.plan.given import Given, find_given
from batchllm_operator.plan.output_lengths import Learned, learn_output_lengths
from batchllm_operator.plan.planned_range import PlannedRange
from batchllm_operator.plan.published import PublishedAnswers
from batchllm_operator.plan.rounds import EarlierAnswers, num_repeated_tokens
from batchllm_operator.plan.rows.keys import check_keys
from batchllm_operator.plan.rows.ordering import choose_orders, read_columns
from batchllm_operator.plan.rows.reading import Rows, read_rows
from batchllm_operator.prefixes import PromptStore, imbalance, sort_prompts
from batchllm_operator.prefixes.sharing import merged
from batchllm_operator.progress import Progress
from batchllm_operator.prompts import TokenIdsDifferError
from batchllm_operator.shards.kept_outputs import KeptOutputs
from batchllm_operator.shards.parts import part_schema
from batchllm_operator.shards.reuse_index import ReuseIndex, reuse_identity, reuse_salts
from batchllm_operator.shards.row_errors import WrittenRows
from batchllm_operator.spec import JobSpec, load_spec
from batchllm_operator.storage import Folder
from batchllm_operator.stored_plan.counts import PlanCounts, PromptCounts
from batchllm_operator.stored_plan.manifest import (
    FINGERPRINTS_FILE,
    GROUPS_FILE,
    MANIFEST_FILE,
    REUSED_FILE,
    ROWS_FILE,
    CostEstimate,
    DataFile,
    PlanManifest,
    compute_plan_id,
    describe_file,
)
from batchllm_operator.stored_plan.rounds import INPUT_FILE, PinnedInput
from batchllm_operator.stored_plan.shard_files import shard_file
from batchllm_operator.stored_plan.stored_plan import StoredPlan, check_publisher, plan_folder

_log = logging.getLogger(__name__)
_PROMPTS_FILE: Final = "prompts.bin"
_WORTH_A_WARNING: Final = 1.2  # imbalance
_FULL: Final = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})


def plan_job(
    spec: JobSpec | str | Path | Mapping[str, Any], ds: str | date | int, only: Sequence[str] = ()
) -> StoredPlan:
    """Plan the job for partition `ds`, and persist the plan in the job's staging folder.

    Nothing is written there before the whole plan is ready. Equal inputs give equal bytes
    in the same folder, so planning again is harmless. Where prompts need answers to others, the
    plan is that of the first round that isn't finished, over the rows that the first has read.

    Args:
        spec: the job's, or what `load_spec` takes.
        ds: the partition, as text or as its key's value, such as a date.
        only: prompts of several that are asked again; answers to the others are taken from the
            published partition, where a row's prompt is the same and hasn't failed.

    Raises:
        SpecError: input and output overlap or aren't folders; the table, the model or the engine
            lack something that the spec names; or the memory budget is too small.
        TableError: the table is missing, the output partition holds rows of another job or program,
            or the output table doesn't accept the job's columns.
        KeyColumnError: keys aren't unique or are null; names up to ten.
        ModelError: the tokenizer can't be loaded, or refuses a prompt.
        StorageError: the input changed while it was read, or the disk is full.
        EmptyPartitionError: there is no such partition, or it has no rows, and the spec says
            `on_empty: fail`.
        FailedRowsError: more rows can't be prompted than `max_failed_fraction` allows.
    """
    given = find_given(load_spec(spec), str(ds))
    if only and len(given.spec.rounds) > 1:
        raise SpecError(
            "--only: isn't for prompts that need answers to others: without it, the plan takes over"
            " the rounds before the first prompt that has changed"
        )
    if (published := given.earlier.published) is not None:
        _log.info("all rounds are published already: %s", published.folder.uri)
        return published
    return _plan(given, only)


def retry_job(plan: StoredPlan | str) -> StoredPlan:
    """Plan the rows of a published plan that failed, over the input that it has read.

    Its other outputs are taken over from its parts. If such a plan is published already, it is
    returned.

    Raises:
        PlanError: the plan's failed rows can't be told apart, or its parts are gone.
        TableError: other outputs are published, or the input is gone.
        SpecError: the model has changed.
    And what `plan_job` raises.
    """
    failed = StoredPlan.open(plan)
    if (published := _retried_since(failed.manifest)) is not None:
        return published
    spec, ds, where = failed.manifest.spec, failed.manifest.ds, failed.folder.uri
    table = open_table(spec.output.uri, spec.input.partition_column)
    if check_publisher(table, spec, ds) != failed.publication:
        raise TableError(f"table {table.uri}: partition {ds!r} isn't what plan {where} published")
    failed.mark_committing()  # `gc` spares it
    kept = KeptOutputs(failed)
    given = find_given(spec, ds, failed)
    manifest = failed.manifest
    planned = (manifest.model_version, manifest.tokenizer_fingerprint, manifest.max_model_len)
    if given.versions != (*planned, manifest.adapter_versions):
        raise SpecError(f"plan {where}: its model has changed since; plan the day again")
    return _plan(given, kept=kept)


def _retried_since(manifest: PlanManifest) -> StoredPlan | None:
    """The published plan, if it has asked again what failed in this one."""
    spec = manifest.spec
    table = open_table(spec.output.uri, spec.input.partition_column)
    published = check_publisher(table, spec, manifest.ds)
    if published is None or published.plan_id == manifest.plan_id:
        return None
    try:
        plan = StoredPlan.open(plan_folder(spec, published).uri)
    except PlanError:
        return None
    if plan.manifest.retries != manifest.plan_id:
        return None
    _log.info("published already, with failed rows retried: %s", plan.folder.uri)
    plan.note_turn()
    return plan


def _plan(given: Given, only: Sequence[str] = (), kept: KeptOutputs | None = None) -> StoredPlan:
    try:
        with _open_scratch() as scratch:
            return _build(given, scratch, only, kept)
    except TokenIdsDifferError as error:  # it won't happen again
        _log.warning("%s: planning starts again", error)
    with _open_scratch() as scratch:  # not above: the error holds the first attempt's memory
        return _build(given, scratch, only, kept)


@contextmanager
def _open_scratch() -> Iterator[Path]:
    """A new folder under `TMPDIR`, removed with its contents; a full disk is a `StorageError`."""
    with tempfile.TemporaryDirectory(prefix="batchllm-plan-") as scratch:
        try:
            yield Path(scratch)
        except OSError as error:
            if error.errno not in _FULL:
                raise
            raise StorageError(
                f"{scratch}: no room for the plan's temporary files"
                f" ({os.strerror(error.errno)}); they have been removed; free some space, or set"
                " TMPDIR to a folder on a larger disk"
            ) from error


def _build(
    given: Given, scratch: Path, only: Sequence[str], kept: KeptOutputs | None
) -> StoredPlan:
    """Build the plan, with temporary files in `scratch`; may raise `TokenIdsDifferError`."""
    spec = given.spec
    with ExitStack() as stack:
        rows = _read(given, scratch, stack, only, kept)
        check_keys(scratch / ROWS_FILE, spec.input.key, given.where)
        learned = learn_output_lengths(spec, given.ds)
        with Progress("sort prompts", len(rows.prompts), unit="prompts", announce=False) as shown:
            ranked = sort_prompts(rows.prompts, shown.advance)
        planner = given.range_planner(learned)
        planned = planner.plan(
            rows.prompts,
            ranked,
            rows.row_idxs(),
            rows.output_tokens(),
            given.tokenizer,
            given.adapters,
            scratch,
        )
        rounds, num_repeated = given.earlier.rounds, 0
        if rounds and given.adapters is None:
            num_repeated = num_repeated_tokens(rounds[-1].plan, rows.prompts, ranked, scratch)
    names = [ROWS_FILE, *(shard.file for shard in planned.shards)]
    if spec.planner.learns_output_tokens:
        names.append(GROUPS_FILE)
    if spec.keeps_fingerprints:
        names.append(FINGERPRINTS_FILE)
    if spec.reuse_outputs or kept is not None:
        names.append(REUSED_FILE)
    files = {name: describe_file(scratch / name) for name in names}
    manifest = describe_plan(given, [planned], rows.counts, files, learned)
    retries = None if kept is None else kept.plan_id
    changes = {"num_repeated_tokens": num_repeated, "retries": retries}
    manifest = manifest.model_copy(update=changes)
    if (published := _retried_since(manifest)) is not None:
        return published
    return complete(manifest, lambda folder: _publish(folder, files, scratch, given))


def describe_plan(
    given: Given,
    ranges: Sequence[PlannedRange],
    row_counts: Mapping[str, int],
    files: Mapping[str, DataFile],
    learned: Learned | None,
    row_parts: tuple[int, ...] = (),
    num_twice: int = 0,
) -> PlanManifest:
    """The manifest of a plan of one or several ranges.

    Args:
        row_counts: the fields of `PlanCounts` that reading rows tells.
        row_parts: see `PlanManifest`.
        num_twice: tokens that shards of two ranges compute, and one engine would compute once.
    """
    spec, ds, schema = given.spec, given.ds, given.snapshot.schema
    model, fingerprint, length, versions = given.versions
    names = PlanCounts.model_fields.keys() - row_counts.keys()
    sums = {name: sum(planned.counts[name] for planned in ranges) for name in names}
    sums["num_optimal_tokens"] -= num_twice
    shards = [shard for planned in ranges for shard in planned.shards]
    estimate: CostEstimate | None = None
    gpu_s: Sequence[float | None] = [None] * len(shards)
    if given.target is not None:
        works = [work for planned in ranges for work in planned.works]
        unshared = sum((planned.unshared for planned in ranges), Work())
        estimate, gpu_s = estimate_work(given.target, works, unshared, spec.engine.replicas)
    worst = imbalance(np.array([cost for planned in ranges for cost in planned.costs]))
    if worst > _WORTH_A_WARNING:
        _log.warning("the largest shard has %.2f times the average work", worst)
    by_length = None if learned is None else learned.by_length
    before = [each.plan.manifest.plan_id for each in given.earlier.rounds]
    return PlanManifest(
        plan_id=compute_plan_id(spec, ds, model, files, by_length, versions, before),
        spec=spec,
        ds=ds,
        round_idx=len(before),
        before=before[-1] if before else None,
        input_version=given.snapshot.version,
        input_columns={
            name: str(schema.field(name).type)
            for name in spec.input_columns
            if name in schema.names
        },
        tokenizer_fingerprint=fingerprint,
        model_version=model,
        adapter_versions=versions,
        max_model_len=length,
        answers=NOTHING_PLANNED if spec.prompts else given.answers[0],
        answers_by_prompt=given.answers if spec.prompts else (),
        prompt_counts=tuple(
            PromptCounts.total([planned.prompts[number] for planned in ranges])
            for number in range(len(spec.prompts))
        ),
        counts=PlanCounts(**{**sums, **row_counts}),
        learned=by_length,
        estimate=estimate,
        sharing=merged([planned.sharing for planned in ranges]),
        imbalance=worst,
        files=files,
        row_parts=row_parts,
        shards=tuple(
            shard.model_copy(update={"file": shard_file(idx), "predicted_gpu_s": seconds})
            for idx, (shard, seconds) in enumerate(zip(shards, gpu_s, strict=True))
        ),
    )


def _read(
    given: Given, scratch: Path, stack: ExitStack, only: Sequence[str], kept: KeptOutputs | None
) -> Rows:
    """All rows, which `stack` closes."""
    spec, budget = given.spec, given.budget
    num_asks = given.snapshot.num_rows * len(spec.questions)
    prompts = stack.enter_context(PromptStore(scratch / _PROMPTS_FILE))
    reuse = published = None
    if only:
        published = PublishedAnswers(spec, given.ds, only, scratch)
    if spec.keeps_fingerprints or kept is not None:
        indexes, versions = list[ReuseIndex](), given.versions
        if spec.reuse_outputs and kept is None:
            identity = reuse_identity(spec, *versions)
            indexes = find_indexes(spec, given.ds, identity, budget, scratch)
        salts = reuse_salts(spec, *versions)
        schema = part_schema(spec)
        reuse = stack.enter_context(Reuse(indexes, scratch, schema, salts, published, kept))
        budget = budget.holding(reuse.num_bytes)
    if not (spec.input.filter or given.snapshot.conditions):  # which may skip any number of rows
        budget.check(num_asks)
    orders = None
    if spec.prompt is not None and spec.prompt.fields is not None:
        scan = given.table.scan(given.snapshot, read_columns(spec), spec.input.filter)
        orders = choose_orders(spec, joined(scan), budget)
        budget = budget.holding(orders.orders.nbytes)
    rows = Rows(prompts, reuse, orders)
    earlier = None
    if rounds := given.earlier.rounds:
        rounds[-1].plan.mark_committing()  # `gc` spares it
        earlier = stack.enter_context(closing(EarlierAnswers(spec, rounds, scratch / "answers")))
    read_rows(given, rows, scratch / ROWS_FILE, earlier)
    folder = Folder.open(str(scratch))
    written = WrittenRows(folder, [ROWS_FILE], spec.input.key, tuple(spec.prompts))
    given.check_rows(rows.counts, written)
    budget.check(rows.counts["num_rows"])
    return rows


def _publish(folder: Folder, files: Mapping[str, DataFile], scratch: Path, given: Given) -> None:
    """Copy data files into the plan's folder, and note the input for later rounds and tries."""
    folder.write_bytes(INPUT_FILE, PinnedInput.of(given.snapshot).to_bytes())
    num_bytes = sum(file.size_bytes for file in files.values())
    with Progress("publish the plan", num_bytes, unit="bytes", announce=False) as progress:
        for name, file in files.items():
            folder.publish_file(scratch / name, name)
            progress.advance(file.size_bytes)


def complete(manifest: PlanManifest, publish: Callable[[Folder], None]) -> StoredPlan:
    """Let `publish` put the data files into the plan's folder, then write the manifest there."""
    publication = Publication(manifest.spec.name, manifest.ds, manifest.plan_id)
    folder = plan_folder(manifest.spec, publication)
    publish(folder)
    plan = StoredPlan(folder, manifest)
    plan.note_turn()
    folder.write_bytes(MANIFEST_FILE, manifest.to_bytes())
    plan.mark_current()
    return plan
