"""A link of a chain: KV from one replica to a neighbour, one message per group and layer.

A thread at each end does all the waiting, so no computing thread waits for a send. A message is a
header and the blocks of one layer. Messages arrive in the order in which they were sent. An
unexpected header ends the chain, as does a neighbour that is gone or too late.
"""

from __future__ import annotations

import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Final, Protocol

import torch
from torch import Tensor

from batchllm_operator.errors import RunaheadError
from batchllm_operator.vllm_plugin.runahead.blocks import KVBlocks
from batchllm_operator.vllm_plugin.runahead.plan import ChainSettings
from batchllm_operator.vllm_plugin.runahead.streams import Buffer, SideStream, abort

PROTOCOL: Final = 1
"""Version of the protocol; part of the handshake and of every header."""
_MAGIC: Final = 0x52554E4148454144  # "RUNAHEAD"
_HEADER_FIELDS: Final = 8
_HEADER_BYTES: Final = 8 * _HEADER_FIELDS
_POLL_S: Final = 2e-5


@dataclass(frozen=True, slots=True)
class Extent:
    """The KV in a message: that of tokens [begin, end) of a group's prefix."""

    group_id: int
    digest: int
    begin: int
    end: int


class Load:
    """KV of one group on its way from a neighbour into blocks of this replica.

    Args:
        extent: the KV to receive.
        num_blocks: blocks of a message.
        block_ids: blocks of this replica, for the last blocks of the message; earlier ones are
            already here, and what is received for them is dropped.
        num_layers: layers to receive, in any order.
        on_layer: called in the link's thread when a layer has been written.
        writable: CUDA event after which the blocks may be written; None on a CPU.
    """

    def __init__(
        self,
        extent: Extent,
        num_blocks: int,
        block_ids: Sequence[int],
        num_layers: int,
        on_layer: Callable[[int], None] | None = None,
        writable: Any = None,
    ) -> None:
        self.extent, self.num_blocks, self.block_ids = extent, num_blocks, block_ids
        self.writable = writable
        self._on_layer = on_layer
        self._waited = threading.Condition()
        self._missing = set(range(num_layers))
        self._failed = False

    @property
    def is_done(self) -> bool:
        """Whether nothing more will be written."""
        return self._failed or not self._missing

    @property
    def has_failed(self) -> bool:
        """Whether KV is missing and won't arrive."""
        return self._failed

    def wait(self, layer_idx: int) -> bool:
        """Wait until a layer has arrived or the link fails. Returns whether it has arrived."""
        with self._waited:
            self._waited.wait_for(lambda: self._failed or layer_idx not in self._missing)
            return layer_idx not in self._missing

    def write(self, layer_idx: int, write: Callable[[], None]) -> None:
        """Write a layer's blocks, unless the load has failed: then they may belong to others."""
        with self._waited:
            if self._failed:
                return
            write()
            self._missing.discard(layer_idx)
            self._waited.notify_all()
        if self._on_layer is not None:
            self._on_layer(layer_idx)

    def fail(self) -> None:
        """Give up what is missing. A complete load stays complete."""
        with self._waited:
            if self._missing:
                self._failed = True
            self._waited.notify_all()


@dataclass(frozen=True, slots=True)
class Send:
    """A message to a neighbour: one layer's KV of a group.

    The blocks don't change until `on_sent`, or until the chain has failed.
    """

    extent: Extent
    layer_idx: int
    block_ids: Sequence[int]
    on_sent: Callable[[], None]
    """Called in the link's thread when the message has been sent."""
    written: Any = None
    """CUDA event after which the blocks hold the KV; None on a CPU."""


class Chain(Protocol):
    """What a link needs of its chain."""

    @property
    def settings(self) -> ChainSettings: ...

    @property
    def blocks(self) -> KVBlocks: ...

    @property
    def failure(self) -> str | None:
        """Why the chain has failed; None while it works."""

    def fail(self, reason: str) -> None:
        """End the chain."""


class Sender:
    """Gathers and sends in a thread, with two buffers: one is filled while the other is sent."""

    def __init__(self, chain: Chain, group: Any, peer: int) -> None:
        self._chain = chain
        self._queue: queue.SimpleQueue[Send | None] = queue.SimpleQueue()
        threading.Thread(
            target=self._run, args=(group, peer), name="runahead-send", daemon=True
        ).start()

    def put(self, send: Send) -> None:
        self._queue.put(send)

    def stop(self) -> None:
        self._queue.put(None)

    def _run(self, group: Any, peer: int) -> None:
        """Returning drops the group, which closes the connection."""
        try:
            self._send_all(group, peer)
        # Transports have no common error; each ends the chain.
        except Exception as error:  # noqa: BLE001
            self._chain.fail(f"sending KV failed: {one_line(error)}")
        finally:
            abort(group, self._chain.blocks.device)

    def _send_all(self, group: Any, peer: int) -> None:
        chain, blocks = self._chain, self._chain.blocks
        side = SideStream(blocks.device)
        buffers = [Buffer(blocks, _HEADER_BYTES), Buffer(blocks, _HEADER_BYTES)]
        under_way: deque[tuple[Any, Send]] = deque()
        num_sent = num_gone = 0
        while (send := self._queue.get()) is not None:
            with side.after(send.written):
                buffer = buffers[num_sent % 2].sized(len(send.block_ids))
                blocks.gather(send.layer_idx, send.block_ids, buffer[_HEADER_BYTES:])
                _write_header(buffer, num_sent, send.extent, send.layer_idx)
                side.synchronize()
                # Blocks are freed early only after a failure is set, so what was gathered before
                # is valid.
                if chain.failure is not None:
                    return
                under_way.append((group.send([buffer], peer, num_sent), send))
            num_sent += 1
            while len(under_way) > 1 or (under_way and self._queue.empty()):
                work, oldest = under_way.popleft()
                is_first = num_gone % blocks.num_layers == 0
                _wait(chain, work, _timeout(chain.settings, is_first))
                num_gone += 1
                oldest.on_sent()


