"""The commit stage: checks every row, then replaces the partition in one step."""

import logging
import os
import tempfile
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Final

from batchllm_operator.amounts import clipped
from batchllm_operator.answers.expectations import Measured
from batchllm_operator.commit.earlier import EarlierReports, read_earlier
from batchllm_operator.commit.failed_rows import find_errors
from batchllm_operator.commit.gate import admit, measure
from batchllm_operator.commit.partition import write_partition
from batchllm_operator.commit.report import describe_run, load_report, store_page
from batchllm_operator.errors import (
    BatchLLMError,
    ConflictError,
    FailedRowsError,
    IncompleteRunError,
    StorageError,
    TableError,
)
from batchllm_operator.lake import LakeTable, Publication, StagedRows, open_table
from batchllm_operator.secrets.masking import Masker
from batchllm_operator.shards.group_lengths import write_lengths
from batchllm_operator.shards.joining import FinishedRound, finished_rounds, outputs_of
from batchllm_operator.shards.parts import ShardParts
from batchllm_operator.shards.reports import (
    COMMITTED_FILE,
    REFUSED_FILE,
    Committed,
    Refusal,
    ShardReport,
    find_committed,
)
from batchllm_operator.shards.reuse_index import ReusedOutputs, write_index
from batchllm_operator.shards.row_errors import (
    NUM_SHOWN,
    RowErrors,
    are_too_many,
    too_many_failed,
)
from batchllm_operator.spec import JobSpec
from batchllm_operator.stored_plan.run_report import REPORT_FILE, RunReport
from batchllm_operator.stored_plan.stored_plan import (
    StoredPlan,
    check_partition,
    check_publisher,
    plan_folder,
)

WritePartition = Callable[
    [StoredPlan, Sequence[ShardParts | ReusedOutputs], Path, LakeTable], Path | StagedRows
]
_MAX_CHARS: Final = 2_000
_log = logging.getLogger(__name__)


def commit_run(
    plan: str | Path | StoredPlan, write: WritePartition | None = None, *, accept: bool = False
) -> RunReport:
    """Publish the outputs of a finished plan, all rows or nothing.

    Committing a published plan again changes nothing.

    Args:
        plan: of the last round.
        write: writes the partition's rows, for `LakeTable.publish`.
        accept: whether to publish even if more rows failed than the spec allows, or the answers
            aren't as it expects.

    Raises:
        PlanError: the plan is absent, corrupted or of another version, its parts don't have one
            output for each row, or a later plan has superseded it.
        IncompleteRunError: parts are missing; the message names the shards to run.
        FailedRowsError: more rows failed than the spec allows.
        ExpectationError: the answers aren't as the spec expects.
        TableError: the output partition holds rows of another job or program, or the table lacks
            a column of the outputs, or has it with another type.
        ConflictError: another client has published the partition meanwhile; plan again to replace
            its rows.
        CommitUnknownError: the outputs may have been published; commit again to find out.
    """
    plan = StoredPlan.open(plan)
    try:
        return _commit(plan, write or write_partition, accept=accept)
    except BatchLLMError as error:
        try:
            _note_refusal(plan, error)
        except (StorageError, OSError, BatchLLMError) as fault:  # the commit's own error counts
            _log.warning("%s/%s isn't written: %s", plan.folder.uri, REFUSED_FILE, fault)
        raise


def _commit(plan: StoredPlan, write: WritePartition, *, accept: bool) -> RunReport:
    manifest = plan.manifest
    spec = manifest.spec
    table = open_table(spec.output.uri, spec.input.partition_column, spec.output.target_file_bytes)
    if find_committed(plan) is not None and plan.folder.exists(REPORT_FILE):
        _log.info("partition %s already holds the outputs of this plan", manifest.ds)
        return load_report(plan.folder.uri)
    _check_last(plan)
    plan.mark_committing()
    rounds = finished_rounds(plan)
    seen = check_publisher(table, spec, manifest.ds)
    shards = [shard for each in rounds for shard in each.shards]
    errors, earlier = find_errors(plan, shards, NUM_SHOWN), read_earlier(plan, table)
    if seen == plan.publication:
        _log.info("partition %s already holds the outputs of this plan", manifest.ds)
        expectations = measure(plan, table, None, earlier)
        return _write_report(rounds, table, errors, expectations, earlier)
    plan.check_current()
    num_rows = sum(each.plan.manifest.counts.num_asked_rows for each in rounds)
    if not accept and are_too_many(spec, errors.num_rows, num_rows):
        raise too_many_failed(
            *(spec, num_rows, plan, errors),
            verdict="nothing was published",
            cure=f"To publish all the same: `batchllm commit --plan {plan.folder.uri} --accept`",
        )
    if accept and spec.on_unmet == "branch":
        plan.mark_older_plans(seen)
        if table.promote(plan.publication):
            expectations = measure(plan, table, None, earlier)
            return _write_report(rounds, table, errors, expectations, earlier)
    with tempfile.TemporaryDirectory(prefix="batchllm-commit-") as spool:
        data = write(plan, outputs_of(rounds), Path(spool), table)
        expectations = ()
        if isinstance(data, Path):
            expectations = measure(plan, table, data, earlier)
            data = admit(plan, table, data, expectations, accept=accept)
        plan.mark_committing()  # again, as writing may have taken long
        plan.mark_older_plans(seen)
        _publish(plan, table, data, seen)
    return _write_report(rounds, table, errors, expectations, earlier)


