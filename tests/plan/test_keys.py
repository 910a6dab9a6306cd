"""Keys that don't identify rows are found and named, whatever their kind, in bounded memory."""

import datetime as dt
from collections import Counter
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from support.levels import examples

from batchllm_operator.errors import KeyColumnError
from batchllm_operator.plan.rows import keys as keys_module
from batchllm_operator.plan.rows.keys import check_keys
from batchllm_operator.prefixes import TokenTable
from batchllm_operator.stored_plan.row_keys import check_key_types


def check(folder: Path, table: pa.Table, *key: str, **options: Any) -> str | None:
    """The error's message, without the advice; None if each row has a key of its own."""
    file = folder / "rows.parquet"
    pq.write_table(table, file, **options)
    try:
        check_key_types(table.schema, key or ("id",), "table t")
        check_keys(file, key or ("id",), "table t")
    except KeyColumnError as error:
        message, advice = str(error).rsplit("; ", 1)
        assert "key" in advice
        return message
    return None


NOTHING = pa.array([], pa.int64())
NUMBERS = [None if number % 1000 == 7 else number for number in range(12_000)]
TABLES: dict[str, tuple[dict[str, Any], str, str | None]] = {
    "named by first appearance": ({"id": ["z", "b", "a", "b", "c", "z", "z"]}, "id", "'z', 'b'"),
    "ten named, others counted": (
        {"id": [number % 20_013 for number in range(40_026)]},
        "id",
        f"{', '.join(map(str, range(10)))} and 20003 more",
    ),
    "exactly ten": ({"id": [*range(10)] * 2}, "id", ", ".join(map(str, range(10)))),
    "far apart": ({"id": [*range(20_000), 5, 19_999]}, "id", "5, 19999"),
    "booleans": ({"id": [True, False, False]}, "id", "False"),
    "different booleans": ({"id": [True, False]}, "id", None),
    "no rows": ({"id": NOTHING}, "id", None),
    "together": ({"a": ["x", "xy", "x"], "b": ["yz", "z", "y"]}, "a b", None),
    "in the key's order": ({"a": ["x", "xy", "x"], "c": [1, 1, 1]}, "c a", "1 / 'x'"),
    "lengths keep columns apart": (
        {"a": ["a", "ab", "1:a", ""], "b": ["bc", "c", "", "1:a"]},
        "a b",
        None,
    ),
}


@pytest.mark.parametrize("case", TABLES)
def test_repeated_keys_are_named(tmp_path: Path, case: str) -> None:
    columns, key, named = TABLES[case]
    message = check(tmp_path, pa.table(columns), *key.split(), row_group_size=700)
    if named is None:
        assert message is None
    else:
        together = ", ".join(key.split())
        assert message == f"table t: key ({together}) isn't unique, as it repeats {named}"


@pytest.mark.parametrize(
    ("columns", "column", "found"),
    [
        (
            {"x": NUMBERS, "id": NUMBERS},
            "x",
            "12 rows, such as row 7, 1007, 2007, 3007, 4007, 5007, 6007, 7007, 8007, 9007",
        ),
        ({"a": [1, 1], "b": [None, "x"]}, "b", "1 row, such as row 0"),
        ({"id": pa.nulls(3)}, "id", "3 rows, such as row 0, 1, 2"),
    ],
)
def test_nulls_are_counted_and_located_before_repeats(
    tmp_path: Path, columns: dict[str, Any], column: str, found: str
) -> None:
    assert check(tmp_path, pa.table(columns), *columns) == (
        f"table t: key column {column!r} is null in {found} (counted from 0)"
    )


