"""Template advice: the savings of other orders of the template's columns. Writes nothing.

A template is split into a fixed head, a piece for each column, the separators between pieces, and
a fixed tail. A piece is a column with its label ("Query: ") and its closing tag ("</query>").
Pieces change places; head, separators and tail stay:

    Document: {body}\nQuery: {query}\nAnswer:   ->   Query: {query}\nDocument: {body}\nAnswer:

Text between two columns is split at its first line breaks: the text before them belongs to the
first column, the text after them to the second. Without a line break, its leading marks and spaces
are the separator. A closing tag always belongs to the column before it. The result reads well for
usual templates, and is always shown to the user. Where each column has a label, the columns are
tried as `prompt.fields`, too. Of several prompts, each is tried in other orders beside the others
as they are; those of later rounds, whose answers aren't known, are left out.
"""

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise, permutations
from string import Formatter
from typing import Any, Final

import numpy as np
import pyarrow as pa

from batchllm_operator.amounts import counted
from batchllm_operator.engine.gpus import block_size_of
from batchllm_operator.errors import EmptyPartitionError, SpecError
from batchllm_operator.plan.rows.adapters import RowAdapters
from batchllm_operator.plan.rows.input_checks import (
    check_columns,
    describe_empty,
    open_input,
)
from batchllm_operator.plan.rows.ordering import choose_orders, with_orders
from batchllm_operator.plan.rows.reading import tokenize
from batchllm_operator.prefixes import FieldOrders, TokenTable, optimal_saving_ratio
from batchllm_operator.prefixes.jit import Int64s
from batchllm_operator.progress import Progress
from batchllm_operator.prompts import TokenIdsDifferError, Tokenizer, load_tokenizers
from batchllm_operator.spec import JobSpec, PromptSpec
from batchllm_operator.spec.prompt import (
    MAX_FIELDS,
    FieldsSpec,
    literal_template,
    with_places,
)
from batchllm_operator.spec.question import QuestionSpec
from batchllm_operator.stored_plan.stored_plan import check_partition

_SAMPLE_ROWS: Final = 2000
_MAX_PERMUTED: Final = 4  # 24 orders
_CLOSING_TAG: Final = re.compile(r"(?:\s*</[^<>]*>)?")
_LINE_BREAKS: Final = re.compile(r"\s*\n\s*")
_LABELLED: Final = re.compile(r"[^{}]{1,40}[:>]\s*\{[^{}]+\}(\s*</[^<>]*>)?")
_END: Final = "\n"  # of a field
_MARKS: Final = re.compile(r"[\W_]*")


@dataclass(frozen=True, slots=True)
class Alternative:
    """An order of the template's columns, and its saving on the sample."""

    template: str
    columns: tuple[str, ...]
    fields: dict[str, Any] | None
    """`prompt.fields`, where each row has them in an order of its own."""
    saving_ratio: float
    """That of one engine with unbounded memory, which computes all prompts of the rows."""
    is_given: bool
    """Whether this is the template of the spec."""
    prompt: str | None = None
    """The name of the prompt, if there are several."""


@dataclass(frozen=True, slots=True)
class Advice:
    """The orders that were compared."""

    num_sampled_rows: int
    num_rows: int
    """Rows of the partition before the filter."""
    alternatives: tuple[Alternative, ...]
    """By saving, descending; the given order comes first among equals."""
    alone_saving_ratio: float | None = None
    """That of a job for each of several prompts as they are."""


def advise(spec: JobSpec, ds: str, *, sample_rows: int = _SAMPLE_ROWS) -> Advice:
    """Plan the first rows of partition `ds` with the template's columns in other orders.

    The sample is the first rows of the table that the filter keeps. So neighbouring rows are
    sampled together, and sharing between distant rows is missed. Up to four columns are tried in
    every order; of more, each is tried in the first place. Columns that carry their names are also
    tried in an order by row.

    Raises:
        SpecError, TableError, ModelError: as `plan_job`.
        EmptyPartitionError: there are no rows.
    """
    check_partition(ds)
    if spec.prompt is not None and spec.prompt.template is None:
        raise SpecError(
            f"prompt.{spec.prompt.field}: advice is on the order of columns in prompt.template,"
            " which this job doesn't have"
        )
    table, snapshot = open_input(spec, ds)
    check_columns(spec, table, snapshot)
    tokenizers = load_tokenizers(spec, ds)
    adapters = RowAdapters.of(spec, tokenizers[0])
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
    sampled = _Sample(spec, sample, tokenizers, adapters)
    try:
        alternatives, alone = _try_orders(sampled)
    except TokenIdsDifferError:  # it won't happen again
        alternatives, alone = _try_orders(sampled)
    # The sort is stable, and the given order is the first.
    alternatives.sort(key=lambda alternative: (-alternative.saving_ratio, not alternative.is_given))
    return Advice(num_sampled, snapshot.num_rows, tuple(alternatives), alone)


