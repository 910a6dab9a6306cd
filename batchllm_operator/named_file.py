"""Output files named by the user: `--result FILE`, `report --out FILE`."""

import argparse
import errno
import os
import secrets
import stat
import sys
from contextlib import suppress
from pathlib import Path
from typing import Final

from batchllm_operator.errors import StorageError

_CANT_BE_REPLACED: Final = (errno.EACCES, errno.EPERM, errno.EROFS, errno.EBUSY)
"""No file can be created beside it, or it is a mount point, such as a container's log."""


def parse_file(text: str) -> Path:
    """The file that an option names, for `write_file` after the work.

    Raises `argparse.ArgumentTypeError` if it can't be written, as far as can be known before.
    """
    path = Path(text)
    try:
        fault = _fault(path)
    except OSError as error:  # a name that is too long, a loop of links
        fault = f"{text} can't be written: {error.strerror}"
    if fault is not None:
        raise argparse.ArgumentTypeError(fault)
    return path


def _fault(path: Path) -> str | None:
    """Why `path` can't be written."""
    folder = path.parent
    if path.is_symlink():  # its target is written
        folder = Path(os.path.realpath(path)).parent
    if not folder.is_dir():
        return f"there is no folder {folder}"
    is_writable = os.access(folder, os.W_OK | os.X_OK)
    with suppress(FileNotFoundError):
        mode = path.stat().st_mode
        if stat.S_ISDIR(mode) or stat.S_ISSOCK(mode):
            return f"{path} is a {'folder' if stat.S_ISDIR(mode) else 'socket'}"
        is_replaced = stat.S_ISREG(mode) and not path.is_symlink()
        is_writable = os.access(path, os.W_OK) or (is_replaced and is_writable)
    fault = f"{path} can't be written: no permission, or a read-only file system"
    return None if is_writable else fault


def write_file(path: Path, data: bytes) -> None:
    """Write a regular file in one step, so that readers never see half of it.

    Anything else (a device, a pipe, a link) is kept and written to. If stdout or stderr goes to
    the same file, `data` is appended to the output. Raises `StorageError` on failure.
    """
    try:
        descriptor = _open_already(path)
        if descriptor is not None:
            with open(descriptor, "wb", closefd=False) as file:
                file.write(data)
        elif path.is_symlink() or (path.exists() and not path.is_file()):
            path.write_bytes(data)
        else:
            try:
                _replace(path, data)
            except OSError as error:
                if error.errno not in _CANT_BE_REPLACED or not path.exists():
                    raise
                path.write_bytes(data)
    except OSError as error:
        raise StorageError(f"{path} can't be written: {error.strerror or error}") from error


def _open_already(path: Path) -> int | None:
    """The descriptor by which this process prints to `path`; opened again, it writes from 0."""
    for stream, descriptor in ((sys.stdout, 1), (sys.stderr, 2)):
        is_same = False
        with suppress(OSError):
            is_same = os.path.samestat(path.stat(), os.fstat(descriptor))
        if is_same:
            stream.flush()
            return descriptor
    return None


def _replace(path: Path, data: bytes) -> None:
    temporary = path.with_name(f".batchllm-{secrets.token_hex(8)}.tmp")
    try:
        with temporary.open("xb") as file:
            file.write(data)
            with suppress(FileNotFoundError):
                before = path.stat()
                with suppress(PermissionError):
                    os.fchown(file.fileno(), before.st_uid, before.st_gid)
                os.fchmod(file.fileno(), stat.S_IMODE(before.st_mode))
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
