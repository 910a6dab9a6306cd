"""What the worker's half sends, and when: layers and steps without an engine or a chain."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace
from typing import Any, cast

import pytest
import torch

from batchllm_operator.vllm_plugin.runahead.blocks import KVBlocks
from batchllm_operator.vllm_plugin.runahead.links import Extent, Load, Send
from batchllm_operator.vllm_plugin.runahead.plan import ChainLimits
from batchllm_operator.vllm_plugin.runahead.scheduling import RunaheadMetadata, StepLoad, StepSend
from batchllm_operator.vllm_plugin.runahead.working import RunaheadConnectorWorker

BLOCKS, BLOCK = 8, 16
DOWN, UP, BACK = Extent(3, 9, 0, 64), Extent(3, 9, 64, 96), Extent(3, 9, 32, 96)
CHUNK = StepSend("chunk", "down", DOWN, [0, 1, 2, 3])
FILL = StepLoad(
    "fill",
    "up",
    UP,
    num_blocks=2,
    block_ids=[4, 5],
    is_waited_for=False,
    is_reported=True,
    passed_on=StepSend("fill", "up", BACK, [2, 3, 4, 5]),
)


class Neighbours:
    """Takes the place of a chain: notes what is sent, and keeps the loads."""

    def __init__(self) -> None:
        self.failure: str | None = None
        self.sent: list[tuple[str, int]] = []
        self.gone: list[Callable[[], None]] = []
        self.loads: list[Load] = []

    def fail(self, reason: str) -> None:
        self.failure = reason
        for load in self.loads:
            load.fail()

    def send(self, way: str, send: Send) -> None:
        self.sent.append((way, send.layer_idx))
        self.gone.append(send.on_sent)

    def load(self, way: str, load: Load) -> None:
        self.loads.append(load)


def working(
    caches: dict[str, torch.Tensor], *, writes_first: bool
) -> tuple[RunaheadConnectorWorker, Neighbours]:
    made, neighbours = RunaheadConnectorWorker(ChainLimits(BLOCK, BLOCKS, 512, 1024)), Neighbours()
    made.blocks, made.writes_first = KVBlocks(caches, BLOCKS), writes_first
    made.chain = cast(Any, neighbours)
    return made, neighbours


def attend(made: RunaheadConnectorWorker, *names: str) -> None:
    for name in names:
        made.before_attention(name)
        made.after_attention(name)


@pytest.mark.parametrize("writes_first", [True, False])
def test_a_cache_of_several_layers_is_sent_with_the_first_of_them(writes_first: bool) -> None:
    first, second = torch.zeros(2, BLOCKS, 2, BLOCK, 8).unbind(0)
    caches = {"a": first, "reads-a": first, "b": second}
    made, neighbours = working(caches, writes_first=writes_first)
    for _ in range(2):
        made.begin_step(RunaheadMetadata(sends=[CHUNK]))
        attend(made, "a", "reads-a", "b")
        made.end_step()
    assert neighbours.sent == [("down", 0), ("down", 1)] * 2


@pytest.mark.parametrize("writes_first", [True, False])
def test_a_layer_goes_up_when_it_has_come_and_the_own_is_written(writes_first: bool) -> None:
    caches = {name: torch.zeros(BLOCKS, 2, BLOCK, 8) for name in ("a", "b")}
    made, neighbours = working(caches, writes_first=writes_first)
    made.begin_step(RunaheadMetadata(loads=[FILL], sends=[CHUNK]))
    (load,) = neighbours.loads
    load.write(0, lambda: None)  # before this replica has computed anything
    assert neighbours.sent == []
    attend(made, "a", "b")
    assert neighbours.sent == [("down", 0), ("up", 0), ("down", 1)]
    load.write(1, lambda: None)
    assert neighbours.sent[3:] == [("up", 1)]


def test_a_fill_after_its_chunks_step_passes_on_what_comes() -> None:
    caches = {name: torch.zeros(BLOCKS, 2, BLOCK, 8) for name in ("a", "b")}
    made, neighbours = working(caches, writes_first=True)
    made.begin_step(RunaheadMetadata(loads=[FILL]))
    (load,) = neighbours.loads
    for layer_idx in (1, 0):
        load.write(layer_idx, lambda: None)
    assert neighbours.sent == [("up", 1), ("up", 0)]


CHUNKS_LOAD = replace(
    FILL,
    request_id="chunk",
    way="down",
    extent=Extent(3, 9, 0, 32),
    block_ids=[0, 1],
    is_waited_for=True,
    is_reported=False,
    passed_on=None,
)


def two_layers() -> dict[str, torch.Tensor]:
    return {name: torch.zeros(BLOCKS, 2, BLOCK, 8) for name in ("a", "b")}


def test_blocks_of_a_chunk_that_did_not_come_are_told_and_nothing_is_sent() -> None:
    made, neighbours = working(two_layers(), writes_first=True)
    made.begin_step(RunaheadMetadata(loads=[CHUNKS_LOAD], sends=[CHUNK]))
    neighbours.loads[0].write(0, lambda: None)
    made.before_attention("a")
    neighbours.fail("a fault on purpose")
    made.before_attention("b")
    made.end_step()
    assert neighbours.sent == [("down", 0)]
    assert made.take_finished(set()) == (set(), set())
    assert made.take_invalid_blocks() == {0, 1}
    assert made.take_invalid_blocks() == set()


def test_a_layer_that_nothing_has_waited_for_is_no_success() -> None:
    made, neighbours = working(two_layers(), writes_first=True)
    made.begin_step(RunaheadMetadata(loads=[CHUNKS_LOAD]))
    neighbours.loads[0].write(0, lambda: None)
    made.before_attention("a")
    made.end_step()
    assert "before all layers had come" in (neighbours.failure or "")
    assert made.take_invalid_blocks() == {0, 1}


def test_a_fill_is_told_of_when_it_is_whole_or_has_failed() -> None:
    made, neighbours = working(two_layers(), writes_first=True)
    others = [replace(FILL, request_id=name, passed_on=None) for name in ("whole", "lost")]
    made.begin_step(RunaheadMetadata(loads=others))
    assert not made.is_idle
    for layer_idx in (0, 1):
        neighbours.loads[0].write(layer_idx, lambda: None)
    assert made.take_finished(set()) == (set(), {"whole"})
    assert made.take_invalid_blocks() == set()
    neighbours.fail("a fault on purpose")
    assert made.take_finished(set()) == (set(), {"lost"})
    assert made.take_invalid_blocks() == {4, 5}
    assert made.is_idle


def test_a_chunk_that_has_ended_is_told_of_when_all_has_gone() -> None:
    made, neighbours = working(two_layers(), writes_first=True)
    made.begin_step(RunaheadMetadata(sends=[CHUNK]))
    attend(made, "a", "b")
    made.end_step()
    first, second = neighbours.gone
    first()
    assert made.take_finished({"chunk", "other"}) == (set(), set())
    assert not made.is_idle
    second()
    assert made.is_idle
    assert made.take_finished(set()) == ({"chunk"}, set())


def test_what_a_chain_that_has_failed_does_not_send_holds_no_blocks() -> None:
    made, neighbours = working(two_layers(), writes_first=True)
    made.begin_step(RunaheadMetadata(sends=[CHUNK]))
    attend(made, "a")
    neighbours.fail("a fault on purpose")
    attend(made, "b")
    assert neighbours.sent == [("down", 0)]
    assert made.take_finished({"chunk"}) == ({"chunk"}, set())
    assert made.is_idle


def test_attention_waits_for_its_layer() -> None:
    made, neighbours = working(two_layers(), writes_first=True)
    made.begin_step(RunaheadMetadata(loads=[CHUNKS_LOAD], sends=[CHUNK]))
    (load,) = neighbours.loads
    attention = threading.Thread(target=made.before_attention, args=("b",), daemon=True)
    attention.start()
    load.write(0, lambda: None)  # another layer's
    attention.join(0.2)
    assert attention.is_alive()
    assert neighbours.sent == []
    load.write(1, lambda: None)
    attention.join(20)
    assert not attention.is_alive()
    assert neighbours.sent == [("down", 1)]
