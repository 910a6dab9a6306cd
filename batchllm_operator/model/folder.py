"""Identifies the model in a folder by a digest that is fast for weights of any size."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Final

_WHOLE_FILE_BYTES: Final = 16 << 20
_END_BYTES: Final = 1 << 20
_SAMPLE_BYTES: Final = 1 << 12
_NUM_SAMPLES: Final = 256
"""Samples of a large file that isn't safetensors."""


def folder_digest(folder: Path) -> str:
    """A digest of a model's folder: names, sizes, and content.

    Of a file above 16 MiB (weights) it reads the first and the last MiB, and the beginning, middle
    and end of each tensor: training may change only some tensors, anywhere in the file.
    """
    digest = hashlib.sha256()
    for path in sorted(path for path in folder.rglob("*") if path.is_file()):
        name = path.relative_to(folder)
        if any(part.startswith(".") for part in name.parts):
            continue  # files of downloaders and version control
        size = path.stat().st_size
        digest.update(f"{name.as_posix()}\0{size}\0".encode())
        with path.open("rb") as file:
            if size <= _WHOLE_FILE_BYTES:
                digest.update(file.read())
                continue
            for start, num_bytes in _samples(file, size):
                file.seek(start)
                digest.update(file.read(num_bytes))
    return f"sha256:{digest.hexdigest()}"


def _samples(file: IO[bytes], size: int) -> Iterator[tuple[int, int]]:
    """(offset, bytes) of the samples of a large file."""
    tensors = _tensors(file, size) or [
        (size * number // _NUM_SAMPLES, size * (number + 1) // _NUM_SAMPLES)
        for number in range(_NUM_SAMPLES)
    ]
    yield 0, _END_BYTES
    for start, end in tensors:
        for place in (start, (start + end) // 2, end - _SAMPLE_BYTES):
            yield max(start, place), min(_SAMPLE_BYTES, end - start)
    yield max(0, size - _END_BYTES), _END_BYTES


def _tensors(file: IO[bytes], size: int) -> list[tuple[int, int]]:
    """(begin, end) of the tensors of a safetensors file; empty for other files.

    Its first 8 bytes are the length of the JSON header, which gives offsets from its own end.
    """
    start = 8 + int.from_bytes(file.read(8), "little")
    if start > size:
        return []
    try:
        header = json.loads(file.read(start - 8))
        offsets = [
            tensor["data_offsets"] for name, tensor in header.items() if name != "__metadata__"
        ]
        found = sorted((start + int(first), start + int(end)) for first, end in offsets)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return []
    return found if all(start <= first <= end <= size for first, end in found) else []
