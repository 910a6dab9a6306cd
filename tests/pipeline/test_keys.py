"""Keys that don't identify rows are named, whatever kind they are and however little memory."""

from __future__ import annotations

import datetime
import decimal
from collections import Counter
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from batchllm_operator.errors import KeyColumnError
from batchllm_operator.pipeline.keys import check_keys
from batchllm_operator.planner import SearchMemory

UTC = datetime.UTC
KINDS: dict[str, tuple[pa.DataType, list[Any]]] = {
    "string": (pa.string(), ["a", "", "ab", "a\x00", "\N{SNOWMAN}"]),
    "large string": (pa.large_string(), ["a", "b"]),
    "binary": (pa.binary(), [b"", b"\x00", b"\xff\x00", b"\xff"]),
    "int64": (pa.int64(), [0, -1, 1, 2**62, 11]),
    "uint8": (pa.uint8(), [0, 1, 255]),
    "bool": (pa.bool_(), [True, False]),
    "double": (pa.float64(), [0.5, 0.1, float("inf"), 1e300]),
    "decimal": (pa.decimal128(20, 2), [decimal.Decimal("1.10"), decimal.Decimal("-1.10")]),
    "date": (pa.date32(), [datetime.date(2026, 1, 31), datetime.date(1969, 1, 1)]),
    "zoned time": (
        pa.timestamp("us", "Europe/Berlin"),
        [datetime.datetime(2026, 1, 31, tzinfo=UTC), datetime.datetime(2026, 2, 1, tzinfo=UTC)],
    ),
    "dictionary": (pa.dictionary(pa.int32(), pa.string()), ["x", "y"]),
}


def check(
    folder: Path, columns: dict[str, pa.Array], run_bytes: int = 1 << 20, rows: int = 3
) -> None:
    """Check all columns as one key."""
    table = pa.table(columns)
    pq.write_table(
        table.append_column("error", pa.nulls(len(table), pa.string())),
        folder / "rows",
        row_group_size=3,
    )
    check_keys(folder / "rows", tuple(columns), "table t", folder, SearchMemory(run_bytes, 1))
    assert [path.name for path in folder.iterdir()] == ["rows"]


@pytest.mark.parametrize("kind", KINDS)
def test_keys_of_any_kind(tmp_path: Path, kind: str) -> None:
    data_type, values = KINDS[kind]
    check(tmp_path, {"k": pa.array(values, data_type)})
    with pytest.raises(KeyColumnError, match=r"table t: key \(k\) isn't unique: .* occur more"):
        check(tmp_path, {"k": pa.array([*values, values[-1]], data_type)})
    other = pa.array(range(len(values) + 1))
    check(tmp_path, {"k": pa.array([*values, values[-1]], data_type), "n": other})


@settings(deadline=None, max_examples=60)
@given(
    st.lists(st.tuples(st.text("ab:1", max_size=3), st.text("ab:1", max_size=3)), max_size=25),
    st.integers(1, 2000),
)
@example([("a", "bc"), ("ab", "c")], 1)
@example([("1:a", ""), ("", "1:a")], 1)
def test_what_is_repeated_is_named_in_the_order_of_the_table(
    tmp_path_factory: pytest.TempPathFactory, keys: list[tuple[str, str]], run_bytes: int
) -> None:
    folder = tmp_path_factory.mktemp("keys")
    columns = {
        name: pa.array([key[place] for key in keys], pa.string())
        for place, name in enumerate(("k", "l"))
    }
    repeated = [key for key, count in Counter(keys).items() if count > 1]
    if not repeated:
        check(folder, columns, run_bytes)
        return
    named = ", ".join(f"{k!r} / {other!r}" for k, other in repeated[:10])
    more = f" and {len(repeated) - 10} more" if len(repeated) > 10 else ""
    with pytest.raises(KeyColumnError) as caught:
        check(folder, columns, run_bytes)
    assert str(caught.value) == (
        f"table t: key (k, l) isn't unique: {named}{more} occur more than once"
    )


def test_nulls_are_counted_and_the_first_are_named(tmp_path: Path) -> None:
    keys = pa.array([None if n % 3 == 2 else n for n in range(60)])
    with pytest.raises(KeyColumnError) as caught:
        check(tmp_path, {"k": pa.array(range(60)), "l": keys})
    assert str(caught.value) == (
        "table t: key column 'l' is null in 20 rows, such as row 2, 5, 8, 11, 14, 17, 20, 23, 26,"
        " 29 (counted from 0)"
    )


def test_lists_cannot_be_keys(tmp_path: Path) -> None:
    with pytest.raises(KeyColumnError, match="can't be compared"):
        check(tmp_path, {"k": pa.array([[1], [2]])})


def test_names_are_taken_as_they_are(tmp_path: Path) -> None:
    check(tmp_path, {'the "key".x': pa.array([1, 2]), "select": pa.array([1, 1])})


def test_no_rows(tmp_path: Path) -> None:
    check(tmp_path, {"k": pa.array([], pa.string())})
