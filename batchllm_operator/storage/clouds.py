"""Google Cloud Storage and Azure as a file system of fsspec, through obstore.

obstore's own file system can't create files conditionally, and its readers mix versions of a file.
"""

from __future__ import annotations

import errno
import mmap
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Final

import obstore
from fsspec import AbstractFileSystem
from fsspec.spec import AbstractBufferedFile
from obstore import exceptions
from obstore.store import from_url

from batchllm_operator.amounts import byte_size
from batchllm_operator.errors import TableError
from batchllm_operator.secrets import Masker
from batchllm_operator.storage.failures import Condition

_CLIENT: Final[Any] = {"allow_http": True, "connect_timeout": "10s"}  # where an endpoint is http://
_TIMEOUTS: Final = {"read_timeout": "30s", "timeout": "10min"}
_SLOWEST_BYTES_PER_S: Final = 1 << 20
_AZURES_MOST_BYTES: Final = 5000 << 20  # of one request
_RETRIES: Final[Any] = {"max_retries": 4}
_ERRNOS: Final[Mapping[type[Exception], int]] = {
    exceptions.AlreadyExistsError: errno.EEXIST,
    exceptions.PreconditionError: errno.EBUSY,
    exceptions.PermissionDeniedError: errno.EACCES,
    exceptions.UnauthenticatedError: errno.EACCES,
}


