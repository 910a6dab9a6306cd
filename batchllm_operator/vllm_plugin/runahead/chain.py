"""A chain of replicas that pass KV to their neighbours, and how they connect.

Each direction between two neighbours is a link (`links`) with its own process group, so links
neither wait for each other nor share a fault. A fault ends the whole chain, which never restarts: a
replica with a fault closes its links, its neighbours notice, and nothing more is sent.

A link carries messages in the order of the groups. A replica receives a group's KV once it has
blocks for it, independently down the chain and up. All replicas have the same order of groups, so
no wait depends on a later group, and there is no cycle.
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
"""Size of the messages that time a link: roughly that of one layer's KV."""
_PROBES: Final = 3  # after one to warm up

_FAILED: Final = "the chain has failed"
"""Sent by a replica in place of a value."""

Way = Literal["down", "up"]
"""Down the chain is to the next replica, up is to the previous one."""
_WAYS: Final[tuple[Way, ...]] = ("down", "up")


class Chain:
    """This replica's links to its neighbours. Opening waits for all replicas.

    Args:
        settings: this replica's place.
        blocks: of this replica's KV cache; received KV is written into them.
        fingerprint: what must be equal on all replicas, as JSON values by name; the first that
            differs is reported.

    Attributes:
        link_bytes_per_s: rate of the slowest hop, measured while opening; the same on all replicas.

    Raises:
        RunaheadMismatchError: a replica differs; the message names what, and both values.
        RunaheadError: not all replicas connected in time.
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
        except (RuntimeError, OSError, ValueError) as error:  # store, process groups
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
        """Why the chain has failed; None while it works."""
        return self._failure

    def agree(self, what: str, value: str) -> None:
        """Wait until all replicas have sent a value, and check that all are equal.

        The chain fails if a replica is too late, or sends that its chain has failed; such a
        replica doesn't wait.

        Args:
            what: a name for messages; each call is a new exchange.
            value: this replica's value.

        Raises:
            RunaheadMismatchError: the values differ.
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
        except RuntimeError as error:  # from the store
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
        """Receive the next group's KV into `load`, or fail it if the chain has failed."""
        self._receivers[way].put(load)

    def fail(self, reason: str) -> None:
        """End all transfers. Incomplete loads have failed when this returns."""
        with self._lock:
            if self._failure is not None:
                return
            self._failure = reason
        _log.warning("runahead: replica %d: %s", self._settings.rank, reason)
        self._stop()

    def close(self) -> None:
        """Leave the chain; neighbours that still expect messages treat it as a fault."""
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
    store: Any = _c10d.FileStore(urlsplit(settings.store).path, settings.world_size)
    store.set_timeout(timedelta(seconds=settings.connect_timeout_s))
    return store


def _shake_hands(store: Any, settings: ChainSettings, fingerprint: Mapping[str, Any]) -> None:
    """Compare this replica's fingerprint with all others.

    Raises:
        RunaheadMismatchError: two replicas differ.
    """
    ranks = range(settings.world_size)
    store.set(f"fingerprint/{settings.rank}", json.dumps(fingerprint))
    store.wait([f"fingerprint/{rank}" for rank in ranks])
    found = [json.loads(store.get(f"fingerprint/{rank}")) for rank in ranks]
    for rank, other in enumerate(found):
        for name in {**found[0], **other}:  # in order: the first difference explains the others
            ours, theirs = found[0].get(name), other.get(name)
            if ours != theirs:
                raise RunaheadMismatchError(
                    f"runahead: replicas 0 and {rank} differ in {name}: {ours!r} and {theirs!r};"
                    " KV can be passed on between equal engines only"
                )


def _slowest_link(
    store: Any, settings: ChainSettings, groups: Mapping[tuple[Way, int], Any], device: torch.device
) -> float:
    """Bytes per second of the slowest hop; hops are timed one after the other."""
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
            message[:1].cpu()  # on a GPU, the transfers are only queued
            times.append(time.perf_counter() - began)
        store.set(f"rate/{rank}", str(_PROBE_BYTES / statistics.median(times[1:])))
    keys = [f"rate/{hop}" for hop in range(last)]
    store.wait(keys)
    return min(float(store.get(key)) for key in keys)


def _process_group(
    store: Any, settings: ChainSettings, device: torch.device, way: Way, hop: int
) -> Any:
    """The process group of the two replicas at a hop; the lower one is rank 0.

    NCCL (RCCL on AMD) for KV on a GPU, gloo on a CPU.
    """
    own_store = _c10d.PrefixStore(f"{way}/{hop}", store)
    rank, timeout = settings.rank - hop, timedelta(seconds=settings.connect_timeout_s)
    if device.type != "cuda":
        return _c10d.ProcessGroupGloo(own_store, rank, 2, timeout)
    options = _c10d.ProcessGroupNCCL.Options()
    options._timeout = timeout
    return _c10d.ProcessGroupNCCL(own_store, rank, 2, options)
