"""Chooses the order of each row's fields, before the rows are made into prompts."""

import logging
from collections.abc import Iterable, Iterator
from string import Formatter
from typing import Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from batchllm_operator.amounts import counted
from batchllm_operator.plan.memory import BYTES_PER_PROMPT, MemoryBudget
from batchllm_operator.prefixes import ORDERING_BYTES, FieldOrders, hash_texts
from batchllm_operator.prompts import text_column
from batchllm_operator.spec import JobSpec
from batchllm_operator.spec.prompt import FIELD_ORDERS, FieldsSpec

_OF_ADAPTER: Final = 255  # a seed beyond those of fields
_log = logging.getLogger(__name__)


def choose_orders(
    spec: JobSpec, batches: Iterable[pa.RecordBatch], budget: MemoryBudget | None = None
) -> FieldOrders:
    """Orders for the rows of `batches`, which have the columns `read_columns`.

    Raises `SpecError`: they don't fit into the budget.
    """
    fields = _fields_of(spec)
    hashes, lengths, num_rows = [], [], 0
    extra = max(0, len(fields.columns) * ORDERING_BYTES - BYTES_PER_PROMPT)
    for batch in batches:
        num_rows += batch.num_rows
        if budget is not None:
            budget.holding(num_rows * extra).check(num_rows)
        ids, sizes = _described(spec, batch, num_rows)
        hashes.append(ids)
        lengths.append(sizes)
    nothing = np.zeros((0, len(fields.columns)))
    orders = FieldOrders.of(
        np.concatenate([nothing.T.astype(np.uint64), *hashes], axis=1),
        np.concatenate([nothing.astype(np.int32), *lengths]),
    )
    _log.info(
        "fields stand in %s; the best single one is %s",
        counted(orders.num_orders, "order"),
        ", ".join(fields.columns[field] for field in orders.single),
    )
    return orders


def read_columns(spec: JobSpec) -> tuple[str, ...]:
    """The columns that decide orders."""
    adapter = filter(None, [spec.model.adapter_column])
    return tuple(dict.fromkeys((*_fields_of(spec).columns, *adapter)))


def with_orders(
    batches: Iterable[pa.RecordBatch], orders: FieldOrders | None
) -> Iterator[pa.RecordBatch]:
    """The same rows, with their orders in a column of their own."""
    if orders is None:
        yield from batches
        return
    first = 0
    for batch in batches:
        numbers = pa.array(orders.orders[first : first + batch.num_rows].reshape(-1))
        column = pa.FixedSizeListArray.from_arrays(numbers, orders.orders.shape[1])
        yield batch.append_column(FIELD_ORDERS, column)
        first += batch.num_rows


def order_counts(orders: FieldOrders | None = None) -> dict[str, int]:
    """Fields of `PlanCounts`."""
    return {
        "num_field_orders": orders.num_orders if orders else 0,
        "num_field_bytes": orders.num_bytes if orders else 0,
        "num_shared_field_bytes": orders.num_shared_bytes if orders else 0,
        "num_single_order_bytes": orders.num_single_bytes if orders else 0,
    }


def _fields_of(spec: JobSpec) -> FieldsSpec:
    assert spec.prompt is not None and spec.prompt.fields is not None
    return spec.prompt.fields


def _described(
    spec: JobSpec, batch: pa.RecordBatch, seed: int
) -> tuple[npt.NDArray[np.uint64], npt.NDArray[np.int32]]:
    """Hashes, [num_fields, num_rows], and lengths, [num_rows, num_fields], of a batch's fields.

    A row without a prompt shares nothing; `seed` differs by batch, for its hashes.
    """
    fields = _fields_of(spec)
    columns = [text_column(batch.column(name)) for name in fields.columns]
    if spec.input.on_null == "empty":
        columns = [column.filled() for column in columns]
    texts = [column.texts for column in columns]
    hashes = np.stack([_hashes(text, field) for field, text in enumerate(texts)])
    labels = [
        sum(len(text.encode()) for text, *_ in Formatter().parse(template))
        for template in fields.templates
    ]
    lengths = np.stack([pc.binary_length(text).fill_null(0).to_numpy() for text in texts], axis=1)
    lengths = (lengths + labels).astype(np.int32)
    if spec.model.adapter_column is not None:  # adapters share nothing
        adapters = batch.column(spec.model.adapter_column).cast(pa.large_string()).fill_null("")
        hashes ^= _hashes(adapters, _OF_ADAPTER)
    has_null = np.any([text.is_null().to_numpy(zero_copy_only=False) for text in texts], axis=0)
    rejected = np.flatnonzero(has_null)
    generator = np.random.default_rng(seed)
    hashes[:, rejected] = generator.integers(0, 1 << 64, (len(texts), len(rejected)), np.uint64)
    lengths[rejected] = 0
    return hashes, lengths


def _hashes(texts: pa.LargeStringArray, seed: int) -> npt.NDArray[np.uint64]:
    _, offsets, data = texts.buffers()
    ends = np.frombuffer(offsets, dtype=np.int64)[texts.offset : texts.offset + len(texts) + 1]
    text = np.zeros(0, dtype=np.uint8) if data is None else np.frombuffer(data, dtype=np.uint8)
    return hash_texts(ends, text, seed)
