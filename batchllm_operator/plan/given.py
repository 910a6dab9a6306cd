"""What a plan is given before any row is read: a checked spec, tables and a model."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING

from batchllm_operator.answers import Answers, PlannedAnswers, plan_answers
from batchllm_operator.engine import check_arguments
from batchllm_operator.errors import PlanError
from batchllm_operator.lake import LakeTable, Snapshot, StoredColumns, open_table
from batchllm_operator.model import check_weights, with_models_sampling
from batchllm_operator.plan.estimate import Target, find_target
from batchllm_operator.plan.memory import MemoryBudget
from batchllm_operator.plan.planned_range import RangePlanner
from batchllm_operator.plan.rows.adapters import RowAdapters
from batchllm_operator.plan.rows.input_checks import check_input, check_lengths, describe_rows
from batchllm_operator.plan.rows.output_checks import (
    check_apart,
    check_columns_fit,
    check_folders,
    check_response_format,
)
from batchllm_operator.prompts import Tokenizer, load_tokenizer
from batchllm_operator.spec import JobSpec
from batchllm_operator.stored_plan.run_report import REPORT_FILE, RunReport
from batchllm_operator.stored_plan.stored_plan import (
    StoredPlan,
    check_partition,
    check_publisher,
    earlier_publications,
    plan_folder,
)

if TYPE_CHECKING:
    from batchllm_operator.plan.replicas import ReplicaPlanner

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Given:
    """The plan's inputs before any row is read."""

    spec: JobSpec
    ds: str
    table: LakeTable
    snapshot: Snapshot
    stored: StoredColumns
    tokenizer: Tokenizer
    answers: PlannedAnswers
    adapters: RowAdapters | None
    target: Target | None
    replicas: ReplicaPlanner | None
    budget: MemoryBudget

    @property
    def where(self) -> str:
        """Names the rows in errors that count them."""
        return describe_rows(self.spec, self.table, self.snapshot)

    @property
    def range_planner(self) -> RangePlanner:
        shares = self.answers.reason_against_sharing is None
        learns = self.spec.planner.learns_output_tokens
        return RangePlanner(self.spec, self.target, self.replicas, shares, writes_groups=learns)

    @property
    def adapter_versions(self) -> tuple[str, ...]:
        return self.adapters.versions if self.adapters is not None else ()


def find_given(spec: JobSpec, ds: str) -> Given:
    """Check the spec, the tables and the model; see `plan_job`, which reads rows then."""
    check_apart(spec)
    check_partition(ds)
    check_arguments(spec)
    table = open_table(spec.input.uri, spec.input.partition_column)
    snapshot = table.snapshot(ds)
    check_input(spec, table, snapshot)
    tokenizer = load_tokenizer(spec, ds)
    if tokenizer.files is not None and spec.engine.backend != "fake":
        check_weights(tokenizer.files, str(spec.engine.extra_args.get("load_format") or "auto"))
    spec = with_models_sampling(spec, tokenizer.files)
    # Faults that would stop the commit should show before the GPU runs.
    check_folders(spec, ds)
    output = open_table(spec.output.uri, spec.input.partition_column)
    check_publisher(output, spec, ds)
    check_response_format(spec, output)
    answers = plan_answers(spec, tokenizer)
    stored = check_columns_fit(spec, ds, snapshot, output, answers)
    check_lengths(spec, tokenizer.max_model_len)
    _warn_of_earlier_answers(spec, ds, output)
    target = find_target(spec)
    replicas = _replica_planner(spec, target)
    budget = MemoryBudget.from_now(spec.planner.memory_budget_bytes)
    known = (answers, RowAdapters.of(spec, tokenizer), target, replicas)
    return Given(spec, ds, table, snapshot, stored, tokenizer, *known, budget)


def _warn_of_earlier_answers(spec: JobSpec, ds: str, output: LakeTable) -> None:
    """Repeat what the latest report says against the answers, if the settings are still the same.

    A plan runs no model; the report of an earlier partition tells before the GPU begins.
    """
    if not Answers.of(spec).watches():
        return
    own = check_publisher(output, spec, ds)
    for published in (*filter(None, [own]), *earlier_publications(output, spec, ds)):
        folder = plan_folder(spec, published)
        try:
            identity = StoredPlan.open(folder.uri).manifest.spec.identity
            report = RunReport.from_bytes(folder.read_bytes(REPORT_FILE), source=folder.uri)
        except (FileNotFoundError, PlanError):  # none is left
            continue
        if report.answers is not None and identity == spec.identity:
            for warning in report.answers.warnings:
                _log.warning("partition %s, with these settings: %s", published.partition, warning)
        return


def _replica_planner(spec: JobSpec, target: Target | None) -> ReplicaPlanner | None:
    """Imports the planner of replicas only if the spec has several."""
    if spec.engine.replicas == 1:
        return None
    from batchllm_operator.plan.replicas import ReplicaPlanner

    return ReplicaPlanner.of(spec, target)
