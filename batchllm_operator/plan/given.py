"""What a plan is given before any row is read: a checked spec, tables and a model."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

import pyarrow.compute as pc

from batchllm_operator.amounts import counted
from batchllm_operator.answers import Answers, PlannedAnswers, plan_answers
from batchllm_operator.answers.expectations import Tally, watched_columns
from batchllm_operator.engine import check_arguments, check_format
from batchllm_operator.errors import EmptyPartitionError, ExpectationError, SpecError, TableError
from batchllm_operator.lake import (
    LakeTable,
    Snapshot,
    StoredColumns,
    check_names,
    open_table,
)
from batchllm_operator.model import check_weights, with_models_sampling
from batchllm_operator.plan.estimate import Target, find_target
from batchllm_operator.plan.memory import MemoryBudget
from batchllm_operator.plan.output_lengths import Learned
from batchllm_operator.plan.planned_range import RangePlanner
from batchllm_operator.plan.rounds import Earlier, find_earlier, pinned_input
from batchllm_operator.plan.rows.adapters import RowAdapters
from batchllm_operator.plan.rows.input_checks import (
    check_columns,
    check_lengths,
    describe_empty,
    open_input,
    warn_of_control_tokens,
)
from batchllm_operator.plan.rows.reading import rows_schema
from batchllm_operator.prompts import Tokenizer, joint_fingerprint, load_tokenizers
from batchllm_operator.row_error import SKIPPED
from batchllm_operator.shards.buckets import output_schema
from batchllm_operator.shards.parts import STATUS_COLUMN
from batchllm_operator.shards.quarantine import quarantine_of, quarantine_schema
from batchllm_operator.shards.row_errors import (
    RowErrors,
    WrittenRows,
    are_too_many,
    too_many_failed,
)
from batchllm_operator.spec import JobSpec, TableAddress
from batchllm_operator.storage import Folder
from batchllm_operator.stored_plan.manifest import ERROR_COLUMN, errors_of
from batchllm_operator.stored_plan.stored_plan import (
    StoredPlan,
    check_partition,
    check_publisher,
    job_folder,
)

if TYPE_CHECKING:
    from batchllm_operator.plan.replicas import ReplicaPlanner

_log = logging.getLogger(__name__)
_NEVER_NULL: Final = frozenset({STATUS_COLUMN, "model", "run_id"})


@dataclass(frozen=True, slots=True)
class Given:
    """The plan's inputs before any row is read."""

    spec: JobSpec
    ds: str
    table: LakeTable
    snapshot: Snapshot
    stored: StoredColumns
    tokenizers: tuple[Tokenizer, ...]
    """One for each question, as the next."""
    answers: tuple[PlannedAnswers, ...]
    adapters: RowAdapters | None
    target: Target | None
    replicas: ReplicaPlanner | None
    budget: MemoryBudget
    earlier: Earlier

    @property
    def where(self) -> str:
        """Names the rows in errors that count them."""
        where = f"table {self.table.uri}, partition {self.snapshot.partition!r}"
        filtered = self.spec.input.filter
        return f"{where}, counting rows that input.filter keeps" if filtered else where

    @property
    def tokenizer(self) -> Tokenizer:
        """For what isn't a prompt's own."""
        return self.tokenizers[0]

    @property
    def versions(self) -> tuple[str, str, int, tuple[str, ...]]:
        """Of the model, the tokenizers and the adapters, with the most tokens between them: what
        `reuse_identity` takes beside a spec."""
        model, length = self.tokenizer.model_version, self.tokenizer.max_model_len
        of_adapters = self.adapters.versions if self.adapters is not None else ()
        return model, joint_fingerprint(self.tokenizers), length, of_adapters

    def range_planner(self, learned: Learned | None) -> RangePlanner:
        shares = self.answers[0].reason_against_sharing is None
        return RangePlanner(self.spec, self.target, self.replicas, shares, learned)

    def check_rows(self, counts: Mapping[str, int], written: WrittenRows) -> None:
        """Check the rows that were read; `counts` are what that tells of `PlanCounts`.

        Raises:
            EmptyPartitionError: there are no rows, and the spec says `on_empty: fail`.
            FailedRowsError: there are more such rows than the spec allows.
            ExpectationError: there are so many that the answers can't be as it expects.
        """
        spec, num_rejected = self.spec, counts["num_rejected_rows"]
        num_rows = counts["num_rows"] - counts["num_unasked_rows"]
        if counts["num_rows"] == 0:
            reason = describe_empty(spec, self.table, self.snapshot)
            if spec.on_empty == "fail":
                raise EmptyPartitionError(f"{reason} (on_empty: fail)")
            _log.warning("%s: an empty partition will be committed", reason)
        if num_rejected:
            _log.warning(
                "%d of %s can't be prompted; the reasons will be in the output's error column",
                num_rejected,
                counted(num_rows, "prompt" if spec.prompts else "row"),
            )
        if are_too_many(spec, num_rejected, num_rows):
            errors = RowErrors()
            errors.add_rejected(written)
            raise too_many_failed(
                spec,
                num_rows,
                written,
                errors,
                verdict="no plan was made",
                cure="To generate for the other rows all the same, raise max_failed_fraction in the"
                " spec, and plan again",
            )
        _check_rejected(spec, written)
        warn_of_control_tokens(spec, counts["num_control_rows"])