def _check_last(plan: StoredPlan) -> None:
    """Raise `IncompleteRunError` for a plan whose job has later rounds: it lacks their answers."""
    manifest, rounds = plan.manifest, plan.manifest.spec.rounds
    names, asked = list(manifest.spec.prompts), manifest.round_idx + 1
    if missing := [names[number] for later in rounds[asked:] for number in later]:
        raise IncompleteRunError(
            f"plan {plan.folder.uri}: is round {asked} of {len(rounds)}: prompts"
            f" {', '.join(missing)} aren't asked yet; once it is finished, `batchllm plan` makes"
            f" the plan of round {asked + 1}, and the last round is committed"
        )


def published_plan_uri(spec: JobSpec, ds: str) -> str:
    """URI of the plan whose outputs partition `ds` of the output table holds.

    Raises `TableError`: nothing is published there, or another job's outputs are.
    """
    check_partition(ds)
    table = open_table(spec.output.uri, spec.input.partition_column)
    found = check_publisher(table, spec, ds)
    if found is None:
        raise TableError(f"table {table.uri}: partition {ds!r} has not been published")
    return plan_folder(spec, found).uri


def _publish(
    plan: StoredPlan, table: LakeTable, data: Path | StagedRows, seen: Publication | None
) -> None:
    """Publish, replacing `seen` or what an older plan has published since.

    The older plan passed its own check before it was marked; it can't publish again, because it
    expects another publication in the partition. Raises `ConflictError`: another client has
    published, or is about to.
    """
    spec, ds = plan.manifest.spec, plan.manifest.ds
    add_columns = spec.output.add_columns
    while True:
        if (by := plan.superseded_by()) is not None:
            raise ConflictError(
                f"output {table.uri}: partition {ds!r} is published meanwhile by {by}, a later"
                f" plan than {plan.folder.uri}, which wasn't published"
            )
        try:
            table.publish(plan.publication, data, replaces=seen, add_columns=add_columns)
            return
        except ConflictError:
            found = check_publisher(table, spec, ds)
            if found is None or found == seen or found.plan_id not in plan.older_plans():
                # A retry would find the winner's outputs, and replace what may be newer.
                StoredPlan.mark_superseded_at(plan.folder, by="another plan, published meanwhile")
                raise
            _log.info("plan %s was published meanwhile; it is older, and replaced", found.plan_id)
            seen = found


def _write_report(
    rounds: Sequence[FinishedRound],
    table: LakeTable,
    errors: RowErrors,
    expectations: tuple[Measured, ...],
    earlier: EarlierReports,
) -> RunReport:
    """Write the report and its page, and only then the note that the plan is committed."""
    plan, shards = rounds[-1].plan, rounds[-1].shards
    report = describe_run(rounds, table, errors, expectations, earlier)
    plan.folder.write_bytes(REPORT_FILE, report.to_bytes())
    store_page(plan.folder, report)
    write_lengths(rounds)
    committed = Committed(
        plan_id=plan.manifest.plan_id,
        shards=tuple(
            ShardReport.of(plan, shard_idx, shard, len(shard.entries))
            for shard_idx, shard in enumerate(shards)
        ),
        reuse_sha256=write_index(plan, [(each.plan, each.outputs) for each in rounds]),
    )
    plan.folder.write_bytes(COMMITTED_FILE, committed.to_bytes())
    return report


def _note_refusal(plan: StoredPlan, error: BatchLLMError) -> None:
    reason = Masker.of(os.environ)(str(error)).encode(errors="replace").decode()
    failed = error if isinstance(error, FailedRowsError) else FailedRowsError("")
    refusal = Refusal(
        plan_id=plan.manifest.plan_id,
        refused_at=datetime.now(UTC),
        reason=clipped(reason, _MAX_CHARS),
        num_failed_rows=failed.num_rows,
        errors=failed.kinds,
    )
    plan.check_stays()  # a file in the folder of a removed plan would stay for ever
    plan.folder.write_bytes(REFUSED_FILE, refusal.to_bytes())
