"""A chain: one process group of all replicas, in which each broadcasts the KV of its chunk.

A thread passes on the KV of a group layer by layer, and within a layer chunk by chunk: all replicas
have the same order of messages, and none waits for a chunk behind its own. A fault ends the whole
chain: the replica leaves the process group, and the others go on alone once they see that.
"""

import logging
import queue
import statistics
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from datetime import timedelta
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor

from batchllm_operator.errors import RunaheadError, one_line
from batchllm_operator.runahead.blocks import KVBlocks

_log = logging.getLogger(__name__)
_c10d: Final[Any] = torch.distributed
_TIMEOUT_S: Final = 120.0
"""Longest wait for the other replicas to connect, and for a message."""
_PROBE_BYTES: Final = 16 << 20
"""Size of the messages that time a link: roughly that of one layer's KV."""
_PROBES: Final = 3  # after one to warm up
_POLL_S: Final = 2e-5


class Transfer:
    """The KV of one group on its way between the replicas.

    Args:
        extents: the blocks [first, last) of the prefix that each replica computes.
        block_ids: this replica's blocks of the prefix, all whole ones.

    Attributes:
        writable: CUDA event after which the blocks may be written; None on a CPU.
        is_over: whether nothing more will be written.
    """

    def __init__(self, extents: Sequence[tuple[int, int]], block_ids: Sequence[int]) -> None:
        self.extents, self.block_ids = extents, block_ids
        self.writable: Any = None
        self._condition = threading.Condition()
        self._num_passed = 0
        self._written: dict[int, Any] = {}
        self.is_over = False

    def wait(self, is_met: Callable[[], bool] = bool, timeout_s: float | None = None) -> bool:
        """Wait until it is over, or until `is_met`; False if neither happens in time."""
        with self._condition:
            return self._condition.wait_for(lambda: self.is_over or is_met(), timeout_s)

    def note_written(self, layer_idx: int, event: Any) -> None:
        """Note that this replica's KV of a layer is there, on a GPU after an event."""
        with self._condition:
            self._written.setdefault(layer_idx, event)
            self._condition.notify_all()

    def touch_blocks(self, touch: Callable[[], None]) -> None:
        """Read or write the blocks, unless it is over: then they may belong to other requests.

        Raises:
            RunaheadError: it is over.
        """
        with self._condition:
            if self.is_over:
                raise RunaheadError("the transfer has ended early")
            touch()

    def note_passed(self) -> None:
        """Note that one more message has been passed on."""
        with self._condition:
            self._num_passed += 1
            self._condition.notify_all()

    def end(self) -> None:
        """End every replica's wait for this chain."""
        with self._condition:
            self.is_over = True
            self._condition.notify_all()

    def wait_for_earlier(self, layer_idx: int, rank: int) -> None:
        """Wait until a layer of all chunks before `rank` is there, or the chain has failed."""
        due = layer_idx * len(self.extents) + rank
        self.wait(lambda: self._num_passed >= due)

    def wait_for_own(self, layer_idx: int, timeout_s: float) -> Any:
        """Wait for `note_written`; returns its event.

        Raises:
            RunaheadError: the layer isn't computed in time.
        """
        if not self.wait(lambda: layer_idx in self._written, timeout_s) or self.is_over:
            raise RunaheadError(f"layer {layer_idx} isn't computed after {timeout_s:g} s")
        return self._written[layer_idx]


