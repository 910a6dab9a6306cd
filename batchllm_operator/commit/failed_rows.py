"""The failed rows of any run: of a published one, of one at work, of one that was refused."""

from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import reduce
from itertools import chain

import numpy as np
import pyarrow.compute as pc

from batchllm_operator.commit.report import load_report
from batchllm_operator.errors import PlanError
from batchllm_operator.lake import open_table
from batchllm_operator.row_error import RowError
from batchllm_operator.shards.parts import ShardParts
from batchllm_operator.shards.quarantine import quarantined
from batchllm_operator.shards.reports import COMMITTED_FILE, find_committed
from batchllm_operator.shards.row_errors import RowErrors, clip
from batchllm_operator.stored_plan.counts import PlanCounts
from batchllm_operator.stored_plan.manifest import ERROR_COLUMN
from batchllm_operator.stored_plan.rounds import plans_of_rounds
from batchllm_operator.stored_plan.row_keys import key_texts
from batchllm_operator.stored_plan.run_report import FailedRow
from batchllm_operator.stored_plan.stored_plan import StoredPlan


@dataclass(frozen=True, slots=True)
class FailedRows:
    """The rows of a plan that have failed so far; in a job of several prompts, the answers."""

    plan_uri: str
    job: str
    ds: str
    is_committed: bool
    num_rows: int
    num_rows_done: int
    """Of them, those with a text or an error in the lake: rows that planning has rejected or that
    reuse an output, and finished ones, in parts or spilled."""
    errors_by_kind: Mapping[str, int]
    """The most frequent first."""
    rows: tuple[FailedRow, ...]
    """The first ones in input order, as many as were asked for."""
    retry: str | None = None
    """The command that asks only these again, as the report of a published plan has it."""

    @property
    def num_failed_rows(self) -> int:
        return sum(self.errors_by_kind.values())


def find_errors(plan: StoredPlan, shards: Sequence[ShardParts], num_examples: int) -> RowErrors:
    errors = RowErrors(num_examples)
    errors.add_rejected(plan)
    for shard in shards:
        errors.add_all(shard.failed())
    return errors


def find_failed_rows(plan_uri: str, limit: int) -> FailedRows:
    """The failed rows of a plan's run, the first `limit` of them with their keys; read-only.

    Those of a published plan are read from the output table, as its parts may be gone; before,
    those that planning has rejected, and those in parts or spilled.

    Raises:
        PlanError: the plan is absent, corrupted or of another version, or its rows are gone.
        TableError: the output partition holds what another job or program wrote.
    """
    plan = StoredPlan.open(plan_uri)
    is_committed = find_committed(plan) is not None
    retry: str | None = None
    if is_committed:
        with suppress(PlanError):  # the report may be gone
            retry = load_report(plan_uri).retry
        found, kinds = _published(plan, limit)
        # Plans of rounds before may be gone.
        counts = load_report(plan_uri).plan if plan.manifest.before else plan.manifest.counts
        num_done = counts.num_asked_rows
    else:
        rounds = plans_of_rounds(plan)
        counts = PlanCounts.of_rounds([each.manifest.counts for each in rounds])
        shards = [
            ShardParts.read(each, idx, with_spilled=True)
            for each in rounds
            for idx in range(len(each.manifest.shards))
        ]
        if not any(shard.entries for shard in shards) and plan.folder.exists(COMMITTED_FILE):
            raise PlanError(
                f"plan {plan.folder.uri}: its outputs have been replaced, and its parts are gone;"
                f" what is left is in its report: `batchllm report --plan {plan.folder.uri}`"
            )
        errors = find_errors(plan, shards, limit)
        num_done = counts.num_rejected_rows + counts.num_reused_rows
        num_done += sum(shard.counts.num_rows for shard in shards)
        found, kinds = [*errors.first_rows(plan)], errors.counts
    return FailedRows(
        plan_uri=plan.folder.uri,
        job=plan.manifest.spec.name,
        ds=plan.manifest.ds,
        is_committed=is_committed,
        num_rows=counts.num_asked_rows,
        num_rows_done=num_done,
        errors_by_kind=dict(sorted(kinds.items(), key=lambda kind: (-kind[1], kind[0]))),
        rows=tuple(found),
        retry=retry,
    )


def _published(plan: StoredPlan, limit: int) -> tuple[list[FailedRow], Counter[str]]:
    """The first failed rows of the output partition, then of those in quarantine, and the number by
    kind."""
    spec = plan.manifest.spec
    table = open_table(spec.output.uri, spec.input.partition_column)
    kinds: Counter[str] = Counter()
    first: list[FailedRow] = []
    prompts: list[str | None] = list(spec.prompts) or [None]
    columns = [*spec.input.key, *(spec.prompts or [ERROR_COLUMN])]
    places = [(table, table.snapshot(plan.manifest.ds))]
    if (apart := quarantined(spec, table, plan.publication)) is not None:
        places.append(apart)
    for batch in chain.from_iterable(each.scan(held, columns) for each, held in places):
        errors = [
            batch.column(ERROR_COLUMN)
            if name is None
            else pc.struct_field(batch.column(name), ERROR_COLUMN)
            for name in prompts
        ]
        has_failed = reduce(pc.or_, map(pc.is_valid, errors)).to_numpy(zero_copy_only=False)
        for idx in np.flatnonzero(has_failed).tolist():
            for prompt, column in zip(prompts, errors, strict=True):
                if not (fields := column[idx].as_py()):
                    continue
                error = clip(RowError(**fields))
                kinds[error.kind] += 1
                if len(first) < limit:
                    key = key_texts(batch, idx, spec.input.key)
                    first.append(FailedRow(key, error.kind, error.message or "", prompt))
    return first, kinds
