"""Damaged files and full disks."""

import ctypes
import os
import random
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import pyarrow.fs as pafs

from benchmarks.faults.place import Place

_MS_REMOUNT: Final = 32
_ROOMY: Final = b"size=256m"


def damage_parts(place: Place, plan_uri: str, rng: random.Random) -> int:
    """Truncate one to three files of the shards' attempts, or flip a byte of them; how many."""
    path = plan_uri.removeprefix("s3://") + "/runs"
    found = place.fs.get_file_info(pafs.FileSelector(path, recursive=True))
    files = [info for info in found if info.is_file and "part-" in info.base_name and info.size]
    files.sort(key=lambda info: info.path)
    chosen = rng.sample(files, min(len(files), rng.randint(1, 3)))
    for info in chosen:
        with place.fs.open_input_file(info.path) as stream:
            data = bytearray(stream.read())
        if rng.random() < 0.5:
            del data[rng.randrange(len(data)) :]
        else:
            data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
        with place.fs.open_output_stream(info.path) as stream:
            stream.write(bytes(data))
    return len(chosen)


def mount_disk(folder: Path) -> bool:
    """Put a file system of its own at the folder, if this user may."""
    return _mount(folder, 0, _ROOMY)


def unmount_disk(folder: Path) -> None:
    """Take it away again; nothing happens to a folder without one."""
    ctypes.CDLL(None, use_errno=True).umount2(os.fsencode(folder), 2)


@contextmanager
def small_disk(folder: Path, rng: random.Random) -> Iterator[dict[str, Any]]:
    """While inside, little can be written below the folder; yields limits for commands."""
    if not os.path.ismount(folder):
        yield {"max_file_bytes": rng.randint(0, 8 << 10)}
        return
    disk = os.statvfs(folder)
    used = (disk.f_blocks - disk.f_bfree) * disk.f_frsize
    room = rng.randrange(10) * disk.f_frsize
    assert _mount(folder, _MS_REMOUNT, f"size={used + room}".encode()), "it was mounted before"
    try:
        yield {}
    finally:
        _mount(folder, _MS_REMOUNT, _ROOMY)


def _mount(folder: Path, flags: int, options: bytes) -> bool:
    libc = ctypes.CDLL(None, use_errno=True)
    return bool(libc.mount(b"tmpfs", os.fsencode(folder), b"tmpfs", flags, options) == 0)
