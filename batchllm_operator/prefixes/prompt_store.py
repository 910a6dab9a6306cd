"""Token ids of all prompts on disk; how they are read in chunks."""

from __future__ import annotations

import errno
import os
from array import array
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, Final

import numpy as np
from numba import types
from numpy.typing import NDArray

from batchllm_operator.prefixes.jit import Int32s, Int64s, compiled
from batchllm_operator.prefixes.token_table import TokenTable, empty_slices
from batchllm_operator.streams import ahead

CHUNK_TOKENS = 1 << 21
"""Tokens per chunk when all are read: 8 MiB."""
_TOKEN_BYTES: Final = 4
_READERS: Final = 2
_READ_AHEAD: Final = 4  # chunks; with fewer, readers idle while a batch of windows is sorted


class PromptStore:
    """Prompts in a file, as int32, with only their offsets in memory; a context manager.

    Prompts are added in the order of their indexes. Several threads may read them at once, but not
    while others are added. The store creates the file and leaves its removal to the caller. If
    adding fails, earlier prompts stay valid. Lengths stay available after the end.

    Raises:
        FileExistsError: the file exists.
        OSError: from all methods that touch the file, such as a disk that is full.
    """

    def __init__(self, path: Path) -> None:
        self._file = path.open("xb+", buffering=0)
        self._ends = array("q", [0])

    def __enter__(self) -> PromptStore:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def __len__(self) -> int:
        return len(self._ends) - 1

    @property
    def num_tokens(self) -> int:
        return self._ends[-1]

    @property
    def lengths(self) -> Int64s:
        return np.diff(self._offsets)

    @property
    def _offsets(self) -> Int64s:
        """A view; while it lives, no prompts can be added."""
        return np.frombuffer(self._ends, dtype=np.int64)

    def append(self, tokens: TokenTable) -> None:
        """Add the next prompts."""
        self._file.seek(self.num_tokens * _TOKEN_BYTES)  # after a failed append
        data = tokens.token_ids.view(np.uint8).data
        while len(data):  # a full disk takes a part first
            data = data[self._file.write(data) :]
        self._ends.frombytes((tokens.offsets[1:] + self.num_tokens).tobytes())

    def slices(self, idxs: Int64s, begins: Int64s | int, num_tokens: Int64s | int) -> TokenTable:
        """See `TokenTable.slices`."""
        sources = self._offsets[idxs] + begins
        sliced = empty_slices(self._offsets[idxs + 1] - sources, num_tokens)
        failed = _read(self._file.fileno(), sources, sliced.offsets, sliced.token_ids)
        if failed < len(sources):  # repeat it for the error
            os.pread(self._file.fileno(), _TOKEN_BYTES, int(sources[failed]) * _TOKEN_BYTES)
            raise OSError(errno.EIO, "is shorter than what was written to it", self._file.name)
        return sliced

    def take(self, idxs: Int64s) -> TokenTable:
        """The prompts at `idxs`, in that order."""
        return self.slices(idxs, 0, self.lengths[idxs])


Prompts = TokenTable | PromptStore
_pread = types.ExternalFunction(  # of the C library: twice as fast as from Python
    "pread", types.intp(types.int32, types.CPointer(types.uint8), types.uintp, types.int64)
)


@compiled
def _read(descriptor: int, begins: Int64s, offsets: Int64s, target: Int32s) -> int:
    """Reads from each of `begins`, in tokens, into `target[offsets[i]:offsets[i + 1]]`.

    Returns:
        The number of reads, or the index of a failed one.
    """
    data = target.view(np.uint8)
    for item in range(len(begins)):
        start, end = offsets[item] * _TOKEN_BYTES, offsets[item + 1] * _TOKEN_BYTES
        position = begins[item] * _TOKEN_BYTES - start
        while start < end:
            rest = data[start:end]
            num_read = _pread(
                np.int32(descriptor), rest.ctypes, np.uintp(len(rest)), position + start
            )
            if num_read <= 0:
                return item
            start += num_read
    return len(begins)


def read_ahead(
    prompts: Prompts,
    wanted: Iterable[tuple[Int64s, Int64s | int, Int64s | int]],
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
