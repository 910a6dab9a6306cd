"""Names of Hive-style folders, `column=value`, and which files below them readers see."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Final
from urllib.parse import quote, unquote

HIVE_NULL: Final = "__HIVE_DEFAULT_PARTITION__"
_UNSAFE: Final = re.compile(r"^\.|[%/=]")  # in a partition column's name
_ASCII: Final = re.compile(r"[\x00-\x7f]+")


def folder_name(column: str, value: str) -> str:
    """The folder of a partition, as `hive_values` reads it."""
    safe = _UNSAFE.sub(lambda found: f"%{ord(found[0]):02X}", column)
    # Spark and Hive read an escaped character that isn't ASCII as several others.
    return f"{safe}={_ASCII.sub(lambda found: quote(found[0], safe=''), value)}"


def hive_values(name: str) -> dict[str, str | None]:
    """Partition columns and values in a relative file name such as `ds=2026-01-31/a.parquet`.

    None is null.
    """
    segments = name.split("/")[:-1]
    pairs = (segment.partition("=") for segment in segments if "=" in segment)
    return {
        unquote(column): None if value == HIVE_NULL else unquote(value)
        for column, _, value in pairs
    }


def is_visible(name: str) -> bool:
    """Whether readers see the file. As in Spark, a column's name may begin with `_`."""
    *folders, base = name.split("/")
    hidden = base.startswith("_") or any(f.startswith("_") and "=" not in f for f in folders)
    return not hidden and not any(segment.startswith(".") for segment in (*folders, base))


def visible(files: Mapping[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """The files that readers see, whatever their names end with: their footers tell what they hold.

    Empty files stand for folders or mark a finished write, unless their names end with `.parquet`.
    """
    return {
        name: details
        for name, details in files.items()
        if is_visible(name) and (details["size"] or has_suffix(name))
    }


def has_suffix(name: str) -> bool:
    """Whether the file's name says that it is Parquet."""
    return name.casefold().endswith(".parquet")