def _check_rejected(spec: JobSpec, written: WrittenRows) -> None:
    """Raise `ExpectationError` if so many rows are rejected that commit would publish nothing."""
    if spec.on_unmet == "quarantine":
        return
    names = [f"{prompt}.{STATUS_COLUMN}" for prompt in spec.prompts] or [STATUS_COLUMN]
    for number, name in enumerate(names):
        if (expected := spec.expect.get(name)) is None:
            continue
        tally = Tally(expected)
        for batch in written.row_batches([ERROR_COLUMN]):
            kinds = pc.struct_field(errors_of(batch), "kind")[number :: len(names)]
            asked = kinds.filter(pc.fill_null(pc.not_equal(kinds, SKIPPED), True))
            tally.add(pc.if_else(asked.is_null(), "ok", "rejected"))  # at best
        for each in tally.measured(name, None):
            low, high = each.value is not None and each.value < (each.min or 0), not each.is_met
            if (each.what == "values.ok" and low) or (each.what == "values.rejected" and high):
                raise ExpectationError(f"{each}, even if all other rows are ok; no plan was made")


def find_given(spec: JobSpec, ds: str, retried: StoredPlan | None = None) -> Given:
    """Check the spec, the tables and the model; see `plan_job`, which reads rows then.

    The input is what the plan `retried` has read, if there is one.
    """
    if TableAddress.parse(spec.input.uri).overlaps(TableAddress.parse(spec.output.uri)):
        raise SpecError(
            f"output.uri: {spec.output.uri} and the input table {spec.input.uri} must be apart:"
            " one would be read or overwritten as a part of the other"
        )
    check_partition(ds)
    check_arguments(spec)
    table, snapshot = open_input(spec, ds)
    if not snapshot.files and spec.on_empty == "fail":
        raise EmptyPartitionError(f"{describe_empty(spec, table, snapshot)} (on_empty: fail)")
    check_columns(spec, table, snapshot)
    tokenizers = load_tokenizers(spec, ds)
    tokenizer = tokenizers[0]
    if tokenizer.files is not None and spec.engine.backend != "fake":
        check_weights(tokenizer.files, str(spec.engine.extra_args.get("load_format") or "auto"))
    spec = with_models_sampling(spec, tokenizer.files)
    adapters = RowAdapters.of(spec, tokenizer)
    adapter_versions = adapters.versions if adapters is not None else ()
    earlier = find_earlier(spec, ds, snapshot.version, tokenizers, adapter_versions)
    if (before := earlier.rounds[-1].plan if earlier.rounds else retried) is not None:
        snapshot = pinned_input(table, before)
    # Faults that would stop the commit should show before the GPU runs.
    _check_folders(spec, ds)
    output = open_table(spec.output.uri, spec.input.partition_column)
    check_publisher(output, spec, ds)
    _check_response_format(spec, output)
    answers = tuple(map(plan_answers, spec.questions, tokenizers))
    columns = output_schema(spec, rows_schema(spec, snapshot.schema), answers)
    watched_columns(spec, columns)
    stored = output.check_outputs(ds, columns, add_columns=spec.output.add_columns)
    if spec.on_unmet == "quarantine":
        apart = quarantine_of(spec, output), quarantine_schema(spec, columns)
        apart[0].check_outputs("run", apart[1], add_columns=spec.output.add_columns)
    _check_nulls_fit(spec, stored)
    check_lengths(spec, tokenizer.max_model_len)
    target = find_target(spec)
    if target is None and spec.limits.cost is not None:
        raise SpecError(
            "limits.cost: needs planner.target_gpu, whose price counts, and a model of a known"
            " shape; limit gpu_hours instead"
        )
    replicas = _replica_planner(spec, target)
    budget = MemoryBudget.from_now(spec.planner.memory_budget_bytes)
    known = (answers, adapters, target, replicas, budget, earlier)
    return Given(spec, ds, table, snapshot, stored, tokenizers, *known)


