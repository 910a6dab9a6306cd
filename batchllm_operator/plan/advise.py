"""Template advice: the savings of other orders of the template's columns. Writes nothing."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import pyarrow as pa

from batchllm_operator.amounts import counted
from batchllm_operator.engine.gpus import block_size_of
from batchllm_operator.errors import EmptyPartitionError, SpecError
from batchllm_operator.lake import open_table
from batchllm_operator.plan.column_orders import column_orders
from batchllm_operator.plan.rows.adapters import RowAdapters
from batchllm_operator.plan.rows.input_checks import check_columns, describe_empty
from batchllm_operator.plan.rows.reading import tokenize
from batchllm_operator.prefixes import TokenTable, optimal_saving_ratio
from batchllm_operator.progress import Progress
from batchllm_operator.prompts import TokenIdsDifferError, Tokenizer, load_tokenizer
from batchllm_operator.spec import JobSpec
from batchllm_operator.stored_plan.stored_plan import check_partition

SAMPLE_ROWS: Final = 2000


@dataclass(frozen=True, slots=True)
class Alternative:
    """An order of the template's columns, and its saving on the sample."""

    template: str
    columns: tuple[str, ...]
    saving_ratio: float
    """That of one engine with unbounded memory."""
    is_given: bool
    """Whether this is the template of the spec."""


@dataclass(frozen=True, slots=True)
class Advice:
    """The orders that were compared."""

    num_sampled_rows: int
    num_rows: int
    """Rows of the partition before the filter."""
    alternatives: tuple[Alternative, ...]
    """By saving, descending; the given order comes first among equals."""


def advise(spec: JobSpec, ds: str, *, sample_rows: int = SAMPLE_ROWS) -> Advice:
    """Plan the first rows of partition `ds` with the template's columns in other orders.

    The sample is the first rows of the table that the filter keeps. So neighbouring rows are
    sampled together, and sharing between distant rows is missed. Up to four columns are tried in
    every order; of more, each is tried in the first place.

    Raises:
        SpecError, TableError, ModelError: as `plan_job`.
        EmptyPartitionError: there are no rows.
    """
    check_partition(ds)
    if spec.prompt.template is None:
        raise SpecError(
            f"prompt.{spec.prompt.field}: advice is on the order of columns in prompt.template,"
            " which this job doesn't have"
        )
    table = open_table(spec.input.uri, spec.input.partition_column)
    snapshot = table.snapshot(ds)
    check_columns(spec, table, snapshot)
    tokenizer = load_tokenizer(spec, ds)
    adapters = RowAdapters.of(spec, tokenizer)
    sample, num_sampled = list[pa.RecordBatch](), 0
    for batch in table.scan(snapshot, spec.input_columns, spec.input.filter):
        sample.append(batch.slice(0, sample_rows - num_sampled))
        num_sampled += sample[-1].num_rows
        if num_sampled == sample_rows:
            break
    if num_sampled == 0:
        raise EmptyPartitionError(
            f"{describe_empty(spec, table, snapshot)}; there is nothing to advise on"
        )
    try:
        alternatives = _try_orders(spec, sample, tokenizer, adapters)
    except TokenIdsDifferError:  # it won't happen again
        alternatives = _try_orders(spec, sample, tokenizer, adapters)
    # The sort is stable, and the given order is the first.
    alternatives.sort(key=lambda alternative: -alternative.saving_ratio)
    return Advice(num_sampled, snapshot.num_rows, tuple(alternatives))


def _try_orders(
    spec: JobSpec,
    sample: Sequence[pa.RecordBatch],
    tokenizer: Tokenizer,
    adapters: RowAdapters | None,
) -> list[Alternative]:
    """The savings of each order, the given one first; may raise `TokenIdsDifferError`."""
    orders = dict(column_orders(spec.prompt.template or ""))
    alternatives: list[Alternative] = []
    with Progress("try column orders", len(orders), unit="orders") as progress:
        for template, columns in orders.items():
            prompt = spec.prompt.model_copy(update={"template": template})
            other = spec.model_copy(update={"prompt": prompt})
            tables = [made.tokens for made in tokenize(other, sample, tokenizer, adapters)]
            prompts = (table.prompt(idx) for table in tables for idx in range(len(table)))
            tokens, merge = TokenTable.from_lists(prompts), spec.sampling.is_greedy
            saving = optimal_saving_ratio(tokens, block_size_of(spec), merge=merge)
            alternatives.append(Alternative(template, columns, saving, is_given=not alternatives))
            progress.advance(1)
    return alternatives


def format_advice(advice: Advice) -> str:
    """Lines for a terminal, without a trailing line break. Templates can be pasted into YAML."""
    lines = [
        f"saving ratios of column orders on the first {advice.num_sampled_rows:,} of"
        f" {counted(advice.num_rows, 'row')}; nothing was changed",
        " saving  template",
    ]
    for alternative in advice.alternatives:
        template = json.dumps(alternative.template, ensure_ascii=False)
        note = "  (as given)" if alternative.is_given else ""
        lines.append(f"{alternative.saving_ratio:7.1%}  {template}{note}")
    if len(advice.alternatives) == 1:
        lines.append("the template has no two columns that could change places")
    return "\n".join(lines)
