"""Memory and CUDA streams of a link's threads; on a CPU there is nothing to wait for."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from batchllm_operator.vllm_plugin.runahead.blocks import KVBlocks


class Buffer:
    """Memory for one message, which grows with the largest."""

    def __init__(self, blocks: KVBlocks, header_bytes: int) -> None:
        self._blocks, self._header_bytes = blocks, header_bytes
        self._bytes = torch.empty(0, dtype=torch.uint8, device=blocks.device)

    def sized(self, num_blocks: int) -> Tensor:
        """uint8 [header and so many blocks]."""
        size = self._header_bytes + num_blocks * self._blocks.block_bytes
        if self._bytes.numel() < size:
            self._bytes = torch.empty(size, dtype=torch.uint8, device=self._blocks.device)
        return self._bytes[:size]


class SideStream:
    """A stream beside the one that computes; on a CPU, nothing."""

    def __init__(self, device: torch.device) -> None:
        self._stream: Any = None
        if device.type == "cuda":
            stream: Any = torch.cuda.Stream
            self._stream = stream(device)

    @contextmanager
    def after(self, event: Any) -> Iterator[None]:
        """What is launched inside waits for an event of another stream."""
        if self._stream is None:
            yield
            return
        with torch.cuda.stream(self._stream):
            if event is not None:
                self._stream.wait_event(event)
            yield

    def synchronize(self) -> None:
        """Wait for all that was launched."""
        if self._stream is not None:
            self._stream.synchronize()


def mark(device: torch.device) -> Any:
    """An event behind what this thread has launched so far, for a link's thread to wait for."""
    return torch.cuda.current_stream(device).record_event() if device.type == "cuda" else None


def abort(group: Any, device: torch.device) -> None:
    """End what a GPU still waits for; on a CPU, dropping the group does it."""
    if device.type == "cuda":
        group.abort()
