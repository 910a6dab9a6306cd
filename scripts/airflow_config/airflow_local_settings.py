"""Airflow on SQLite, for scripts/airflow.sh: writers wait for each other instead of failing.

Airflow imports this from its home's folder config/. A savepoint outside a transaction begins one
that has only read so far. When another process has written before it does, SQLite refuses its write
at once ("database is locked"), whatever the time-out, and `airflow backfill create` fails.
"""

import asyncio
import sqlite3
from typing import Any, Final

from sqlalchemy import Connection, Engine, event

__all__: list[str] = []  # Airflow would put any other name into its own settings

_BUSY_TIMEOUT_MS: Final = 30_000
"""Of waiting for another process's transaction; SQLite's default in Python is five seconds."""
_LOOP_TIMEOUT_MS: Final = 3_000
"""The same on the thread of an event loop, where the API server writes its log of actions: it may
wait for a request of its own process, which can't end before the loop goes on."""


@event.listens_for(Engine, "checkout")
def _wait_for_writers(connection: Any, *_: object) -> None:
    if not isinstance(connection, sqlite3.Connection):
        return
    try:
        asyncio.get_running_loop()
        timeout_ms = _LOOP_TIMEOUT_MS
    except RuntimeError:
        timeout_ms = _BUSY_TIMEOUT_MS
    connection.execute(f"PRAGMA busy_timeout = {timeout_ms}")


@event.listens_for(Engine, "savepoint")
def _begin_as_writer(connection: Connection, name: str) -> None:
    sqlite: Any = connection.connection.dbapi_connection
    if isinstance(sqlite, sqlite3.Connection) and not sqlite.in_transaction:
        connection.exec_driver_sql("BEGIN IMMEDIATE")
