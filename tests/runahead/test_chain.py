"""Chains without engines: replicas are threads of one process, their KV random tensors."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from batchllm_operator.errors import RunaheadError, RunaheadMismatchError
from batchllm_operator.vllm_plugin.runahead.blocks import KVBlocks
from batchllm_operator.vllm_plugin.runahead.chain import Chain
from batchllm_operator.vllm_plugin.runahead.links import Extent, Load, Send
from batchllm_operator.vllm_plugin.runahead.plan import ChainSettings

LAYERS, BLOCKS, BLOCK = 3, 8, 16


class Replica:
    """A chain's end with a KV cache of its own."""

    def __init__(self, settings: ChainSettings, fingerprint: dict[str, Any]) -> None:
        self.caches = {str(idx): torch.randn(BLOCKS, 2, BLOCK, 8) for idx in range(LAYERS)}
        self.chain = Chain(settings, KVBlocks(self.caches, BLOCKS), fingerprint)
        self.sent: list[int] = []

    def send(self, way: Any, extent: Extent, ids: Sequence[int], layers: Sequence[int]) -> None:
        for layer_idx in layers:
            on_sent = partial(self.sent.append, layer_idx)
            self.chain.send(way, Send(extent, layer_idx, ids, on_sent))

    def load(
        self, way: Any, extent: Extent, ids: Sequence[int], on_layer: Callable[[int], None] | None
    ) -> Load:
        num_blocks = (extent.end - extent.begin) // BLOCK
        load = Load(extent, num_blocks, ids, LAYERS, on_layer)
        self.chain.load(way, load)
        return load

    def rows(self, layer_idx: int, ids: Sequence[int]) -> torch.Tensor:
        return self.caches[str(layer_idx)][list(ids)]


Open = Callable[..., list[Any]]


@pytest.fixture
def open_chain(tmp_path: Path) -> Iterator[Open]:
    """Opens a chain: by rank a replica, or what opening raised."""
    opened: list[Replica] = []

    def open_(world_size: int, *fingerprints: dict[str, Any], **settings: Any) -> list[Any]:
        def one(rank: int) -> Any:
            fingerprint = fingerprints[rank] if rank < len(fingerprints) else {}
            given = {"connect_timeout_s": 30, "start_timeout_s": 20, **settings}
            where = f"file://{tmp_path}/store"
            try:
                return Replica(ChainSettings(rank, world_size, where, **given), fingerprint)
            except RunaheadError as error:
                return error

        with ThreadPoolExecutor(world_size) as pool:
            found = list(pool.map(one, range(world_size)))
        opened.extend(each for each in found if isinstance(each, Replica))
        return found

    yield open_
    for replica in opened:
        replica.chain.close()


def wait(load: Load) -> list[bool]:
    return [load.wait(layer_idx) for layer_idx in range(LAYERS)]


def test_kv_goes_down_and_back_up_whatever_the_order_of_the_layers(open_chain: Open) -> None:
    first, second, third = open_chain(3)
    down, up = Extent(4, 99, 0, 2 * BLOCK), Extent(4, 99, 2 * BLOCK, 3 * BLOCK)
    relay = second.load("down", down, [3, 1], lambda idx: second.send("down", down, [3, 1], [idx]))
    whole = third.load("down", down, [6], None)  # the first block is there already
    first.send("down", down, [0, 5], [2, 0, 1])
    assert wait(relay) == wait(whole) == [True] * LAYERS
    back = first.load("up", up, [7], None)
    passing = second.load("up", up, [4], lambda idx: second.send("up", up, [4], [idx]))
    third.send("up", up, [2], [0, 1, 2])
    assert wait(passing) == wait(back) == [True] * LAYERS
    for layer_idx in range(LAYERS):
        assert torch.equal(second.rows(layer_idx, [3, 1]), first.rows(layer_idx, [0, 5]))
        assert torch.equal(third.rows(layer_idx, [6]), first.rows(layer_idx, [5]))
        assert torch.equal(first.rows(layer_idx, [7]), third.rows(layer_idx, [2]))
    assert first.sent == [2, 0, 1]


def test_both_ways_may_be_busy_with_different_groups(open_chain: Open) -> None:
    first, second = open_chain(2)
    groups = [Extent(idx, idx, 0, 2 * BLOCK) for idx in range(6)]
    # All that is sent, is sent before anything is taken, and the ways are taken one by one.
    for group in groups:
        first.send("down", group, [0, 1], range(LAYERS))
        second.send("up", group, [2, 3], range(LAYERS))
    backward = [first.load("up", group, [4, 5], None) for group in groups]
    assert [wait(load) for load in backward] == [[True] * LAYERS] * len(groups)
    forward = [second.load("down", group, [6, 7], None) for group in groups]
    assert [wait(load) for load in forward] == [[True] * LAYERS] * len(groups)
    assert torch.equal(second.rows(1, [6, 7]), first.rows(1, [0, 1]))


