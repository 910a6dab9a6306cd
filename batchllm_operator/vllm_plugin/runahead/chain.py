"""A chain of replicas that hand KV to their neighbours, and how they meet.

Each direction between two neighbours is a link (`links`) with a process group of its own,
so links neither wait for each other nor share a fault. A chain fails as a whole, once: a replica
with a fault closes its links, which its neighbours notice, and nothing is sent any more.

Messages of a link come in the order of the groups. A replica takes what comes for a group when it
has blocks for it, down the chain and back up independently; so with one order of groups for all
replicas, no wait depends on a later group, and there is no cycle.
"""

from __future__ import annotations

import json
import logging
import statistics
import threading
import time
from collections.abc import Mapping
from datetime import timedelta
from typing import Any, Final, Literal
from urllib.parse import urlsplit

import torch

from batchllm_operator.errors import RunaheadError, RunaheadMismatchError
from batchllm_operator.vllm_plugin.runahead.blocks import KVBlocks
from batchllm_operator.vllm_plugin.runahead.links import (
    PROTOCOL,
    Load,
    Receiver,
    Send,
    Sender,
    one_line,
)
from batchllm_operator.vllm_plugin.runahead.plan import ChainSettings

_log = logging.getLogger(__name__)
_c10d: Final[Any] = torch.distributed
_PROBE_BYTES: Final = 16 << 20
"""Of a message by which a link is timed: that of a layer has as many, more or less."""
_PROBES: Final = 3  # after one to warm up

_FAILED: Final = "the chain has failed"
"""What a replica says in place of a value."""

Way = Literal["down", "up"]
"""Down the chain, to the next replica; up, back to the one before."""
_WAYS: Final[tuple[Way, ...]] = ("down", "up")


class Chain:
    """This replica's links to its neighbours. Opening waits for all replicas.

    Args:
        settings: this replica's place.
        blocks: of its KV cache, which arriving KV is written into.
        fingerprint: what has to be equal on all replicas, as JSON values by name; the first that
            differs is reported.

    Attributes:
        link_bytes_per_s: rate of the slowest hop, measured when the chain was opened; the same on
            all replicas.

    Raises:
        RunaheadMismatchError: a replica differs; the message names what, and both values.
        RunaheadError: not all replicas came in time.
    """

    def __init__(
        self, settings: ChainSettings, blocks: KVBlocks, fingerprint: Mapping[str, Any]
    ) -> None:
        self._settings, self.blocks = settings, blocks
        self._lock = threading.Lock()
        self._failure: str | None = None
        self._num_agreed = 0
        rank, last = settings.rank, settings.world_size - 1
        try:
            store = _open_store(settings)
            _shake_hands(store, settings, {"protocol": PROTOCOL, **fingerprint})
            groups: dict[tuple[Way, int], Any] = {
                (way, hop): _process_group(store, settings, blocks.device, way, hop)
                for hop in range(last)
                for way in _WAYS
                if rank in (hop, hop + 1)
            }
            self.link_bytes_per_s = _slowest_link(store, settings, groups, blocks.device)
        except (RuntimeError, OSError, ValueError) as error:  # the store's and the groups' own
            raise RunaheadError(
                f"runahead: replica {rank} of {last + 1} can't reach the others through"
                f" {settings.store}: {error}"
            ) from error
        self._store = store
        self._senders: dict[Way, Sender] = {}
        self._receivers: dict[Way, Receiver] = {}
        if rank < last:
            self._senders["down"] = Sender(self, groups["down", rank], 1)
            self._receivers["up"] = Receiver(self, groups["up", rank], 1)
        if rank > 0:
            self._senders["up"] = Sender(self, groups["up", rank - 1], 0)
            self._receivers["down"] = Receiver(self, groups["down", rank - 1], 0)

    @property
    def settings(self) -> ChainSettings:
        return self._settings

    @property
    def failure(self) -> str | None:
        """Why the chain is of no more use; None while it is."""
        return self._failure

    def agree(self, what: str, value: str) -> None:
        """Wait until all replicas have said this, and see that all say the same.

        Args:
            what: a name; each time that it is asked is one of its own.
            value: equal on all replicas.

        A replica that hasn't come in time ends the chain, and so does one whose chain has failed:
        it says that, and doesn't wait.

        Raises:
            RunaheadMismatchError: they don't.
        """
        settings, timeout_s = self._settings, self._settings.start_timeout_s
        self._num_agreed += 1
        what = f"{what} {self._num_agreed}"
        keys = [f"{what}/{rank}" for rank in range(settings.world_size)]
        has_failed = self._failure is not None
        try:
            self._store.set(keys[settings.rank], _FAILED if has_failed else value)
            if has_failed:
                return
            self._store.wait(keys, timedelta(seconds=timeout_s))
            values = [self._store.get(key).decode() for key in keys]
        except RuntimeError as error:  # the store's
            self.fail(f"not all replicas came to {what} within {timeout_s:g} s: {one_line(error)}")
            return
        if _FAILED in values:
            self.fail(f"the chain of replica {values.index(_FAILED)} has failed before {what}")
            return
        if len(set(values)) > 1:
            raise RunaheadMismatchError(f"runahead: replicas differ in {what}: {values}")

    def send(self, way: Way, send: Send) -> None:
        """Queue a message to a neighbour; returns at once."""
        self._senders[way].put(send)

    def load(self, way: Way, load: Load) -> None:
        """Take what comes next that way for `load`; a chain that has failed fails it."""
        self._receivers[way].put(load)

    def fail(self, reason: str) -> None:
        """End all transfers. Loads that aren't whole have failed when this returns."""
        with self._lock:
            if self._failure is not None:
                return
            self._failure = reason
        _log.warning("runahead: replica %d: %s", self._settings.rank, reason)
        self._stop()

    def close(self) -> None:
        """Leave the chain; the neighbours see it as a fault if they expect something."""
        with self._lock:
            if self._failure is None:
                self._failure = "this replica has closed its links"
        self._stop()

    def _stop(self) -> None:
        for sender in self._senders.values():
            sender.stop()
        for receiver in self._receivers.values():
            receiver.stop()


