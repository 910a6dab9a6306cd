"""The tree of field orders: see `field_orders`."""

import heapq
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from batchllm_operator.prefixes.jit import Int32s, Int64s, compiled


class FieldTable(NamedTuple):
    """Rows of fields, for compiled code.

    Attributes:
        values: [num_rows, num_fields] the number of each value, -1 where no other row has it.
        lengths: [num_rows, num_fields].
        fields: [num_values] the field of each value.
    """

    values: Int32s
    lengths: Int32s
    fields: Int32s

    @classmethod
    def of(cls, hashes: NDArray[np.uint64], lengths: Int32s) -> "FieldTable":
        values = np.empty(lengths.shape, dtype=np.int32)
        fields: list[Int32s] = []
        first = 0
        for field, column in enumerate(hashes):
            _, places, counts = np.unique(column, return_inverse=True, return_counts=True)
            is_shared = counts > 1
            numbers = np.where(is_shared, first + np.cumsum(is_shared) - 1, -1)
            values[:, field] = numbers[places]
            fields.append(np.full(int(is_shared.sum()), field, dtype=np.int32))
            first += len(fields[-1])
        return cls(values, lengths, np.concatenate(fields))


class Scratch(NamedTuple):
    """Memory for one node at a time.

    Attributes:
        found: [num_values] the node's values.
        total: [num_values] the node's rows with a value.
        left: [num_values] those of them that aren't taken.
        first: [num_values] one of its rows.
        agreed: [num_values] fields in which all its rows agree, as bits.
        weight: [num_values] the sum of their lengths.
        begin: [num_values] of its rows in `members`; later, of the child in `rows`.
        is_open: [num_values] whether taken rows begin with it.
        members: rows by value.
        taken: [num_rows] the value that a row begins with, -1 for none.
        rows: [num_rows] rows by node.
        sorted_rows: [num_rows] those of a node by child.
    """

    found: Int32s
    total: Int32s
    left: Int32s
    first: Int32s
    agreed: Int32s
    weight: Int64s
    begin: Int64s
    is_open: NDArray[np.bool_]
    members: Int32s
    taken: Int32s
    rows: Int32s
    sorted_rows: Int32s

    @classmethod
    def of(cls, table: FieldTable) -> "Scratch":
        num_rows, num_values = len(table.values), len(table.fields)
        found, total, left, first, agreed = np.zeros((5, num_values), dtype=np.int32)
        weight, begin = np.zeros((2, num_values), dtype=np.int64)
        members = np.empty(int(np.count_nonzero(table.values >= 0)), dtype=np.int32)
        rows = np.arange(num_rows, dtype=np.int32)
        is_open = np.zeros(num_values, dtype=np.bool_)
        taken = np.full(num_rows, -1, dtype=np.int32)
        numbers = (found, total, left, first, agreed, weight, begin)
        return cls(*numbers, is_open, members, taken, rows, rows.copy())


@compiled
def grow_orders(
    table: FieldTable, single: Int64s, by_mean: bool, orders: NDArray[np.uint8], node: Scratch
) -> int:
    """Write an order for each row; returns the bytes that they save.

    Args:
        single: the order of what isn't shared.
        by_mean: see `_score`.
        orders: [num_rows, num_fields].
    """
    num_rows, num_fields = table.values.shape
    nodes = [(np.int64(0), np.int64(num_rows), (1 << num_fields) - 1, 0)]
    saved = 0
    while len(nodes):
        begin, end, free, depth = nodes.pop()
        rows = node.rows[begin:end]
        if len(rows) == 0:
            continue
        same = _agreement(table, rows, free) if len(rows) > 1 else 0
        for field in single:
            if same >> field & 1:
                for row in rows:
                    orders[row, depth] = field
                saved += (len(rows) - 1) * table.lengths[rows[0], field]
                depth += 1
        free &= ~same
        if len(rows) == 1 or free == 0:
            for row in rows:
                _complete(orders, row, depth, free, single)
            continue
        num_found = _count(table, rows, free, node)
        _take(table, num_found, free, single, by_mean, node)
        children = _split(rows, begin, num_found, node)
        for value, first, last in children:
            field = table.fields[value]
            saved += (last - first - 1) * table.lengths[node.first[value], field]
            nodes.append((first, last, free & ~(1 << field), depth + 1))
        for row in rows:
            value = node.taken[row]
            if value < 0:
                _complete(orders, row, depth, free, single)
            else:
                orders[row, depth] = table.fields[value]
        _clear(rows, num_found, node)
    return saved


@compiled
def _agreement(table: FieldTable, rows: Int32s, fields: int) -> int:
    """Those of the fields in which all rows agree."""
    for row in rows[1:]:
        fields = _common(table, rows[0], row, fields)
        if fields == 0:
            break
    return fields


@compiled
def _common(table: FieldTable, row: int, other: int, fields: int) -> int:
    """Those of the fields in which two rows agree."""
    common = 0
    for field in range(table.values.shape[1]):
        value = table.values[row, field]
        if fields >> field & 1 and value >= 0 and value == table.values[other, field]:
            common |= 1 << field
    return common


