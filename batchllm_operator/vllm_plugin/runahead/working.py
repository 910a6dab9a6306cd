"""KV-Runahead in vLLM's worker: moves KV while steps run."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from batchllm_operator.vllm_plugin.runahead.blocks import KVBlocks
from batchllm_operator.vllm_plugin.runahead.chain import Chain
from batchllm_operator.vllm_plugin.runahead.links import Load, Send
from batchllm_operator.vllm_plugin.runahead.plan import ChainLimits
from batchllm_operator.vllm_plugin.runahead.scheduling import RunaheadMetadata, StepLoad, StepSend
from batchllm_operator.vllm_plugin.runahead.streams import mark


class RunaheadConnectorWorker:
    """The half in the worker: moves KV while steps run."""

    def __init__(self, limits: ChainLimits) -> None:
        self.limits = limits
        self.blocks: KVBlocks | None = None
        self.writes_first = False
        """Whether a layer's own keys and values are in the cache before its attention runs."""
        self.chain: Chain | None = None
        self._waited_for: list[Load] = []
        self._sends: list[StepSend] = []
        self._relays: list[_Relay] = []
        self._done_layers: set[int] = set()
        self._reported: dict[str, Load] = {}
        self._unsent: dict[str, _Unsent] = {}
        self._finished: set[str] = set()
        self._invalid_blocks: set[int] = set()

    @property
    def is_idle(self) -> bool:
        """Whether nothing is under way."""
        return not self._reported and not any(map(self._is_sending, self._unsent))

    def begin_step(self, step: RunaheadMetadata) -> None:
        self._waited_for, self._sends, self._relays = [], step.sends, []
        self._done_layers.clear()
        if not (step.loads or step.sends or step.failure):
            return
        if step.failure is not None and self.chain is not None:
            self.chain.fail(step.failure)
        for send in step.sends:
            self._unsent[send.request_id] = _Unsent(self._blocks.num_layers)
        for each in step.loads:
            self._begin_load(each)

    def before_attention(self, layer_name: str) -> None:
        """Wait for the KV that the layer's attention reads; pass it on with the layer's own."""
        if not self._waited_for and not self._sends:
            return
        layer_idx = self._blocks.layer_idxs.get(layer_name)
        if layer_idx is None:
            return
        for load in self._waited_for:
            load.wait(layer_idx)
        if self.writes_first:
            self._send_layer(layer_idx)

    def after_attention(self, layer_name: str) -> None:
        if self._sends and not self.writes_first:
            layer_idx = self._blocks.layer_idxs.get(layer_name)
            if layer_idx is not None:
                self._send_layer(layer_idx)

    def end_step(self) -> None:
        """Find the blocks of the step that hold no KV."""
        for load in self._waited_for:
            if not load.is_done and self.chain is not None:
                self.chain.fail("the step ended before all layers had come")
            if load.has_failed:
                self._invalid_blocks.update(load.block_ids)
        self._waited_for, self._sends, self._relays = [], [], []

    def take_finished(self, finished_request_ids: set[str]) -> tuple[set[str], set[str]]:
        """Requests whose blocks are no longer needed for sends, and those whose loads are done.

        A request that ended while it loaded is reported once, when it neither loads nor sends.
        """
        self._finished |= finished_request_ids & (self._unsent.keys() | self._reported.keys())
        sent, loaded = set(), set()
        for request_id, load in list(self._reported.items()):
            ended = request_id in self._finished
            if not load.is_done or (ended and self._is_sending(request_id)):
                continue
            loaded.add(request_id)
            del self._reported[request_id]
            if load.has_failed:
                self._invalid_blocks.update(load.block_ids)
            if ended or load.has_failed:  # the scheduler ends failed requests
                self._forget(request_id)
        for request_id in list(self._finished):
            if request_id not in self._reported and not self._is_sending(request_id):
                sent.add(request_id)
                self._forget(request_id)
        return sent, loaded

    def take_invalid_blocks(self) -> set[int]:
        invalid, self._invalid_blocks = self._invalid_blocks, set()
        return invalid

    def close(self) -> None:
        if self.chain is not None:
            self.chain.close()

    @property
    def _blocks(self) -> KVBlocks:
        assert self.blocks is not None  # vLLM registers them before the first step
        return self.blocks

    def _begin_load(self, step: StepLoad) -> None:
        blocks, begun = self._blocks, mark(self._blocks.device)
        on_layer = None
        if step.passed_on is not None:
            self._unsent[step.request_id] = _Unsent(blocks.num_layers)
            on_layer = self._relay(step.passed_on, begun).on_received
        load = Load(
            step.extent, step.num_blocks, step.block_ids, blocks.num_layers, on_layer, begun
        )
        if step.is_waited_for:
            self._waited_for.append(load)
        if step.is_reported:
            self._reported[step.request_id] = load
        if self.chain is None:
            load.fail()
        else:
            self.chain.load(step.way, load)

    def _relay(self, passed_on: StepSend, begun: Any) -> _Relay:
        """The relay of a fill; if its chunk is in this step, layers wait for the chunk's KV."""
        relay = _Relay(partial(self._send, passed_on))
        if any(send.extent.group_id == passed_on.extent.group_id for send in self._sends):
            self._relays.append(relay)
        else:
            for layer_idx in range(self._blocks.num_layers):
                relay.on_written(layer_idx, begun)
        return relay

    def _send_layer(self, layer_idx: int) -> None:
        """Send a layer once per step: layers may share a cache, which the first of them writes."""
        if layer_idx in self._done_layers:
            return
        self._done_layers.add(layer_idx)
        written = mark(self._blocks.device)
        for send in self._sends:
            self._send(send, layer_idx, written)
        for relay in self._relays:
            relay.on_written(layer_idx, written)

    def _send(self, send: StepSend, layer_idx: int, written: Any) -> None:
        """Queue a layer; called by the computing thread and by the receiving ones."""
        chain = self.chain
        if chain is None or chain.failure is not None:
            return
        on_sent = self._unsent[send.request_id].on_sent
        chain.send(send.way, Send(send.extent, layer_idx, send.block_ids, on_sent, written))

    def _is_sending(self, request_id: str) -> bool:
        if self.chain is None or self.chain.failure is not None:
            return False
        unsent = self._unsent.get(request_id)
        return unsent is not None and unsent.num_layers > 0

    def _forget(self, request_id: str) -> None:
        self._finished.discard(request_id)
        self._unsent.pop(request_id, None)


class _Relay:
    """Passes KV on up the chain: a layer when it was received and this replica's own is written.

    It may be received first: a later replica with the KV in its prefix cache sends at once.
    """

    def __init__(self, send: Callable[[int, Any], None]) -> None:
        self._send = send
        self._lock = threading.Lock()
        self._received: set[int] = set()
        self._written: dict[int, Any] = {}

    def on_written(self, layer_idx: int, written: Any) -> None:
        """Note that this replica's KV is written, after a CUDA event; None on a CPU."""
        with self._lock:
            self._written[layer_idx] = written
            is_whole = layer_idx in self._received
        if is_whole:
            self._send(layer_idx, written)

    def on_received(self, layer_idx: int) -> None:
        """Note that later replicas' KV has been received."""
        with self._lock:
            self._received.add(layer_idx)
            is_whole = layer_idx in self._written
        if is_whole:
            self._send(layer_idx, self._written[layer_idx])


@dataclass(slots=True)
class _Unsent:
    """Layers of a request that aren't sent yet; one thread counts them down."""

    num_layers: int

    def on_sent(self) -> None:
        self.num_layers -= 1
