"""Orders of fields by row, against all orders there are."""

from collections.abc import Sequence
from itertools import permutations
from random import Random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.benchmark_modules import load
from support.levels import examples

from batchllm_operator.prefixes import hash_texts

bench = load("field_orders")
chosen, most, some_rows = bench.orders_of, bench.most_saved, bench.some_rows
Row = tuple[str, ...]


def saved(rows: Sequence[Row], orders: Sequence[Sequence[int]]) -> int:
    columns = [np.unique(column, return_inverse=True)[1] for column in zip(*rows, strict=True)]
    shape = (len(rows), len(rows[0]) if rows else 2)
    texts = np.array(columns, dtype=np.int64).T.reshape(shape)
    lengths = np.array([[*map(len, row)] for row in rows], dtype=np.int64).reshape(shape)
    num_bytes: int = bench.saved(texts, lengths, np.array(orders, dtype=np.uint8).reshape(shape))
    return num_bytes


tables = st.integers(1, 3).flatmap(
    lambda num: st.lists(st.tuples(*[st.sampled_from(["", "a", "bb", "cccc"])] * num), max_size=5)
)


@settings(max_examples=examples(300))
@given(rows=tables)
def test_orders_save_no_less_than_one_order_and_no_more_than_the_best(rows: list[Row]) -> None:
    num_fields = len(rows[0]) if rows else 2
    found = chosen(rows, num_fields)
    orders = found.orders.tolist()
    assert all(sorted(order) == list(range(num_fields)) for order in orders)
    assert found.num_orders == len(set(map(tuple, orders)))
    assert len(set(zip(rows, map(tuple, orders), strict=True))) == len(set(rows)), "equal rows"
    assert found.num_bytes == sum(len(text) for row in rows for text in row)
    one_order = [saved(rows, [order] * len(rows)) for order in permutations(range(num_fields))]
    assert found.num_single_bytes == max(one_order)
    assert found.num_single_bytes == saved(rows, [found.single] * len(rows))
    assert found.num_shared_bytes == saved(rows, orders)
    assert max(one_order) <= found.num_shared_bytes <= most(rows, num_fields)


def test_on_small_tables_orders_save_nearly_what_the_best_save() -> None:
    found = bench.small_tables(examples(400, few=60))
    assert found["best_single"] < 0.99 <= found["by_row"] <= 1
    assert found["as_good"] >= 0.9


def test_rows_that_share_different_fields_begin_with_them() -> None:
    """No single order suits both kinds of rows."""
    rows = [("same title", f"review {idx}", f"{idx}") for idx in range(20)]
    rows += [(f"title {idx}", "the same review", f"{idx}") for idx in range(20)]
    found = chosen(rows, 3)
    assert set(found.orders[:20, 0]) == {0} and set(found.orders[20:, 0]) == {1}
    assert found.num_shared_bytes == 19 * len("same title" + "the same review")
    assert found.num_single_bytes == 19 * len("the same review")


def test_a_field_that_depends_on_another_comes_after_what_more_rows_share() -> None:
    rows = [(f"text of product {idx}" * 5, "books" if idx % 2 else "music") for idx in range(10)]
    found = chosen(rows * 3, 2)
    assert (found.num_orders, found.orders[0].tolist()) == (1, [1, 0])
    distinct = sum(len(text) for text, _ in rows) + len("books" + "music")
    assert found.num_shared_bytes == found.num_bytes - distinct


@pytest.mark.parametrize("num_fields", [1, 2, 12, 16])
def test_extreme_tables(num_fields: int) -> None:
    none, one = chosen([], num_fields), chosen([("a",) * num_fields], num_fields)
    assert (none.num_orders, none.num_bytes, none.orders.shape) == (0, 0, (0, num_fields))
    assert (one.num_orders, one.num_shared_bytes) == (1, 0)
    equal = chosen([("abc",) * num_fields] * 50, num_fields)
    assert (equal.num_orders, equal.num_shared_bytes) == (1, 49 * 3 * num_fields)
    different = chosen([(f"{idx}",) * num_fields for idx in range(50)], num_fields)
    assert (different.num_orders, different.num_shared_bytes) == (1, 0)
    assert different.single == tuple(range(num_fields)), "as given"


def test_the_order_of_a_row_does_not_depend_on_where_rows_stand() -> None:
    rng = Random(1)
    rows = some_rows(rng, 300, 6)
    places = rng.sample(range(300), 300)
    there, here = chosen([rows[place] for place in places], 6), chosen(rows, 6)
    assert there.orders.tolist() == here.orders[places].tolist()
    assert here.num_orders > 1 and here.num_shared_bytes == saved(rows, here.orders.tolist())
    assert there.num_shared_bytes == here.num_shared_bytes > here.num_single_bytes


def test_hashes_differ_by_text_and_field() -> None:
    texts = [str(number).encode() for number in range(1000)]
    ends, data = np.cumsum([0, *map(len, texts)]), np.frombuffer(b"".join(texts), dtype=np.uint8)
    hashes = np.stack([hash_texts(ends, data, seed) for seed in range(16)])
    assert len(np.unique(hashes)) == hashes.size
    sums = hashes[:2].sum(axis=0)[:, None] + hashes[2]
    assert len(np.unique(sums)) == sums.size