class Receiver:
    """Receives and writes into blocks in a thread, with one more receive posted ahead."""

    def __init__(self, chain: Chain, group: Any, peer: int) -> None:
        self._chain = chain
        self._queue: queue.SimpleQueue[Load | None] = queue.SimpleQueue()
        self._unfinished: list[Load] = []
        self._lock = threading.Lock()
        threading.Thread(
            target=self._run, args=(group, peer), name="runahead-receive", daemon=True
        ).start()

    def put(self, load: Load) -> None:
        with self._lock:
            if self._chain.failure is None:
                self._unfinished.append(load)
                self._queue.put(load)
                return
        load.fail()

    def stop(self) -> None:
        """Fail all incomplete loads; the chain's failure is set before."""
        with self._lock:
            unfinished, self._unfinished = self._unfinished, []
        for load in unfinished:
            load.fail()
        self._queue.put(None)

    def _run(self, group: Any, peer: int) -> None:
        """Returning drops the group, which closes the connection."""
        buffers = [
            Buffer(self._chain.blocks, _HEADER_BYTES),
            Buffer(self._chain.blocks, _HEADER_BYTES),
        ]
        num_received = 0
        try:
            while (load := self._queue.get()) is not None and self._chain.failure is None:
                self._take(load, group, peer, buffers, num_received)
                num_received += self._chain.blocks.num_layers
                with self._lock:
                    if load in self._unfinished:
                        self._unfinished.remove(load)
        # Transports have no common error; each ends the chain.
        except Exception as error:  # noqa: BLE001
            self._chain.fail(f"receiving KV failed: {one_line(error)}")
        finally:
            abort(group, self._chain.blocks.device)

    def _take(
        self, load: Load, group: Any, peer: int, buffers: Sequence[Buffer], num_received: int
    ) -> None:
        """Receive all layers of one load."""
        blocks = self._chain.blocks
        end = num_received + blocks.num_layers
        first_byte = _HEADER_BYTES + (load.num_blocks - len(load.block_ids)) * blocks.block_bytes
        posted: deque[tuple[Any, Tensor]] = deque()
        side = SideStream(blocks.device)
        layer_idxs: set[int] = set()
        with side.after(load.writable):
            for number in range(num_received, end):
                for ahead in range(number + len(posted), min(number + 2, end)):
                    buffer = buffers[ahead % 2].sized(load.num_blocks)
                    posted.append((group.recv([buffer], peer, ahead), buffer))
                work, buffer = posted.popleft()
                is_first = number == num_received
                _wait(self._chain, work, _timeout(self._chain.settings, is_first))
                layer_idx = _read_header(buffer, number, load.extent, blocks.num_layers)
                if layer_idx in layer_idxs:  # then another layer would never arrive
                    raise RunaheadError(f"KV of layer {layer_idx} came twice")
                layer_idxs.add(layer_idx)

                def write(
                    layer_idx: int = layer_idx, payload: Tensor = buffer[first_byte:]
                ) -> None:
                    blocks.scatter(layer_idx, load.block_ids, payload)
                    side.synchronize()

                load.write(layer_idx, write)


def _timeout(settings: ChainSettings, is_first: bool) -> float:
    return settings.start_timeout_s if is_first else settings.layer_timeout_s


def _wait(chain: Chain, work: Any, timeout_s: float) -> None:
    """Wait until a message has been sent or received. Raises what the transport raises.

    On a GPU a fault of the chain ends it: posted transfers hold multiprocessors until aborted.
    """
    if chain.blocks.device.type == "cpu":
        work.wait(timedelta(seconds=timeout_s))
        return
    deadline = time.monotonic() + timeout_s
    while not work.is_completed():
        if chain.failure is not None:
            raise RunaheadError(chain.failure)
        if time.monotonic() > deadline:
            raise RunaheadError(f"nothing for {timeout_s:g} s")
        time.sleep(_POLL_S)
    work.wait()


def _write_header(buffer: Tensor, number: int, extent: Extent, layer_idx: int) -> None:
    fields = [_MAGIC, PROTOCOL, number, extent.group_id, extent.digest, layer_idx]
    header = torch.tensor([*fields, extent.begin, extent.end], dtype=torch.int64)
    buffer[:_HEADER_BYTES].view(torch.int64).copy_(header)


def _read_header(buffer: Tensor, number: int, extent: Extent, num_layers: int) -> int:
    """The layer of a message.

    Raises:
        RunaheadError: it isn't the expected message.
    """
    header = buffer[:_HEADER_BYTES].cpu().view(torch.int64).tolist()
    *start, layer_idx, begin, end = header
    expected = [_MAGIC, PROTOCOL, number, extent.group_id, extent.digest]
    if start != expected or (begin, end) != (extent.begin, extent.end):
        raise RunaheadError(
            f"KV of tokens {begin} to {end} of group {header[3]} came, that of tokens"
            f" {extent.begin} to {extent.end} of group {extent.group_id} was expected; all replicas"
            " have to take the same groups in the same order"
        )
    if not 0 <= layer_idx < num_layers:
        raise RunaheadError(f"KV of layer {layer_idx} came, of {num_layers}")
    return int(layer_idx)


def one_line(error: BaseException) -> str:
    return " ".join(str(error).split())[:300] or type(error).__name__