class ObjectStore(AbstractFileSystem):  # type: ignore[misc]  # fsspec ships no types
    """The buckets of one cloud; a path is `BUCKET/KEY`, or `CONTAINER@ACCOUNT.HOST/KEY` on Azure.

    All errors are `OSError`s. Where the store has answered, the errno says what: `EEXIST` or
    `EBUSY` that a condition doesn't hold, `EACCES`, `ENOENT`.
    """

    def __init__(self, scheme: str) -> None:
        super().__init__()
        self.protocol = scheme
        self._stores: dict[str, Any] = {}

    def bucket(self, name: str) -> Any:
        """obstore's store; raises `ValueError` if the environment doesn't say how to reach it."""
        if name not in self._stores:
            self._stores[name] = self._new_bucket(name, **_TIMEOUTS)
        return self._stores[name]

    def info(self, path: str, **_: Any) -> dict[str, Any]:
        store, key = self._place(path)
        with suppress(FileNotFoundError), _as_os_errors():
            if key:
                return _details(path, obstore.head(store, key))
        self.ls(path)
        return {"name": path, "size": 0, "type": "directory"}

    def exists(self, path: str, **_: Any) -> bool:
        try:
            self.info(path)
        except FileNotFoundError:
            return False
        return True

    def ls(self, path: str, detail: bool = True, **_: Any) -> list[Any]:
        store, key = self._place(path)
        with _as_os_errors():
            found = obstore.list_with_delimiter(store, key or None)
        top = path.partition("/")[0]
        folders = [
            {"name": f"{top}/{each}", "size": 0, "type": "directory"}
            for each in found["common_prefixes"]
        ]
        files = [_details(f"{top}/{each['path']}", each) for each in found["objects"]]
        if not folders and not files:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path)
        return [*folders, *files] if detail else [each["name"] for each in (*folders, *files)]

    def find(self, path: str, *_: Any, detail: bool = False, **__: Any) -> Any:
        store, key = self._place(path)
        top = path.partition("/")[0]
        with _as_os_errors():
            found = [each for chunk in obstore.list(store, key or None) for each in chunk]
        files = {name: _details(name, each) for each in found if (name := f"{top}/{each['path']}")}
        return files if detail else list(files)

    def cat_file(self, path: str, start: Any = None, end: Any = None, **conditions: Any) -> bytes:
        """The bytes from `start` to before `end`, by default all; `conditions` are obstore's."""
        store, key = self._place(path)
        options: Any = conditions
        if start is not None or end is not None:
            options["range"] = {"offset": start} if end is None else (start or 0, end)
        with _as_os_errors():
            data: bytes = obstore.get(store, key, options=options).bytes().to_bytes()
        return data

    def pipe_file(self, path: str, value: bytes, mode: Any = "overwrite", **_: Any) -> None:
        store, key = self._place(path)
        with _as_os_errors():
            obstore.put(store, key, value, mode=mode)

    def put_file(self, lpath: str, rpath: str, **_: Any) -> None:
        store, key = self._place(rpath)
        with _as_os_errors():
            obstore.put(store, key, Path(lpath))

    def put_if(self, path: str, source: Path, version: Any) -> None:
        """Copy a local file, which isn't empty, to `path`, if that has the version (see `info`).

        Stores compare only for uploads of one request. Its body is the file itself, not a copy.
        Raises `TableError` for a file that Azure doesn't take in one request.
        """
        name, _, key = path.partition("/")
        num_bytes = source.stat().st_size
        if self.protocol != "gs" and num_bytes > _AZURES_MOST_BYTES:
            raise TableError(
                f"{self.protocol}://{path}: a partition of plain Parquet is one file, and Azure"
                f" takes 5,000 MiB at most: this one has {byte_size(num_bytes)}; give the job a"
                " Delta or Iceberg table, or smaller partitions"
            )
        seconds = 60 + num_bytes // _SLOWEST_BYTES_PER_S
        mode: Any = "create" if version is None else version
        store = self._new_bucket(name, timeout=f"{seconds}s")
        with source.open("rb") as file, _as_os_errors():
            obstore.put(store, key, mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ), mode=mode)

    def check_honours(self, folder: str, *conditions: Condition) -> None:
        """Google's and Azure's stores are known to honour conditions."""

    def cp_file(self, path1: str, path2: str, **_: Any) -> None:
        (store, key), (target, new_key) = self._place(path1), self._place(path2)
        with _as_os_errors():
            assert target is store, "a bucket is copied by itself alone"
            obstore.copy(store, key, new_key)

    def rm_file(self, path: str) -> None:
        store, key = self._place(path)
        with _as_os_errors():
            obstore.delete(store, key)

    def _open(self, path: str, mode: str = "rb", block_size: Any = None, **options: Any) -> Any:
        return _File(self, path, mode, block_size=block_size or "default", **options)

    def _place(self, path: str) -> tuple[Any, str]:
        name, _, key = path.partition("/")
        return self.bucket(name), key

    def _new_bucket(self, name: str, **timeouts: str) -> Any:
        url = f"{self.protocol}://{name}"
        options: Any = {**_CLIENT, **timeouts}
        try:
            return from_url(url, client_options=options, retry_config=_RETRIES)
        except exceptions.BaseError as error:
            raise ValueError(_text(error)) from None


class _File(AbstractBufferedFile):  # type: ignore[misc]
    """A file for reading, all of it of the version that was there when it was opened."""

    def _fetch_range(self, start: int, end: int) -> bytes:
        data: bytes = self.fs.cat_file(self.path, start, end, if_match=self.details["ETag"])
        return data


def _details(path: str, found: Mapping[str, Any]) -> dict[str, Any]:
    """fsspec's, with s3fs's `ETag` and `LastModified`; `version` is what `put_if` takes."""
    return {
        "name": path,
        "size": found["size"],
        "type": "file",
        "ETag": found["e_tag"],
        "LastModified": found["last_modified"],
        "version": {name: found[name] for name in ("e_tag", "version") if found[name]},
    }


@contextmanager
def _as_os_errors() -> Iterator[None]:
    try:
        yield
    except FileNotFoundError as error:
        raise FileNotFoundError(errno.ENOENT, _text(error)) from None
    except exceptions.BaseError as error:
        raise OSError(_ERRNOS.get(type(error), errno.EIO), _text(error)) from None


def _text(error: Exception) -> str:
    """The error's message in one line, without Rust's own form of it, and without secrets."""
    return Masker.of(os.environ)(" ".join(str(error).partition("Debug source:")[0].split()))
