"""Buffers and CUDA streams of a link's threads; on a CPU the streams do nothing."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from batchllm_operator.vllm_plugin.runahead.blocks import KVBlocks


class Buffer:
    """Memory for one message; grows to the largest one."""

    def __init__(self, blocks: KVBlocks, header_bytes: int) -> None:
        self._blocks, self._header_bytes = blocks, header_bytes
        self._bytes = torch.empty(0, dtype=torch.uint8, device=blocks.device)

    def sized(self, num_blocks: int) -> Tensor:
        """uint8 [header bytes + num_blocks * block_bytes]."""
        size = self._header_bytes + num_blocks * self._blocks.block_bytes
        if self._bytes.numel() < size:
            self._bytes = torch.empty(size, dtype=torch.uint8, device=self._blocks.device)
        return self._bytes[:size]


class SideStream:
    """A CUDA stream beside the computing one; does nothing on a CPU."""

    def __init__(self, device: torch.device) -> None:
        self._stream: Any = None
        if device.type == "cuda":
            stream: Any = torch.cuda.Stream
            self._stream = stream(device)

    @contextmanager
    def after(self, event: Any) -> Iterator[None]:
        """Kernels launched inside wait for an event of another stream."""
        if self._stream is None:
            yield
            return
        with torch.cuda.stream(self._stream):
            if event is not None:
                self._stream.wait_event(event)
            yield

    def synchronize(self) -> None:
        """Wait for all launched kernels."""
        if self._stream is not None:
            self._stream.synchronize()


def mark(device: torch.device) -> Any:
    """An event after this thread's launches so far, for a link's thread to wait for."""
    return torch.cuda.current_stream(device).record_event() if device.type == "cuda" else None


def abort(group: Any, device: torch.device) -> None:
    """Abort transfers on a GPU; on a CPU, dropping the group does it."""
    if device.type == "cuda":
        group.abort()