@compiled
def _complete(orders: NDArray[np.uint8], row: int, depth: int, free: int, single: Int64s) -> None:
    """Write a row's last fields."""
    for field in single:
        if free >> field & 1:
            orders[row, depth] = field
            depth += 1


@compiled
def _count(table: FieldTable, rows: Int32s, free: int, node: Scratch) -> int:
    """Describe the values of a node's rows; returns how many there are."""
    num_found = 0
    for row in rows:
        for field in range(table.values.shape[1]):
            value = table.values[row, field]
            if value < 0 or not free >> field & 1:
                continue
            if node.total[value] == 0:
                node.found[num_found] = value
                num_found += 1
                node.first[value], node.agreed[value] = row, free
            else:
                agreed = node.agreed[value]
                node.agreed[value] = _common(table, node.first[value], row, agreed)
            node.total[value] += 1
    begin = 0
    for value in node.found[:num_found]:
        node.begin[value] = begin
        begin += node.total[value]
        node.weight[value] = 0
        for field in range(table.values.shape[1]):
            if node.agreed[value] >> field & 1:
                node.weight[value] += table.lengths[node.first[value], field]
    for row in rows:
        for field in range(table.values.shape[1]):
            value = table.values[row, field]
            if value >= 0 and free >> field & 1:
                node.members[node.begin[value] + node.left[value]] = row
                node.left[value] += 1
    return num_found


@compiled
def _score(table: FieldTable, value: np.int64, by_mean: bool, node: Scratch) -> np.int64:
    """What the rows of a value save that aren't taken: their mean, or between their sum and it.

    By the sum alone, a short value of many rows would split the long ones of few rows.
    """
    if node.left[value] == 0:
        return np.int64(0)
    score = (node.left[value] - 1) * node.weight[value]
    if node.is_open[value]:
        score += table.lengths[node.first[value], table.fields[value]]
    left = float(node.left[value])
    return np.int64(score * 1024 / (left if by_mean else np.sqrt(left)))


@compiled
def _take(
    table: FieldTable, num_found: int, free: int, single: Int64s, by_mean: bool, node: Scratch
) -> None:
    """Choose the value that each row of a node begins with, where that saves something."""
    heap = [(np.int64(0), np.int64(-1))]
    for value in node.found[:num_found]:
        if node.total[value] > 1:
            heap.append((-_score(table, value, by_mean, node), np.int64(value)))
    heapq.heapify(heap)
    while len(heap):
        known, value = heapq.heappop(heap)
        score = np.int64(0) if value < 0 else _score(table, value, by_mean, node)
        if score == 0:
            continue
        if score != -known:  # rows were taken, or there are some to join
            heapq.heappush(heap, (-score, value))
            continue
        rows = _left_rows(value, node)
        agreed = 1 << table.fields[value]
        if len(rows) > 1:
            agreed = _agreement(table, rows, free)
        head, most = value, 0
        for field in single:
            other = table.values[rows[0], field]
            if agreed >> field & 1 and node.total[other] > most:
                head, most = np.int64(other), node.total[other]
        for row in rows:
            node.taken[row] = head
            for field in range(table.values.shape[1]):
                other = table.values[row, field]
                if other >= 0 and free >> field & 1:
                    node.left[other] -= 1
        if not node.is_open[head]:
            node.is_open[head] = True
            if node.left[head]:
                heapq.heappush(heap, (-_score(table, head, by_mean, node), head))


@compiled
def _left_rows(value: np.int64, node: Scratch) -> Int32s:
    """The rows of a value that aren't taken."""
    members = node.members[node.begin[value] : node.begin[value] + node.total[value]]
    return members[node.taken[members] < 0]


@compiled
def _split(
    rows: Int32s, begin: np.int64, num_found: int, node: Scratch
) -> list[tuple[np.int64, np.int64, np.int64]]:
    """Sort a node's rows by the value that they begin with; returns each with its range of rows.

    Rows that begin with none come last.
    """
    node.left[node.found[:num_found]] = 0
    for row in rows:
        if node.taken[row] >= 0:
            node.left[node.taken[row]] += 1
    children = [(np.int64(0), np.int64(0), np.int64(0)) for _ in range(0)]
    place = begin
    for value in node.found[:num_found]:
        if node.is_open[value]:
            end = place + node.left[value]
            children.append((np.int64(value), np.int64(place), np.int64(end)))
            node.begin[value], place = place, end
    for row in rows:
        value = node.taken[row]
        if value >= 0:
            node.sorted_rows[node.begin[value]] = row
            node.begin[value] += 1
        else:
            node.sorted_rows[place] = row
            place += 1
    rows[:] = node.sorted_rows[begin : begin + len(rows)]
    return children


@compiled
def _clear(rows: Int32s, num_found: int, node: Scratch) -> None:
    found = node.found[:num_found]
    node.total[found] = node.left[found] = 0
    node.is_open[found] = False
    node.taken[rows] = -1
