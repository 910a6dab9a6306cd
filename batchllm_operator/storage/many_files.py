"""Operations on many files of a folder, a few at a time to hide the storage's latency."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from itertools import chain
from pathlib import Path
from typing import TypeVar

from batchllm_operator.errors import SpecError
from batchllm_operator.storage.folder import Folder
from batchllm_operator.streams import ahead

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class StoredFile:
    """The storage's metadata of a file."""

    size_bytes: int
    modified_at: float
    """Seconds since 1970, by the storage's clock."""


def list_files(folder: Folder) -> dict[str, StoredFile]:
    """All files below a folder, by name relative to it, sorted.

    Raises `SpecError`: the storage doesn't say when a file was written.
    """
    files = {}
    for name, details in folder.find().items():
        # A creation time won't do: a file may have been replaced since.
        when = details["mtime"] if folder.is_local else details.get("LastModified")
        if when is None:
            raise SpecError(
                f"{folder.uri}/{name}: this storage doesn't say when a file was written (there is"
                " no LastModified), so gc can't tell what is old; remove old plans by hand, or keep"
                " them on local disk or S3 (output.staging_uri)"
            )
        seconds = when.timestamp() if isinstance(when, datetime) else float(when)
        files[name] = StoredFile(int(details["size"]), seconds)
    return files


def read_files(folder: Folder, names: Iterable[str]) -> dict[str, bytes]:
    """Contents of those of `names` that exist, all in memory: for small files."""
    return _each(names, folder.read_bytes)


def hash_files(folder: Folder, names: Iterable[str]) -> dict[str, str]:
    """SHA-256 (hex) of those of `names` that exist."""
    return _each(names, folder.sha256)


def remove_files(folder: Folder, names: Iterable[str]) -> None:
    """Remove those of `names` that exist; on local disk, also folders that are empty then."""
    names = list(names)
    _each(names, folder.remove)
    if folder.is_local:
        parents = {name.rpartition("/")[0] for name in names} - {""}
        above = {"/".join(p.split("/")[:n]) for p in parents for n in range(1, p.count("/") + 2)}
        for path in [*sorted(above, key=len, reverse=True), ""]:
            with suppress(OSError):  # it isn't empty, or is gone
                Path(folder.full_path(path)).rmdir()


def _each(names: Iterable[str], work: Callable[[str], T]) -> dict[str, T]:
    """The result for each name whose file exists. The first error ends the others."""

    def done(name: str) -> list[tuple[str, T]]:
        with suppress(FileNotFoundError):
            return [(name, work(name))]
        return []

    return dict(chain.from_iterable(ahead(names, done)))
