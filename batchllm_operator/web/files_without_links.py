"""Opens local files without following symbolic links.

A plan's folder is checked by its real path. Users with write access could put a symbolic link there
afterwards, to a file that only Airflow's API server may read.
"""

from __future__ import annotations

import os
import stat
from typing import IO, Any, Final

from fsspec.implementations.local import LocalFileSystem

from batchllm_operator.errors import PlanError

LINKS: Final = "the plan's folder has symbolic links in it"
_FOLDER: Final = os.O_DIRECTORY | getattr(os, "O_PATH", os.O_RDONLY)  # enough to traverse a folder


class FilesWithoutLinks(LocalFileSystem):  # type: ignore[misc]  # fsspec ships no types
    """Reads regular files at absolute paths without symbolic links.

    Raises PlanError at a link, OSError if it isn't a regular file.
    """

    def _open(self, path: str, mode: str = "rb", *_: Any, **__: Any) -> IO[bytes]:
        *folders, name = path.strip("/").split("/")
        where = os.open("/", _FOLDER)
        try:
            for folder in folders:
                parent, where = where, _open_in(where, folder, _FOLDER)
                os.close(parent)
            file = _open_in(where, name, os.O_RDONLY | os.O_NONBLOCK)  # opening a pipe would block
        finally:
            os.close(where)
        if not stat.S_ISREG(os.fstat(file).st_mode):
            os.close(file)
            raise OSError("isn't a file")
        return os.fdopen(file, "rb")

    def exists(self, path: str, **_: Any) -> bool:
        try:
            self._open(path).close()
        except FileNotFoundError:
            return False
        return True


def _open_in(folder: int, name: str, flags: int) -> int:
    try:
        return os.open(name, flags | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=folder)
    except OSError as error:
        if _is_link(folder, name):
            raise PlanError(LINKS) from error
        raise


def _is_link(folder: int, name: str) -> bool:
    try:
        return stat.S_ISLNK(os.lstat(name, dir_fd=folder).st_mode)
    except OSError:
        return False
