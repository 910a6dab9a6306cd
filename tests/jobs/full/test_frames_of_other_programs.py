"""`generate` for frames of polars, for DuckDB's relations, and in DuckDB's SQL."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pyarrow as pa
import pytest
from test_frames import FAKE

from batchllm_operator import frames, generate
from batchllm_operator.duckdb import register
from batchllm_operator.errors import TableError

if TYPE_CHECKING:
    import duckdb

FIELDS = "{sampling: {max_tokens: 8}, engine: {backend: 'fake', extra_args: {byte_tokens: true}}}"
CALL = f"generate('FROM docs WHERE n < 6', '{{kind}}: {{body}}', 'no-model', fields := {FIELDS})"
pytestmark = pytest.mark.usefixtures("programs", "cache")


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))


@pytest.fixture
def con() -> duckdb.DuckDBPyConnection:
    """A database with a table `docs` of eight rows."""
    import duckdb

    con = duckdb.connect()
    rows = "'line ' || n AS body, (CASE n % 2 WHEN 0 THEN 'a' ELSE 'b' END)::ENUM('a', 'b') AS kind"
    con.execute(f"CREATE TABLE docs AS SELECT n, {rows} FROM range(8) numbers(n) ORDER BY -n")
    return con


def forbid_jobs(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*given: object) -> None:
        raise AssertionError("a job was started")

    monkeypatch.setattr(frames, "run_command", refuse)


def test_a_polars_frame_is_answered(monkeypatch: pytest.MonkeyPatch) -> None:
    import polars as pl

    kinds = pl.Series(["x", "y", "x", None], dtype=pl.Categorical)
    unused = pl.Series([object()] * 4, dtype=pl.Object)  # no type of Arrow's
    frame = pl.DataFrame({"unused": unused, "body": ["c", "a", "", "b"], "kind": kinds})
    answered = generate(frame, "{kind}: {body}", **FAKE)
    assert isinstance(answered, pl.DataFrame)
    assert answered.columns[:4] == ["unused", "body", "kind", "generated_text"]
    assert answered.select("body", "kind").equals(frame.select("body", "kind"))
    assert answered["status"].to_list() == [*["cut_off"] * 3, "rejected"]
    assert answered["num_prompt_tokens"].to_list() == [len("x: c"), len("y: a"), len("x: "), None]
    assert frame.columns == ["unused", "body", "kind"]

    forbid_jobs(monkeypatch)
    assert generate(frame, "{kind}: {body}", **FAKE).drop("unused").equals(answered.drop("unused"))
    for other in (frame.lazy(), frame["body"]):
        with pytest.raises(TableError, match=rf"^generate: {type(other).__name__} "):
            generate(other, "{body}", **FAKE)


def test_a_relation_of_duckdb_is_answered_as_an_arrow_table(
    con: duckdb.DuckDBPyConnection, monkeypatch: pytest.MonkeyPatch
) -> None:
    answered = generate(con.table("docs"), "{kind}: {body}", **FAKE)
    assert isinstance(answered, pa.Table)
    assert answered["body"].to_pylist() == [f"line {n}" for n in range(7, -1, -1)]
    assert len({*answered["generated_text"].to_pylist()}) == 8

    register(con)
    forbid_jobs(monkeypatch)
    call = CALL.replace(" WHERE n < 6", "")
    assert (
        con.sql(f"FROM {call}")
        .to_arrow_table()["generated_text"]
        .equals(answered["generated_text"])
    )


def test_sql_answers_a_query_as_a_whole(
    con: duckdb.DuckDBPyConnection, monkeypatch: pytest.MonkeyPatch
) -> None:
    register(con)
    con.execute(f"CREATE TABLE answers AS FROM {CALL}")
    found = con.sql("SELECT n, body, num_prompt_tokens, status FROM answers").fetchall()
    assert found == [(n, f"line {n}", len("a: line 0"), "cut_off") for n in range(5, -1, -1)]

    forbid_jobs(monkeypatch)
    again = (
        f"SELECT count(*), count(DISTINCT again.generated_text) FROM {CALL} again"
        " JOIN answers USING (n) WHERE again.generated_text = answers.generated_text"
    )
    assert [con.execute(again).fetchall(), con.sql(again).fetchall()] == [[(6, 6)]] * 2


@pytest.mark.parametrize(
    ("old", "new", "error"),
    [
        ("FROM docs", "FROM nothing", "Table with name nothing does not exist"),
        ("{body}", "{boddy}", "the frame has no column 'boddy'; it has n, body, kind"),
        ("max_tokens: 8", "max_tokns: 8", "sampling.max_tokns: unknown field"),
        ("WHERE n < 6", "WHERE error('of its own')", "of its own"),
    ],
)
def test_an_error_in_sql_is_that_of_the_call(
    con: duckdb.DuckDBPyConnection, old: str, new: str, error: str
) -> None:
    import duckdb

    register(con)
    register(con)  # as where a notebook's cell runs again
    with pytest.raises(duckdb.Error, match=error):
        con.sql(f"FROM {CALL.replace(old, new)}").fetchall()
    assert con.sql("SELECT count(*) FROM docs").fetchall() == [(8,)]
