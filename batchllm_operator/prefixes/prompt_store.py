"""Token ids of all prompts, in memory or on disk."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterable, Iterator
from io import FileIO
from pathlib import Path
from typing import Any, Final, Protocol

import numpy as np
from numba import types
from numpy.typing import NDArray

from batchllm_operator.prefixes.jit import compiled
from batchllm_operator.prefixes.token_table import TokenTable, slice_offsets
from batchllm_operator.streams import ahead

CHUNK_TOKENS = 1 << 21
"""Tokens per chunk when all are read: 8 MiB."""
_READERS: Final = 2
_READ_AHEAD: Final = 4  # chunks; with fewer, readers idle while a batch of windows is sorted
_READ_TOKENS: Final = 1 << 13  # one read fits into the nearest cache
_NARROW: Final = np.dtype(np.uint16)
_WIDE: Final = np.dtype(np.int32)


class Prompts(Protocol):
    """Prompts by index: a `TokenTable` or a `PromptStore`."""

    def __len__(self) -> int:
        """Number of prompts."""

    @property
    def lengths(self) -> NDArray[np.int64]:
        """Tokens per prompt: [num_prompts]."""

    def slices(
        self,
        idxs: NDArray[np.int64],
        begins: NDArray[np.int64] | int,
        num_tokens: NDArray[np.int64] | int,
    ) -> TokenTable:
        """See `TokenTable.slices`."""


class PromptStore:
    """Prompts in a file, with only their lengths in memory.

    Prompts are added in the order of their indexes. Several threads may read them at once, but not
    while others are added. The store creates the file and leaves its removal to the caller. If
    adding fails, earlier prompts stay valid. A token takes 2 bytes until an id needs 4.

    Raises:
        FileExistsError: the file exists.
        OSError: from all methods that touch the file, such as a disk that is full.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file = path.open("xb+", buffering=0)
        self._dtype: np.dtype[Any] = _NARROW
        self._offsets = np.zeros(1024, dtype=np.int64)
        self._num_prompts = 0

    def __enter__(self) -> PromptStore:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the file. Lengths stay available."""
        self._file.close()

    def __len__(self) -> int:
        return self._num_prompts

    @property
    def num_tokens(self) -> int:
        return int(self._offsets[self._num_prompts])

    @property
    def lengths(self) -> NDArray[np.int64]:
        return np.diff(self._offsets[: self._num_prompts + 1])

    def append(self, tokens: TokenTable) -> None:
        """Add the next prompts."""
        if self._dtype == _NARROW and np.any(tokens.token_ids > np.iinfo(_NARROW).max):
            self._widen()
        self._file.seek(self.num_tokens * self._dtype.itemsize)  # after a failed append
        _write(self._file, tokens.token_ids.astype(self._dtype, copy=False))
        total = self._num_prompts + len(tokens)
        if total >= len(self._offsets):
            larger = np.zeros(max(total + 1, len(self._offsets) * 3 // 2), dtype=np.int64)
            larger[: self._num_prompts + 1] = self._offsets[: self._num_prompts + 1]
            self._offsets = larger
        new = self._offsets[self._num_prompts + 1 : total + 1]
        new[:] = tokens.offsets[1:]
        new += self._offsets[self._num_prompts]
        self._num_prompts = total

    def slices(
        self,
        idxs: NDArray[np.int64],
        begins: NDArray[np.int64] | int,
        num_tokens: NDArray[np.int64] | int,
    ) -> TokenTable:
        sources = self._offsets[idxs] + begins
        offsets = slice_offsets(self._offsets[idxs + 1] - sources, num_tokens)
        token_ids = np.empty(offsets[-1], dtype=np.int32)
        self._read(sources, offsets, token_ids)
        return TokenTable.unchecked(token_ids, offsets)

    def take(self, idxs: NDArray[np.int64]) -> TokenTable:
        """The prompts at `idxs`, in that order."""
        return self.slices(idxs, 0, self.lengths[idxs])

    def _widen(self) -> None:
        """Switches to 4 bytes per token, usually at the first prompts."""
        narrow = self._path.with_name(f"{self._path.name}.narrow")
        self._path.rename(narrow)
        wide = self._path.open("xb+", buffering=0)
        for part in chunks(self.lengths):
            _write(wide, self.take(np.arange(part.start, part.stop)).token_ids)
        self._file.close()
        narrow.unlink()
        self._file, self._dtype = wide, _WIDE

    def _read(
        self, begins: NDArray[np.int64], offsets: NDArray[np.int64], target: NDArray[np.int32]
    ) -> None:
        """Reads from each of `begins` into `target[offsets[i]:offsets[i + 1]]`."""
        read = np.empty(_READ_TOKENS, dtype=self._dtype)
        failed = _read_all(self._file.fileno(), begins, offsets, read, target)
        if failed < len(begins):  # repeat it for the error
            os.pread(self._file.fileno(), read.itemsize, int(begins[failed]) * read.itemsize)
            raise OSError(errno.EIO, "is shorter than what was written to it", self._file.name)


_pread = types.ExternalFunction(  # of the C library: twice as fast as from Python
    "pread", types.intp(types.int32, types.CPointer(types.uint8), types.uintp, types.int64)
)


@compiled
def _read_all(
    descriptor: int,
    begins: NDArray[np.int64],
    offsets: NDArray[np.int64],
    read: NDArray[Any],
    target: NDArray[np.int32],
) -> int:
    """Reads from each of `begins` into `target[offsets[i]:offsets[i + 1]]`, by the buffer `read`.

    Returns:
        The number of reads, or the index of a failed one.
    """
    size, data = read.itemsize, read.view(np.uint8)
    for item in range(len(begins)):
        start, end = offsets[item], offsets[item + 1]
        while start < end:
            position = (begins[item] + start - offsets[item]) * size
            wanted = min(end - start, len(read)) * size
            num_done = 0
            while num_done < wanted:
                rest = data[num_done:wanted]
                num_read = _pread(
                    np.int32(descriptor), rest.ctypes, np.uintp(len(rest)), position + num_done
                )
                if num_read <= 0:
                    return item
                num_done += num_read
            target[start : start + wanted // size] = read[: wanted // size]
            start += wanted // size
    return len(begins)


def _write(file: FileIO, token_ids: NDArray[Any]) -> None:
    data = token_ids.view(np.uint8).data
    while len(data):  # a full disk takes a part first
        data = data[file.write(data) :]


def read_ahead(
    prompts: Prompts,
    wanted: Iterable[tuple[NDArray[np.int64], NDArray[np.int64] | int, NDArray[np.int64] | int]],
    most: int = _READ_AHEAD,
) -> Iterator[TokenTable]:
    """`prompts.slices` of each of `wanted`, with the next `most` prefetched."""
    return ahead(wanted, lambda item: prompts.slices(*item), num_threads=_READERS, most=most)


def chunks(num_tokens: NDArray[Any], most: int = CHUNK_TOKENS) -> Iterator[slice]:
    """Consecutive slices of prompts with about `most` tokens each, and at least one prompt.

    Args:
        num_tokens: [num_prompts], tokens to read of each.
    """
    ends = np.cumsum(num_tokens, dtype=np.int64)
    start, before = 0, 0
    while start < len(ends):
        stop = max(start + 1, int(np.searchsorted(ends, before + most, side="right")))
        stop = min(stop, start + most)  # empty prompts take memory too
        yield slice(start, stop)
        start, before = stop, int(ends[stop - 1])
