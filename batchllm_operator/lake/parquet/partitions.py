"""Where the files of a partition are: by the names of folders."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from batchllm_operator.errors import TableError
from batchllm_operator.lake.folder import Folder
from batchllm_operator.lake.parquet.hive_names import hive_values, is_visible, visible


@dataclass(frozen=True, slots=True)
class Partitions:
    """The partitions of a table by one column, at any level of its folders."""

    folder: Folder
    """The table's."""
    column: str

    def names(self) -> list[str]:
        """Names of all partitions, sorted."""
        return sorted(set(self._names_in(self.folder)))

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
        return [
            name for name in self.folder.subfolder_names() if self._is_in(f"{name}/", partition)
        ]

    def files_near(self, partition: str) -> dict[str, dict[str, Any]]:
        """Files that readers see, by name: the partition's, or all if it has none.

        Raises:
            TableError: a file of the partition can't be read, and isn't skipped.
        """
        found = {
            f"{name}/{below}": details
            for name in self.folders(partition)
            for below, details in self.folder.child(name).find().items()
        }
        if not visible(found):
            found = self.folder.find()
        self._check(found, partition)
        return visible(found)

    def chosen(
        self, files: Mapping[str, dict[str, Any]], partition: str
    ) -> dict[str, dict[str, Any]]:
        """The partition's among some files."""
        return {name: each for name, each in files.items() if self._is_in(name, partition)}

    def _is_in(self, name: str, partition: str) -> bool:
        return hive_values(name).get(self.column) == partition

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