@dataclass(frozen=True, slots=True)
class _Sample:
    """The first rows of a job's input, and what makes prompts of them."""

    spec: JobSpec
    rows: Sequence[pa.RecordBatch]
    tokenizers: Sequence[Tokenizer]
    adapters: RowAdapters | None

    def prompts(
        self, spec: JobSpec, orders: FieldOrders | None = None
    ) -> tuple[TokenTable, Int64s]:
        """The prompts of `spec`, which has other templates, and their asks."""
        rows = with_orders(self.rows, orders)
        made = list(tokenize(spec, rows, self.tokenizers, self.adapters))
        tables = [piece.tokens for piece in made]
        prompts = (table.prompt(idx) for table in tables for idx in range(len(table)))
        return TokenTable.from_lists(prompts), np.concatenate([each.row_idxs for each in made])

    def saving_ratio(self, tokens: TokenTable, asks: Int64s) -> float:
        merge = [question.sampling.is_greedy for question in self.spec.questions]
        return optimal_saving_ratio(tokens, block_size_of(self.spec), merge=merge, row_idxs=asks)

    def alone_saving_ratio(self) -> float:
        """That of a job for each of the spec's prompts."""
        tokens, asks = self.prompts(self.spec)
        num_saved, num = 0.0, len(self.spec.questions)
        for number in range(num):
            is_own = asks % num == number
            own = tokens.take(np.flatnonzero(is_own))
            num_saved += own.num_tokens * self.saving_ratio(own, asks[is_own])
        return num_saved / max(1, tokens.num_tokens)


def _try_orders(sample: _Sample) -> tuple[list[Alternative], float | None]:
    """The savings of each order, and of several prompts those of a job for each; may raise
    `TokenIdsDifferError`."""
    spec, alternatives = sample.spec, list[Alternative]()
    prompts: dict[str | None, PromptSpec] = {None: spec.prompt}
    alone = sample.alone_saving_ratio() if spec.prompts else None
    if spec.prompts:
        first = (list(spec.prompts)[number] for number in spec.rounds[0])
        prompts = {name: spec.prompts[name] for name in first}
    orders = [(name, *order) for name in prompts for order in _alternatives(prompts[name])]
    with Progress("try column orders", len(orders), unit="orders") as progress:
        for name, prompt, columns in orders:
            is_given = prompt is prompts[name]
            other = spec.model_copy(update={"prompt": prompt})
            if name is not None:
                other = spec.model_copy(update={"prompts": {**spec.prompts, name: prompt}})
            chosen = None if prompt.fields is None else choose_orders(other, sample.rows)
            progress.advance(1)
            if not is_given and chosen is not None and chosen.num_orders == 1:
                continue  # one of the others, under other labels
            saving = sample.saving_ratio(*sample.prompts(other, chosen))
            fields = prompt.fields.model_dump(mode="json") if prompt.fields else None
            template = prompt.template or prompt.field
            alternatives.append(Alternative(template, columns, fields, saving, is_given, name))
    return alternatives, alone


def _alternatives(prompt: PromptSpec) -> Iterator[tuple[PromptSpec, tuple[str, ...]]]:
    """Prompts to compare, the given one first, with their columns."""
    template, fielded = prompt.template, None
    if template is None:
        yield prompt, prompt.columns
        return
    if prompt.fields is not None:
        yield prompt, prompt.fields.columns
        template = with_places(template, {"fields": "".join(prompt.fields.templates)})
    elif not isinstance(prompt, QuestionSpec):
        fielded = fields_of(template)
    for other, columns in dict(column_orders(template)).items():
        new = prompt.model_copy(update={"template": other, "fields": None})
        yield prompt if other == prompt.template else new, columns
    if fielded is not None:
        update = dict(zip(("template", "fields"), fielded, strict=True))
        yield prompt.model_copy(update=update), fielded[1].columns