def _open_store(settings: ChainSettings) -> Any:
    timeout = timedelta(seconds=settings.connect_timeout_s)
    url = urlsplit(settings.store)
    if url.scheme == "file":
        store: Any = _c10d.FileStore(url.path, settings.world_size)
        store.set_timeout(timeout)
        return store
    return _c10d.TCPStore(
        url.hostname or "",
        url.port or 0,
        is_master=settings.rank == 0,
        timeout=timeout,
        wait_for_workers=False,
    )


def _shake_hands(store: Any, settings: ChainSettings, fingerprint: Mapping[str, Any]) -> None:
    """Compare this replica with all others, and have them do the same.

    Raises:
        RunaheadMismatchError: one of them differs from another.
    """
    ranks = range(settings.world_size)
    store.set(f"fingerprint/{settings.rank}", json.dumps(fingerprint))
    store.wait([f"fingerprint/{rank}" for rank in ranks])
    found = [json.loads(store.get(f"fingerprint/{rank}")) for rank in ranks]
    store.set(f"seen/{settings.rank}", "1")
    if settings.rank == 0:  # which may serve the store: every replica gets its answer first
        store.wait([f"seen/{rank}" for rank in ranks])
    for rank, other in enumerate(found):
        for name in {**found[0], **other}:  # in order: the first explains the others
            ours, theirs = found[0].get(name), other.get(name)
            if ours != theirs:
                raise RunaheadMismatchError(
                    f"runahead: replicas 0 and {rank} differ in {name}: {ours!r} and {theirs!r};"
                    " KV can be handed on between equal engines only"
                )


def _slowest_link(
    store: Any, settings: ChainSettings, groups: Mapping[tuple[Way, int], Any], device: torch.device
) -> float:
    """Bytes a second of the slowest hop, one hop timed after the other down the chain."""
    rank, last = settings.rank, settings.world_size - 1
    message = torch.zeros(_PROBE_BYTES, dtype=torch.uint8, device=device)
    if rank > 0:
        group = groups["down", rank - 1]
        for _ in range(1 + _PROBES):
            group.recv([message], 0, 0).wait()
            group.send([message[:1]], 0, 0).wait()
    if rank < last:
        group, times = groups["down", rank], []
        for _ in range(1 + _PROBES):
            began = time.perf_counter()
            group.send([message], 1, 0).wait()
            group.recv([message[:1]], 1, 0).wait()
            message[:1].cpu()  # a GPU has only queued all this
            times.append(time.perf_counter() - began)
        store.set(f"rate/{rank}", str(_PROBE_BYTES / statistics.median(times[1:])))
    keys = [f"rate/{hop}" for hop in range(last)]
    store.wait(keys)
    return min(float(store.get(key)) for key in keys)


def _process_group(
    store: Any, settings: ChainSettings, device: torch.device, way: Way, hop: int
) -> Any:
    """A group of the two replicas at a hop; the lower is rank 0 of it."""
    backend = settings.backend or ("nccl" if device.type == "cuda" else "gloo")
    own_store = _c10d.PrefixStore(f"{way}/{hop}", store)
    rank, timeout = settings.rank - hop, timedelta(seconds=settings.connect_timeout_s)
    if backend == "gloo":
        return _c10d.ProcessGroupGloo(own_store, rank, 2, timeout)
    options = _c10d.ProcessGroupNCCL.Options()
    options._timeout = timeout
    return _c10d.ProcessGroupNCCL(own_store, rank, 2, options)