class Chain:
    """This replica's place in the process group. Opening waits for all replicas.

    Args:
        rank: of this replica, in the order of chunks.
        world_size: replicas.
        store: file for their rendezvous, on a disk that all share; for one start of a chain.
        blocks: of this replica's KV cache; received KV is written into them.

    Attributes:
        failure: why the chain has failed; None while it works.

    Raises:
        RunaheadError: not all replicas connected in time.
    """

    def __init__(
        self,
        rank: int,
        world_size: int,
        store: Path,
        blocks: KVBlocks,
        timeout_s: float = _TIMEOUT_S,
    ) -> None:
        self.rank, self._world_size, self._blocks = rank, world_size, blocks
        self._timeout_s = timeout_s
        self._lock = threading.Lock()
        self.failure: str | None = None
        self._transfers: queue.SimpleQueue[Transfer | None] = queue.SimpleQueue()
        self._current: Transfer | None = None
        try:
            self._group = self._join(store)
        except (RuntimeError, OSError, ValueError) as error:  # store, process group
            raise RunaheadError(
                f"runahead: replica {rank} of {world_size} can't reach the others through {store}:"
                f" {one_line(error)}"
            ) from error
        threading.Thread(target=self._run, name="runahead", daemon=True).start()

    def begin(self, transfer: Transfer) -> None:
        """Pass a group's KV on in the background; at once over if the chain has failed."""
        with self._lock:
            if self.failure is None:
                self._current = transfer
                self._transfers.put(transfer)
                return
        transfer.end()

    def fail(self, reason: str) -> None:
        """End the chain."""
        with self._lock:
            if self.failure is not None:
                return
            self.failure = reason
            if self._current is not None:
                self._current.end()
        _log.debug("runahead: replica %d: %s", self.rank, reason)
        self._transfers.put(None)

    def bytes_per_s(self) -> float:
        """Time messages from the first replica to the others, which all call this at once.

        Raises:
            RunaheadError: they don't arrive.
        """
        if self.failure is not None:
            raise RunaheadError(self.failure)
        message = torch.zeros(_PROBE_BYTES, dtype=torch.uint8, device=self._blocks.device)
        times = []
        try:
            for _ in range(1 + _PROBES):
                began = time.perf_counter()
                self._broadcast(message, 0)
                for rank in range(1, self._world_size):
                    self._broadcast(message[:1], rank)
                message[:1].cpu()  # on a GPU, the transfers are only queued
                times.append(time.perf_counter() - began)
        except RuntimeError as error:
            self.fail(f"passing on KV failed: {one_line(error)}")
            raise RunaheadError(f"runahead: the link can't be timed: {one_line(error)}") from error
        return _PROBE_BYTES / statistics.median(times[1:])

    def _join(self, path: Path) -> Any:
        """The process group: NCCL (RCCL on AMD) for KV on a GPU, gloo on a CPU."""
        timeout = timedelta(seconds=self._timeout_s)
        store: Any = _c10d.FileStore(str(path), self._world_size)
        store.set_timeout(timeout)
        if self._blocks.device.type != "cuda":
            return _c10d.ProcessGroupGloo(store, self.rank, self._world_size, timeout)
        options = _c10d.ProcessGroupNCCL.Options()
        options._timeout = timeout
        return _c10d.ProcessGroupNCCL(store, self.rank, self._world_size, options)

    def _run(self) -> None:
        """Pass on groups until the chain ends; dropping the process group closes connections."""
        try:
            while (transfer := self._transfers.get()) is not None:
                self._pass_on(transfer)
                transfer.end()
        # Transports have no common error; each ends the chain.
        except Exception as error:  # noqa: BLE001
            self.fail(f"passing on KV failed: {one_line(error)}")
        finally:
            group, self._group = self._group, None
            if self._blocks.device.type == "cuda":
                group.abort()

    def _pass_on(self, transfer: Transfer) -> None:
        blocks = self._blocks
        most = max(last - first for first, last in transfer.extents)
        buffer = torch.empty(most * blocks.block_bytes, dtype=torch.uint8, device=blocks.device)
        new_stream: Any = torch.cuda.Stream  # beside the computing one; a CPU has none
        stream: Any = new_stream(blocks.device) if blocks.device.type == "cuda" else None
        if stream is not None and transfer.writable is not None:
            stream.wait_event(transfer.writable)
        for layer_idx in range(blocks.num_layers):
            for owner, (first, last) in enumerate(transfer.extents):
                event = None
                if owner == self.rank:
                    event = transfer.wait_for_own(layer_idx, self._timeout_s)
                if first < last:
                    message = buffer[: (last - first) * blocks.block_bytes]
                    with nullcontext() if stream is None else torch.cuda.stream(stream):
                        if event is not None:
                            stream.wait_event(event)
                        self._pass_message(transfer, owner, layer_idx, (first, last), message)
                transfer.note_passed()

    def _pass_message(
        self,
        transfer: Transfer,
        owner: int,
        layer_idx: int,
        extent: tuple[int, int],
        message: Tensor,
    ) -> None:
        """Broadcast a layer of a chunk, and wait until it is sent, or written here."""
        blocks, is_ours = self._blocks, owner == self.rank
        block_ids = transfer.block_ids[slice(*extent)]

        def copy() -> None:
            (blocks.gather if is_ours else blocks.scatter)(layer_idx, block_ids, message)
            if blocks.device.type == "cuda":
                torch.cuda.current_stream().synchronize()

        if is_ours:
            transfer.touch_blocks(copy)
        self._broadcast(message, owner)
        if not is_ours:
            transfer.touch_blocks(copy)

    def _broadcast(self, message: Tensor, owner: int) -> None:
        """Send to all, or receive from the owner. Raises what the transport raises."""
        options = _c10d.BroadcastOptions()
        options.rootRank, options.rootTensor = owner, 0
        work = self._group.broadcast([message], options)
        if self._blocks.device.type != "cuda":
            work.wait(timedelta(seconds=self._timeout_s))
            return
        deadline = time.monotonic() + self._timeout_s
        while not work.is_completed():  # posted transfers hold multiprocessors until aborted
            if self.failure is not None or time.monotonic() > deadline:
                raise RunaheadError(self.failure or f"nothing for {self._timeout_s:g} s")
            time.sleep(_POLL_S)
        work.wait()


def mark(device: torch.device) -> Any:
    """An event after this thread's launches so far, for the chain's thread; None on a CPU."""
    return torch.cuda.current_stream(device).record_event() if device.type == "cuda" else None