def test_replicas_that_differ_all_say_in_what(open_chain: Open) -> None:
    one, other = {"dtype": "a", "attention": "c"}, {"dtype": "b", "attention": "d"}
    found = open_chain(3, one, one, other)
    for each in found:
        assert isinstance(each, RunaheadMismatchError)
        assert "replicas 0 and 2 differ in dtype: 'a' and 'b'" in str(each)


def test_a_replica_of_another_version_is_refused(
    open_chain: Open, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from batchllm_operator.vllm_plugin.runahead import chain as runahead_chain

    dumps = json.dumps

    def older(fingerprint: dict[str, Any]) -> str:
        is_second = fingerprint["name"] == 1
        return dumps({**fingerprint, "name": 0, "protocol": 0 if is_second else 1})

    monkeypatch.setattr(runahead_chain.json, "dumps", older)
    for each in open_chain(2, {"name": 0}, {"name": 1}):
        assert isinstance(each, RunaheadMismatchError)
        assert "differ in protocol: 1 and 0" in str(each)


def test_a_replica_that_does_not_come_is_an_error(tmp_path: Path) -> None:
    settings = ChainSettings(0, 2, f"file://{tmp_path}/store", connect_timeout_s=0.5)
    with pytest.raises(RunaheadError, match="replica 0 of 2 can't reach the others"):
        Replica(settings, {})


@pytest.mark.parametrize(
    "other",
    [
        Extent(5, 99, 0, BLOCK),  # another group
        Extent(4, 98, 0, BLOCK),  # another prefix
        Extent(4, 99, BLOCK, 2 * BLOCK),  # other tokens
    ],
)
def test_kv_that_was_not_expected_is_not_written(open_chain: Open, other: Extent) -> None:
    first, second = open_chain(2)
    before = second.rows(0, range(BLOCKS)).clone()
    load = second.load("down", Extent(4, 99, 0, BLOCK), [3], None)
    first.send("down", other, [2], range(LAYERS))
    assert wait(load) == [False] * LAYERS
    assert load.has_failed
    assert "was expected" in (second.chain.failure or "")
    assert torch.equal(second.rows(0, range(BLOCKS)), before)


@pytest.mark.parametrize("field", range(8))
def test_every_field_of_a_header_is_looked_at(field: int) -> None:
    from batchllm_operator.vllm_plugin.runahead.links import _read_header, _write_header

    extent, buffer = Extent(4, 99, 16, 32), torch.zeros(64, dtype=torch.uint8)
    _write_header(buffer, 7, extent, 2)
    assert _read_header(buffer, 7, extent, LAYERS) == 2
    buffer.view(torch.int64)[field] += 1  # the layer's is one too many
    with pytest.raises(RunaheadError):
        _read_header(buffer, 7, extent, LAYERS)


def test_a_layer_that_comes_twice_is_a_fault(open_chain: Open) -> None:
    first, second = open_chain(2)
    extent = Extent(4, 99, 0, BLOCK)
    load = second.load("down", extent, [3], None)
    first.send("down", extent, [2], [0, 0, 2])
    with ThreadPoolExecutor(1) as pool:
        came = pool.submit(wait, load)
        try:
            assert came.result(timeout=20) == [True, False, False]
        finally:
            second.chain.fail("so that nothing waits")
            load.fail()
    assert "layer 0 came twice" in (second.chain.failure or "")


def test_nothing_is_sent_after_a_fault_and_the_neighbours_notice(open_chain: Open) -> None:
    first, second, third = open_chain(3)
    extent = Extent(0, 1, 0, BLOCK)
    got = [third.load("down", extent, [idx], None) for idx in (3, 4)]
    second.send("down", extent, [2], range(LAYERS))
    assert wait(got[0]) == [True] * LAYERS
    waiting = first.load("up", extent, [5], None)
    second.chain.fail("a fault on purpose")
    second.send("down", extent, [2], range(LAYERS))
    assert wait(got[1]) == wait(waiting) == [False] * LAYERS
    for replica in (first, third):
        assert "receiving KV failed" in (replica.chain.failure or "")
        # What comes later fails at once.
        assert replica.load("up" if replica is first else "down", extent, [6], None).has_failed
    assert second.chain.failure == "a fault on purpose"


def test_blocks_that_a_gpu_still_gathers_when_a_fault_is_found_are_not_sent(
    open_chain: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From then on they may be another request's: what counts is when the gathering has ended."""
    from batchllm_operator.vllm_plugin.runahead import links as runahead_links

    class Slow(runahead_links.SideStream):
        def synchronize(self) -> None:
            if threading.current_thread().name == "runahead-send":
                first.chain.fail("a fault on purpose")

    monkeypatch.setattr(runahead_links, "SideStream", Slow)
    first, second = open_chain(2)
    before = second.rows(0, range(BLOCKS)).clone()
    extent = Extent(0, 1, 0, BLOCK)
    load = second.load("down", extent, [3], None)
    first.send("down", extent, [2], range(LAYERS))
    assert wait(load) == [False] * LAYERS
    assert torch.equal(second.rows(0, range(BLOCKS)), before)


def test_a_neighbour_that_is_too_late_is_given_up(open_chain: Open) -> None:
    first, second = open_chain(2, layer_timeout_s=0.5)
    extent = Extent(0, 1, 0, BLOCK)
    load = second.load("down", extent, [3], None)
    first.send("down", extent, [2], [0, 1])  # and not the last layer
    assert wait(load) == [True, True, False]
    assert "Timed out" in (second.chain.failure or "")


def test_on_a_gpu_what_is_posted_is_given_up_with_the_chain() -> None:
    from batchllm_operator.vllm_plugin.runahead.links import _wait

    blocks = SimpleNamespace(device=SimpleNamespace(type="cuda"))
    waited: list[bool] = []
    done = SimpleNamespace(is_completed=lambda: True, wait=lambda: waited.append(True))
    never = SimpleNamespace(is_completed=lambda: False)
    _wait(cast(Any, SimpleNamespace(blocks=blocks, failure=None)), done, 1.0)
    assert waited == [True]
    with pytest.raises(RunaheadError, match="a fault on purpose"):
        _wait(cast(Any, SimpleNamespace(blocks=blocks, failure="a fault on purpose")), never, 60.0)
    with pytest.raises(RunaheadError, match=r"nothing for 0\.01 s"):
        _wait(cast(Any, SimpleNamespace(blocks=blocks, failure=None)), never, 0.01)


def test_a_load_that_has_failed_never_writes_again() -> None:
    """Its blocks may be another request's by then."""
    written: list[int] = []
    passed_on: list[int] = []
    load = Load(Extent(0, 1, 0, BLOCK), 1, [3], LAYERS, passed_on.append)
    load.write(0, lambda: written.append(0))
    load.fail()
    load.write(1, lambda: written.append(1))
    assert (written, passed_on) == ([0], [0])
    assert [load.wait(layer_idx) for layer_idx in range(LAYERS)] == [True, False, False]


def test_a_load_that_is_whole_does_not_fail_any_more(open_chain: Open) -> None:
    first, second = open_chain(2)
    extent = Extent(0, 1, 0, BLOCK)
    load = second.load("down", extent, [3], None)
    first.send("down", extent, [2], range(LAYERS))
    assert wait(load) == [True] * LAYERS
    second.chain.fail("a fault on purpose")
    assert not load.has_failed


def test_replicas_agree_or_find_out(open_chain: Open) -> None:
    replicas = open_chain(2, start_timeout_s=10)

    def agree(values: Sequence[str]) -> list[Any]:
        def one(replica: Replica, value: str) -> Any:
            try:
                return replica.chain.agree("groups", value)
            except RunaheadError as error:
                return error

        with ThreadPoolExecutor(2) as pool:
            return list(pool.map(one, replicas, values))

    assert agree(["x", "x"]) == [None, None]
    for error in agree(["x", "y"]):
        assert isinstance(error, RunaheadMismatchError)
    assert agree(["z", "z"]) == [None, None]
    assert replicas[0].chain.failure is None


def test_a_replica_that_stays_away_ends_the_chain(open_chain: Open) -> None:
    first, _ = open_chain(2, start_timeout_s=0.5)
    first.chain.agree("groups", "x")
    assert "not all replicas came to groups 1" in (first.chain.failure or "")


def test_a_replica_whose_chain_has_failed_keeps_nobody_waiting(open_chain: Open) -> None:
    """Nobody else has noticed: where nothing is under way, a closed link isn't looked at."""
    first, second, third = open_chain(3, start_timeout_s=20)
    second.chain.fail("a fault on purpose")
    second.chain.agree("groups", "x")  # returns at once
    with ThreadPoolExecutor(2) as pool:
        agreed = [pool.submit(each.chain.agree, "groups", "x") for each in (first, third)]
        assert [each.result() for each in agreed] == [None, None]
    for replica in (first, third):
        assert "the chain of replica 1 has failed before groups 1" in (replica.chain.failure or "")


def test_threads_end_with_the_chain(open_chain: Open) -> None:
    before = set(threading.enumerate())
    for replica in open_chain(2):
        replica.chain.close()
    for thread in set(threading.enumerate()) - before:
        thread.join(20)
        assert not thread.is_alive()