DAY = dt.date(2026, 1, 31)
# Kind -> three values that differ by as little as they can.
KINDS: dict[str, pa.Array] = {
    "string": pa.array(["", "a", "a "]),
    "string with zeros": pa.array(["a", "a\0", "a\0\0"]),
    "string, composed or not": pa.array(["é", "e\u0301", "É"]),
    "large_string": pa.array(["a", "b", "A"], pa.large_string()),
    "string_view": pa.array(["a", "b", "longer than twelve bytes"], pa.string_view()),
    "string that isn't UTF-8": pa.array([b"\xff", b"\xfe", b""]).view(pa.string()),
    "binary": pa.array([b"\xff", b"\xff\0", b""]),
    "binary_view": pa.array([b"\xff", b"\xff\0", b""], pa.binary_view()),
    "fixed binary": pa.array([b"abc", b"abd", b"abe"], pa.binary(3)),
    "fixed binary that isn't UTF-8": pa.array([b"\xff\0", b"\xfe\0", b"\xff\1"], pa.binary(2)),
    "uuid": pa.array([bytes([n] * 16) for n in (0, 254, 255)], pa.uuid()),
    "dictionary": pa.array(["a", "b", "c"]).dictionary_encode(),
    "dictionary of binary": pa.array([b"a", b"b", b"c"]).dictionary_encode(),
    "uint64": pa.array([2**64 - 1, 2**64 - 2, 0], pa.uint64()),
    "int64": pa.array([2**53, 2**53 + 1, -1]),
    "int8": pa.array([-128, 127, 0], pa.int8()),
    "decimal": pa.array([Decimal("1.00"), Decimal("1.01"), Decimal("-1.00")]),
    "decimal of 38 digits": pa.array([Decimal(10**37 + n) for n in range(3)]),
    "decimal of 60 digits": pa.array([Decimal(10**59 + n) for n in range(3)], pa.decimal256(60)),
    "date": pa.array([DAY, dt.date(1, 1, 1), dt.date(9999, 12, 31)]),
    "date after 9999": pa.array([2_932_897, 2_932_898, -800_000], pa.date32()),
    "timestamp in s": pa.array([0, 1, -1], pa.timestamp("s")),
    "timestamp in ns": pa.array([10**18, 10**18 + 1, 10**18 + 2], pa.timestamp("ns")),
    "timestamp with zone": pa.array([0, 1, 3600 * 10**6], pa.timestamp("us", "UTC")),
    "timestamp in ns with zone": pa.array([0, 1, 2], pa.timestamp("ns", "Europe/Paris")),
    "timestamp after 9999": pa.array([2**60, 2**60 + 1, 2**60 + 2], pa.timestamp("us")),
    "timestamp with unknown zone": pa.array([0, 1, 2], pa.timestamp("us", "No/Zone")),
    "time in ns": pa.array([0, 1, 2], pa.time64("ns")),
    "time": pa.array([dt.time(1), dt.time(1, 0, 0, 1), dt.time(0)]),
    "duration": pa.array([0, 1, 2], pa.duration("ns")),
    "float": pa.array([0.1, 0.1 + 2**-56, float("inf")]),
    "float, special": pa.array([float("nan"), 0.0, -0.0]),
    "float32": pa.array([0.1, 0.2, float("nan")], pa.float32()),
    "float16": pa.array([0.5, 0.25, 1.0], pa.float16()),
}


# What Python can't write is named by its bits.
UNNAMEABLE = {
    "string that isn't UTF-8": r"b'\xfe'",
    "timestamp in ns": "1000000000000000001",
    "timestamp in ns with zone": "1",
    "timestamp after 9999": str(2**60 + 1),
    "timestamp with unknown zone": "1",
    "time in ns": "1",
    "date after 9999": "'10000-01-02'",
    "duration": "1",
}


@pytest.mark.parametrize("kind", KINDS)
def test_any_kind_of_key(tmp_path: Path, kind: str) -> None:
    values = KINDS[kind]
    table = pa.table({"id": values})
    assert check(tmp_path, table) is None
    repeated = check(tmp_path, pa.concat_tables([table, table.slice(1, 1)]), row_group_size=2)
    named = UNNAMEABLE.get(kind) or repr(values[1].as_py())
    assert repeated == f"table t: key (id) isn't unique, as it repeats {named}"


def test_long_keys_are_encoded_a_few_at_a_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes: list[int] = []
    encode = keys_module.encode_keys

    def counted(batch: pa.RecordBatch, where: str) -> TokenTable:
        found = encode(batch, where)
        sizes.append(found.num_tokens)
        return found

    monkeypatch.setattr(keys_module, "encode_keys", counted)
    keys = [f"{n:06d}" * 500 for n in range(6000)]  # 18 MB
    assert check(tmp_path, pa.table({"id": keys})) is None
    assert sum(sizes) == 18_000_000
    assert max(sizes) <= 4 << 20


@pytest.mark.parametrize(
    "values",
    [
        pa.array([["a"], ["b"]]),
        pa.array([{"a": 1}, {"a": 2}]),
        pa.array([[("a", 1)], []], pa.map_(pa.string(), pa.int64())),
    ],
    ids=lambda values: str(values.type),
)
def test_kinds_that_cannot_be_compared(tmp_path: Path, values: pa.Array) -> None:
    message = check(tmp_path, pa.table({"n": [1, 2], "id": values}), "n", "id")
    assert message is not None
    assert message.startswith("table t: column 'id' holds ")
    assert message.endswith("which can't be compared")


@settings(max_examples=examples(60))
@given(
    st.lists(st.tuples(st.text("ab:1", max_size=3), st.integers(0, 3)), max_size=30),
)
@example([("a", 1), ("1:a", 11), ("a", 1)])
def test_agrees_with_counting(
    tmp_path_factory: pytest.TempPathFactory, rows: list[tuple[str, int]]
) -> None:
    schema = pa.schema([("a", pa.string()), ("b", pa.int8())])
    table = pa.Table.from_pylist([{"a": a, "b": b} for a, b in rows], schema)
    repeated = [row for row, count in Counter(rows).items() if count > 1]
    folder = tmp_path_factory.mktemp("rows")
    message = check(folder, table, "a", "b")
    if not repeated:
        assert message is None
        return
    more = f" and {len(repeated) - 10} more" if len(repeated) > 10 else ""
    named = ", ".join(f"{a!r} / {b!r}" for a, b in repeated[:10])
    assert message == f"table t: key (a, b) isn't unique, as it repeats {named}{more}"
