"""What the worker's half sends, and when: layers and steps without an engine or a chain."""

from __future__ import annotations

from typing import Any, cast

import pytest
import torch

from batchllm_operator.vllm_plugin.runahead_blocks import KVBlocks
from batchllm_operator.vllm_plugin.runahead_links import Extent, Load, Send
from batchllm_operator.vllm_plugin.runahead_plan import ChainLimits
from batchllm_operator.vllm_plugin.runahead_scheduling import RunaheadMetadata, StepLoad, StepSend
from batchllm_operator.vllm_plugin.runahead_working import Working

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

    failure: str | None = None

    def __init__(self) -> None:
        self.sent: list[tuple[str, int]] = []
        self.loads: list[Load] = []

    def send(self, way: str, send: Send) -> None:
        self.sent.append((way, send.layer_idx))

    def load(self, way: str, load: Load) -> None:
        self.loads.append(load)


def working(caches: dict[str, torch.Tensor], *, writes_first: bool) -> tuple[Working, Neighbours]:
    made, neighbours = Working(ChainLimits(BLOCK, BLOCKS, 512, 1024)), Neighbours()
    made.blocks, made.writes_first = KVBlocks(caches, BLOCKS), writes_first
    made.chain = cast(Any, neighbours)
    return made, neighbours


def attend(made: Working, *names: str) -> None:
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
