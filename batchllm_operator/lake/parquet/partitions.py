"""Where the files of a partition are: by Hive-style names of folders, `column=value`."""

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final
from urllib.parse import quote, unquote

from batchllm_operator.errors import TableError
from batchllm_operator.lake.parquet_footer import is_parquet
from batchllm_operator.lake.partition_order import in_order
from batchllm_operator.storage import Folder

HIVE_NULL: Final = "__HIVE_DEFAULT_PARTITION__"
_UNSAFE: Final = re.compile(r"^\.|[%/=]")  # in a partition column's name
_ASCII: Final = re.compile(r"[\x00-\x7f]+")


def folder_name(column: str, value: str) -> str:
    """The folder of a partition, as `hive_values` reads it."""
    safe = _UNSAFE.sub(lambda match: f"%{ord(match[0]):02X}", column)
    # Spark and Hive read an escaped character that isn't ASCII as several others.
    return f"{safe}={_ASCII.sub(lambda match: quote(match[0], safe=''), value)}"


def hive_values(name: str) -> dict[str, str | None]:
    """Partition columns and values in a name such as `ds=2026-01-31/a.parquet`; None is null."""
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


@dataclass(frozen=True, slots=True)
class Partitions:
    """The partitions of a table by one column, at any level of its folders."""

    folder: Folder
    """The table's."""
    column: str
    outer: Mapping[str, str]
    """Values of other columns that its files have."""

    def names(self) -> list[str]:
        """Names of all partitions, ascending."""
        return in_order(self._names_in(self.folder))

    def _names_in(self, folder: Folder) -> Iterator[str]:
        """Names of partitions with a folder in this one, or in its folders of other columns."""
        for name in folder.subfolder_names():
            values = hive_values(f"{name}/")
            if self.column not in values:
                yield from self._names_in(folder.child(name)) if values else ()
            elif (value := values[self.column]) is not None:
                yield value

    def folders(self, partition: str) -> list[str]:
        """Those of a partition in the table's folder: names may be escaped in several ways."""
        wanted = {self.column: partition, **self.outer}.items()
        values = {name: hive_values(f"{name}/") for name in self.folder.subfolder_names()}
        return [name for name, known in values.items() if known and known.items() <= wanted]

    def files_near(self, partition: str) -> dict[str, dict[str, Any]]:
        """Files that readers see, by name: the partition's, or all if it has none."""
        files = {
            f"{name}/{below}": details
            for name in self.folders(partition)
            for below, details in self.folder.child(name).find().items()
        }
        if not _data_files(files):
            files = self.folder.find()
        self._check(files, partition)
        return _data_files(files)

    def chosen(
        self, files: Mapping[str, dict[str, Any]], partition: str
    ) -> dict[str, dict[str, Any]]:
        """The partition's among some files."""
        return {name: files[name] for name in files if self._is_in(name, partition)}

    def check_apart(self) -> None:
        """Refuse to write a table on top of another: readers would take both for one.

        Of a table that has partitions, only folders of other columns are looked at.
        """
        columns = {name: hive_values(f"{name}/") for name in self.folder.subfolder_names()}
        found: Iterable[tuple[str, dict[str, Any]]]
        if any(self.column in values for values in columns.values()):
            folders = [n for n, values in columns.items() if values and self.column not in values]
            found = (
                (f"{name}/{below}", details)
                for name in folders
                for below, details in self.folder.child(name).find().items()
            )
        else:
            found = self.folder.find().items()
        for name, details in found:
            if is_visible(name) and (
                _has_suffix(name) or is_parquet(self.folder, name, int(details["size"]))
            ):
                raise TableError(
                    f"output {self.folder.uri}: holds {name!r}, but isn't partitioned by"
                    f" {self.column!r}; move it away or choose another output table"
                )

    def _is_in(self, name: str, partition: str) -> bool:
        return hive_values(name).items() >= {self.column: partition, **self.outer}.items()

    def _check(self, files: Mapping[str, dict[str, Any]], partition: str) -> None:
        """Refuse the partition's unreadable files, rather than skip them."""
        where = f"table {self.folder.uri}"
        for name, details in files.items():
            # A link in place of the partition's folder counts as a file, too.
            if not is_visible(name) or not self._is_in(f"{name}/", partition):
                continue
            if details["type"] == "other" and not Path(self.folder.full_path(name)).is_file():
                raise TableError(
                    f"{where}: {name} is a broken link, a link to a folder, or not a regular file;"
                    " put the files themselves there"
                )
            try:
                name.encode()
            except UnicodeEncodeError as error:
                raise TableError(f"{where}: the name of {name!r} isn't UTF-8; rename it") from error


def _data_files(files: Mapping[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """The files that readers see, whatever their names end with: their footers tell what they hold.

    Empty files stand for folders or mark a finished write, unless their names end with `.parquet`.
    """
    return {
        name: details
        for name, details in files.items()
        if is_visible(name) and (details["size"] or _has_suffix(name))
    }


def _has_suffix(name: str) -> bool:
    return name.casefold().endswith(".parquet")