def format_advice(advice: Advice) -> str:
    """Lines for a terminal, without a trailing line break. Templates can be pasted into YAML."""
    lines = [
        f"saving ratios of column orders on the first {advice.num_sampled_rows:,} of"
        f" {counted(advice.num_rows, 'row')}; nothing was changed",
        " saving  template",
    ]
    if advice.alone_saving_ratio is not None:
        lines[1] = f"of all prompts in one job; a job for each: {advice.alone_saving_ratio:.1%}"
    for alternative in advice.alternatives:
        template = json.dumps(alternative.template, ensure_ascii=False)
        if alternative.prompt is not None:
            template = f"{alternative.prompt}: {template}"
        if alternative.fields is not None:
            template += f"  fields: {json.dumps(alternative.fields, ensure_ascii=False)}"
        note = "  (as given)" if alternative.is_given else ""
        lines.append(f"{alternative.saving_ratio:7.1%}  {template}{note}")
    if all(each.is_given for each in advice.alternatives):
        lines.append("the template has no two columns that could change places")
    return "\n".join(lines)


def column_orders(template: str) -> Iterator[tuple[str, tuple[str, ...]]]:
    """Orders worth trying, the given one first: the template, and its columns.

    All orders of up to 4 columns, else each column first. A column counts as often as it is placed.
    """
    taken_apart = _take_apart(template)
    if taken_apart is None:
        yield template, ()
        return
    head, pieces, separators, columns = taken_apart
    for order in _orders(len(pieces)):
        inner = (pieces[idx] + after for idx, after in zip(order, separators, strict=True))
        yield head + "".join(inner), tuple(columns[idx] for idx in order)


def fields_of(template: str) -> tuple[str, FieldsSpec] | None:
    """A template with its columns as fields, and these; None unless each column has a label."""
    taken_apart = _take_apart(template)
    if taken_apart is None:
        return None
    head, pieces, separators, columns = taken_apart
    can_be_fields = all(map(_LABELLED.fullmatch, pieces)) and "fields" not in columns
    if not can_be_fields or not 1 < len(set(columns)) == len(columns) <= MAX_FIELDS:
        return None
    template = f"{head}{{fields}}{separators[-1].removeprefix(_END)}"
    return template, FieldsSpec(order="by_row", columns=columns)


def _take_apart(template: str) -> tuple[str, list[str], list[str], tuple[str, ...]] | None:
    """The fixed head, the pieces, what follows each, and their columns; None without columns."""
    placed: list[tuple[str, str]] = []  # (text before, column)
    text = ""
    for literal, name, *_ in Formatter().parse(template):
        text += literal_template(literal)
        if name is not None:
            placed.append((text, name))
            text = ""
    if not placed:
        return None
    head, label = _split_head(placed[0][0])
    pieces, separators = [], []
    for (_, name), (between, _) in pairwise(placed):
        closing, separator, following = _split_between(between)
        pieces.append(f"{label}{{{name}}}{closing}")
        separators.append(separator)
        label = following
    closing = _closing(text)
    pieces.append(f"{label}{{{placed[-1][1]}}}{closing}")
    separators.append(text.removeprefix(closing))
    return head, pieces, separators, tuple(name for _, name in placed)


def _orders(num_pieces: int) -> Iterator[tuple[int, ...]]:
    given = range(num_pieces)
    if num_pieces <= _MAX_PERMUTED:
        return permutations(given)
    return ((first, *(idx for idx in given if idx != first)) for first in given)


def _split_head(text: str) -> tuple[str, str]:
    """(fixed, label): the label is the last line, without its leading marks.

    A line above the column is its label if it ends like one: "Document:" or "<document>".
    """
    is_above = text.endswith("\n") and text.rstrip().endswith((":", ">"))
    line_start = text.rfind("\n", 0, len(text.rstrip()) if is_above else None) + 1
    label = text[line_start:]
    cut = line_start + (0 if "<" in label else _num_marks(label))
    return text[:cut], text[cut:]


def _split_between(text: str) -> tuple[str, str, str]:
    """(closing of the column before, separator, label of the column after)."""
    closing = _closing(text)
    text = text.removeprefix(closing)
    if breaks := _LINE_BREAKS.search(text):
        return closing + text[: breaks.start()], breaks[0], text[breaks.end() :]
    is_plain = not closing and "<" not in text
    cut = _num_marks(text) if is_plain else len(text) - len(text.lstrip())
    return closing, text[:cut], text[cut:]


def _closing(text: str) -> str:
    """The closing tag of the column before, if the text begins with one."""
    tag = _CLOSING_TAG.match(text)
    return tag[0] if tag else ""


def _num_marks(text: str) -> int:
    marks = _MARKS.match(text)
    return marks.end() if marks else 0
