"""`generate` in the SQL of a DuckDB connection."""

from __future__ import annotations

import itertools
import json
import shutil
import tempfile
import weakref
from pathlib import Path
from typing import Any, Final

import pyarrow.parquet as pq

from batchllm_operator.frames import generate

_MACRO: Final = """
CREATE OR REPLACE TEMP MACRO generate(
    query, template := NULL, model := NULL, fields := {{cache: NULL}}
) AS TABLE FROM read_parquet(
    {answers}(query, template, model, CAST(to_json(fields) AS VARCHAR))
)
"""


def register(con: Any) -> None:
    """Give a connection of DuckDB the table function `generate`: a query's rows, with answers.

    `FROM generate('FROM docs WHERE ...', template := 'Sum up: {body}', model := './models/mistral',
    fields := {sampling: {max_tokens: 40}})` has the columns of the query, in the order of its rows,
    and those that `batchllm_operator.generate` adds; `fields` has its other arguments. The query is
    text, as in DuckDB's own `query()`, and planned as a whole. It runs in a connection of its own
    to the same database: without temporary tables, or what isn't committed.

    DuckDB runs the job when it binds the statement, and may bind it several times: the second time
    the answers come from the cache. A temporary file keeps the rows of each binding until the
    connection is closed.
    """
    cursor, folder = con.cursor(), Path(tempfile.mkdtemp(prefix="batchllm-duckdb-"))
    files = (folder / f"{number}.parquet" for number in itertools.count())

    def answers(query: str, template: str | None, model: str | None, fields: str) -> str:
        file = next(files)
        given = {"model": model, **json.loads(fields)}
        pq.write_table(generate(cursor.sql(query), template, **given), file)
        return str(file)

    weakref.finalize(answers, shutil.rmtree, folder, ignore_errors=True)
    name = f"_{folder.name.replace('-', '_')}"  # no connection takes a function's name twice
    kinds = {"parameters": ["VARCHAR"] * 4, "return_type": "VARCHAR"}
    con.create_function(name, answers, **kinds, null_handling="special")
    con.execute(_MACRO.format(answers=name))