def _replica_planner(spec: JobSpec, target: Target | None) -> ReplicaPlanner | None:
    """Imports the planner of replicas only if the spec has several."""
    if spec.engine.replicas == 1:
        return None
    from batchllm_operator.plan.replicas import ReplicaPlanner

    return ReplicaPlanner.of(spec, target)


def _check_response_format(spec: JobSpec, output: LakeTable) -> None:
    """Refuse properties that can't be columns of the output, and what the engine doesn't take."""
    for question in spec.questions:
        if question.response_format is None:
            continue
        fields, forbidden = Answers.of(question).fields, output.forbidden_in_names
        try:
            check_names(f"table {output.uri}", fields, forbidden)
        except TableError as error:
            raise SpecError(f"response_format: {error}") from error
        check_format(question)


def _check_nulls_fit(spec: JobSpec, stored: StoredColumns) -> None:
    """Raise TableError if rows would have nulls where the output table allows none."""
    for name in set(spec.output_columns) & set(stored.schema.names) - _NEVER_NULL:
        if stored.schema.field(name).nullable:
            continue
        if spec.prompts:
            continue  # a struct is there in each row
        skips = spec.input.on_null == "skip"
        if name == ERROR_COLUMN or spec.max_failed_fraction or skips:
            rows = "rows that are skipped" if skips else "rows that fail"
            rows = "rows that don't fail" if name == ERROR_COLUMN else rows
            raise TableError(
                f"{stored.where}: column {name!r} may not be null, but {rows} have no value there;"
                " let it be null in the table"
                + ("" if name == ERROR_COLUMN or skips else ", or set max_failed_fraction to 0")
            )


def _check_folders(spec: JobSpec, ds: str) -> None:
    """Refuse a file in the place of a folder, and a store of plans that can't keep claims apart."""
    table = TableAddress.parse(spec.output.uri).folder
    folders = [("output.uri", Folder.open(table))] if table is not None else []
    staging = "output.uri" if spec.output.staging_uri is None else "output.staging_uri"
    for field, folder in [*folders, (staging, job_folder(spec, ds))]:
        if not folder.is_local:
            continue
        path = Path(folder.path)
        there = next(above for above in (path, *path.parents) if os.path.lexists(above))
        if not there.is_dir():
            raise SpecError(f"{field}: {there} isn't a folder; choose another place")
    job_folder(spec, ds).check_conditional_writes("IfNoneMatch")
