"""A folder on disk or in an object store, with the few operations that crash safety is built from.

A write is visible in one step: on disk by fsync and rename, in a store by the single request that
completes an upload.
"""

from __future__ import annotations

import errno
import hashlib
import os
import random
import shutil
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Final

from fsspec.implementations.local import LocalFileSystem

from batchllm_operator.errors import MissingLibraryError, SpecError, StorageError
from batchllm_operator.secrets import holds_credentials
from batchllm_operator.spec import check_folder
from batchllm_operator.spec.addresses import CLOUD_SCHEMES, S3_SCHEMES
from batchllm_operator.storage.failures import Condition, is_conflict, storage_errors

_READ_AHEAD_BYTES: Final = 8 << 20
_CONFLICT_WAITS_S: Final = (0.1, 0.4, 1.6, 6.4)
"""Pauses before a conditional write that met another one under way is repeated."""
_NO_LINKS: Final = (errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS)


@dataclass(frozen=True, slots=True)
class Folder:
    """A folder that need not exist yet; names in it use `/` and never start with one.

    To read a file that isn't there raises `FileNotFoundError`.
    """

    fs: Any  # fsspec.AbstractFileSystem; fsspec ships no types
    path: str

    @classmethod
    def open(cls, uri: str, **options: Any) -> Folder:
        """The folder at a local path or a URI such as `s3://bucket/table`.

        Credentials and endpoints come from the environment (`AWS_*`, `GOOGLE_*`, `AZURE_*`), as for
        any client of that cloud, unless `options` say otherwise, of S3's file system.

        Raises `SpecError`: the URI isn't one of these, or holds credentials; `MissingLibraryError`.
        """
        if holds_credentials(uri):  # without the URI, which goes into plans and reports, too
            raise SpecError(
                "the URI of a folder holds credentials; take them from the environment or an"
                " Airflow connection instead"
            )
        try:
            is_path = b"\0" not in os.fsencode(uri)
        except UnicodeEncodeError:
            is_path = False
        if not is_path:
            raise SpecError(f"{uri!r}: isn't a path or a URI")
        try:
            check_folder(uri)
        except ValueError as error:
            raise SpecError(f"{uri}: {error}") from None
        try:
            fs, path = _file_system(uri, options)
        except (ValueError, ImportError) as error:
            raise SpecError(f"{uri}: no storage for this kind of URI: {error}") from error
        return cls(fs, path.rstrip("/"))

    @property
    def is_local(self) -> bool:
        return isinstance(self.fs, LocalFileSystem)

    @property
    def uri(self) -> str:
        """A plain path if the folder is local, else a URI."""
        return self.path if self.is_local else str(self.fs.unstrip_protocol(self.path))

    def child(self, *names: str) -> Folder:
        return Folder(self.fs, "/".join((self.path, *names)))

    def full_path(self, name: str) -> str:
        """The path of `name` as the file system wants it."""
        return f"{self.path}/{name}"

    def exists(self, name: str = "") -> bool:
        """Whether the folder (no name) or a file or folder in it exists."""
        with self._errors(name):
            return bool(self.fs.exists(self.full_path(name) if name else self.path))

    def subfolder_names(self) -> list[str]:
        """Names of the folders directly in this one, sorted; none if it doesn't exist."""
        with self._errors():
            try:
                if self.is_local:  # an entry that vanishes meanwhile must not hide others
                    with os.scandir(self.path) as entries:
                        return sorted(e.name for e in entries if e.is_dir(follow_symlinks=False))
                listed = self.fs.ls(self.path, detail=True)
            except (FileNotFoundError, NotADirectoryError):
                return []
        return sorted(
            entry["name"].rstrip("/").rpartition("/")[2]
            for entry in listed
            if entry["type"] == "directory"
        )

    def find(self) -> dict[str, dict[str, Any]]:
        """All files below, by name relative to the folder, sorted; values are fsspec's details.

        Objects that stand for a folder on S3 (a name ending in `/`) aren't files.
        """
        with self._errors():
            try:
                if self.is_local:
                    details = dict(self._walk(self.path))
                else:
                    details = self.fs.find(self.path, detail=True)
            except (FileNotFoundError, NotADirectoryError):
                return {}
        names = ((path[len(self.path) + 1 :], path) for path in sorted(details))
        return {n: details[path] for n, path in names if n and not n.endswith("/")}

    @contextmanager
    def open_file(self, name: str, *, read_ahead: bool = True) -> Iterator[IO[bytes]]:
        """Open `name` for reading, seekable; errors of later reads are not converted.

        Without `read_ahead` each read on S3 is one request for just those bytes, for readers that
        seek in large steps.
        """
        options = {} if read_ahead or self.is_local else {"cache_type": "none"}
        with self._errors(name):
            file = self.fs.open(self.full_path(name), "rb", **options)
        with file:
            yield file

    def read_bytes(self, name: str, start: int | None = None) -> bytes:
        """The content of `name`, from byte `start` on."""
        with self._errors(name):
            return bytes(self.fs.cat_file(self.full_path(name), start=start))

    def sha256(self, name: str) -> str:
        """SHA-256 (hex) of `name`, read in chunks."""
        options = {} if self.is_local else {"block_size": _READ_AHEAD_BYTES}
        with self._errors(name), self.fs.open(self.full_path(name), "rb", **options) as file:
            return hashlib.file_digest(file, "sha256").hexdigest()

    def write_bytes(self, name: str, data: bytes) -> None:
        """Create or replace `name` in one step: a reader sees all of `data` or the old content."""
        with self._errors(name, writing=True):
            if not self.is_local:
                self.fs.pipe_file(self.full_path(name), data)
                return
            with self._replacing(name) as temporary:
                temporary.write_bytes(data)

    def create(self, name: str, data: bytes) -> bool:
        """Write `name` in one step unless it exists; returns whether it now holds `data`.

        After an error the file is read back, because the answer to a successful write may be lost.
        Competing callers therefore put a random token into `data`.

        Raises `StorageError`: nothing was written, as far as can be known.
        """
        self.check_conditional_writes("IfNoneMatch")
        with self._errors(name, writing=True):
            for wait_s in (*_CONFLICT_WAITS_S, None):
                try:
                    self._create(name, data)
                    return True
                except storage_errors() as error:
                    with suppress(FileNotFoundError):
                        return bytes(self.fs.cat_file(self.full_path(name))) == data
                    if wait_s is None or not is_conflict(error):
                        raise
                time.sleep(wait_s * random.uniform(0.5, 1.0))
            raise AssertionError("the last try returns or raises")

    def check_conditional_writes(self, *conditions: Condition) -> None:
        """Raise `StorageError` at a store of S3 that ignores conditions; see `S3Files`."""
        if not self.is_local:
            self.fs.check_honours(self.path, *conditions)

    def publish_file(self, source: Path, name: str) -> None:
        """Create or replace `name` by a copy of the local file `source`, in one step."""
        with self._errors(name, writing=True):
            if not self.is_local:
                self.fs.put_file(str(source), self.full_path(name))
                return
            with self._replacing(name) as temporary:
                shutil.copyfile(source, temporary)

    def copy_to(self, name: str, target: Folder, new_name: str) -> None:
        """Make `name` a file of another folder of the same storage, too, replacing what is there.

        On local disk both names share their bytes where links are possible; S3 copies by itself.
        """
        with self._errors(name):
            if not self.is_local:
                self.fs.copy(self.full_path(name), target.full_path(new_name))
                return
            with target._replacing(new_name) as temporary:
                try:
                    temporary.hardlink_to(self.full_path(name))
                except OSError as error:
                    if error.errno not in (*_NO_LINKS, errno.EXDEV):
                        raise
                    shutil.copyfile(self.full_path(name), temporary)

    def remove(self, name: str) -> None:
        with self._errors(name), suppress(FileNotFoundError):
            self.fs.rm_file(self.full_path(name))

    def _create(self, name: str, data: bytes) -> None:
        """Write `name` if it isn't there."""
        if not self.is_local:
            self.fs.pipe_file(self.full_path(name), data, mode="create")
            return
        target = Path(self.full_path(name))
        with self._temporary(target) as temporary:
            temporary.write_bytes(data)
            fsync(temporary)
            try:
                target.hardlink_to(temporary)
            except OSError as error:
                if error.errno not in _NO_LINKS:
                    raise
                with target.open("xb") as file:  # readers reject a half-written one
                    try:
                        file.write(data)
                        file.flush()
                    except OSError:  # it would look like another writer's
                        target.unlink()
                        raise
                fsync(target)
            fsync(target.parent)

    @contextmanager
    def _replacing(self, name: str) -> Iterator[Path]:
        """A temporary path beside the local `name`; renamed to it, durably, on success."""
        target = Path(self.full_path(name))
        with self._temporary(target) as temporary:
            yield temporary
            fsync(temporary)
            temporary.replace(target)
            fsync(target.parent)

    @contextmanager
    def _temporary(self, target: Path) -> Iterator[Path]:
        """A path beside the local file `target`; nothing is there afterwards."""
        _make_folder(target.parent)
        temporary = target.with_name(f".{target.name}.{uuid.uuid4().hex}.tmp")
        try:
            yield temporary
        finally:
            temporary.unlink(missing_ok=True)

    def _walk(self, path: str) -> Iterator[tuple[str, dict[str, Any]]]:
        """Paths and details of all files below a local folder, except those that vanish meanwhile.

        fsspec's own walk leaves out whole folders that it can't list.
        """
        with os.scandir(path) as entries:
            for entry in entries:
                try:
                    details = self.fs.info(entry)
                    if details["type"] == "directory":
                        yield from self._walk(entry.path)
                    else:
                        yield details["name"], details
                except FileNotFoundError:
                    continue

    @contextmanager
    def _errors(self, name: str = "", *, writing: bool = False) -> Iterator[None]:
        """Turn errors into `StorageError`; a missing file to read stays `FileNotFoundError`."""
        try:
            yield
        except storage_errors() as error:
            if isinstance(error, FileNotFoundError) and not writing:
                raise
            where = f"{self.uri}/{name}" if name else self.uri
            raise StorageError(f"{where}: {error}") from error


def _file_system(uri: str, options: dict[str, Any]) -> tuple[Any, str]:
    """The file system of a folder, and its path there; raises as `Folder.open`."""
    scheme, _, place = uri.partition("://")
    try:
        if scheme in S3_SCHEMES:
            from batchllm_operator.storage.s3 import S3Files

            return S3Files.at(uri, **options), place
        if scheme in CLOUD_SCHEMES:
            from batchllm_operator.storage.clouds import ObjectStore

            fs = ObjectStore(scheme)
            fs.bucket(place.partition("/")[0])
            return fs, place
    except ModuleNotFoundError as error:
        raise MissingLibraryError.of(error, uri) from error
    return LocalFileSystem(), LocalFileSystem._strip_protocol(uri)


def _make_folder(path: Path) -> None:
    """Create a folder and its parents so that they survive a power cut."""
    missing = []
    while not path.exists():
        missing.append(path)
        path = path.parent
    for folder in reversed(missing):
        folder.mkdir(exist_ok=True)
        fsync(folder.parent)


def fsync(path: Path) -> None:
    """Flush a local file's content, or a folder's entries, to disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
