"""Chains without engines: replicas are threads of one process, their KV random tensors."""

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from batchllm_operator.errors import RunaheadError
from batchllm_operator.runahead.blocks import KVBlocks
from batchllm_operator.runahead.chain import Chain, Transfer

LAYERS, BLOCKS, BLOCK = 3, 8, 16
EXTENTS = [(0, 2), (2, 2), (2, 5)]  # the replica between has less than a block


class Replica:
    """A chain's end with a KV cache of its own."""

    def __init__(self, rank: int, world_size: int, store: Path, timeout_s: float) -> None:
        self.caches = {str(idx): torch.randn(BLOCKS, 2, BLOCK, 8) for idx in range(LAYERS)}
        blocks = KVBlocks(self.caches, BLOCKS)
        self.chain = Chain(rank, world_size, store, blocks, timeout_s=timeout_s)
        self.ids = torch.randperm(BLOCKS).tolist()[:5]

    def compute(self, num_layers: int = LAYERS) -> Transfer:
        """As an engine's step does: each layer waits for earlier chunks."""
        transfer = Transfer(EXTENTS, self.ids)
        self.chain.begin(transfer)
        for layer_idx in range(num_layers):
            transfer.wait_for_earlier(layer_idx, self.chain.rank)
            transfer.note_written(layer_idx, None)
        return transfer

    def rows(self, layer_idx: int) -> torch.Tensor:
        return self.caches[str(layer_idx)][self.ids].clone()


Open = Callable[..., list[Any]]


@pytest.fixture
def open_chain(tmp_path: Path) -> Iterator[Open]:
    """Opens a chain of three: by rank a replica, or what opening raised."""
    opened: list[Replica] = []

    def open_(ranks: tuple[int, ...] = (0, 1, 2), timeout_s: float = 30.0) -> list[Any]:
        def one(rank: int) -> Any:
            try:
                return Replica(rank, 3, tmp_path / "store", timeout_s)
            except RunaheadError as error:
                return error

        with ThreadPoolExecutor(3) as pool:
            made = list(pool.map(one, ranks))
        opened.extend(each for each in made if isinstance(each, Replica))
        return made

    yield open_
    for replica in opened:
        replica.chain.fail("the test has ended")


def together(replicas: list[Replica], num_layers: int = LAYERS) -> list[Transfer]:
    with ThreadPoolExecutor(len(replicas)) as pool:
        transfers = list(pool.map(lambda replica: replica.compute(num_layers), replicas))
    for transfer in transfers:
        transfer.wait()
    return transfers


def test_every_replica_has_the_chunks_of_all(open_chain: Open) -> None:
    replicas = open_chain()
    for _ in range(2):  # groups, one after the other
        before = [[replica.rows(idx) for idx in range(LAYERS)] for replica in replicas]
        together(replicas)
        for replica in replicas:
            assert replica.chain.failure is None
            for layer_idx in range(LAYERS):
                rows = replica.rows(layer_idx)
                for owner, (first, last) in enumerate(EXTENTS):
                    assert torch.equal(rows[first:last], before[owner][layer_idx][first:last])


def test_a_layer_waits_for_the_chunks_before_it_alone(open_chain: Open) -> None:
    first, second, _ = open_chain()
    transfers = [Transfer(EXTENTS, replica.ids) for replica in (first, second)]
    for replica, transfer in zip((first, second), transfers, strict=True):
        replica.chain.begin(transfer)
    transfers[0].wait_for_earlier(0, 0)  # of nobody
    waiting = threading.Thread(target=transfers[1].wait_for_earlier, args=(0, 1))
    waiting.start()
    waiting.join(0.2)
    assert waiting.is_alive()
    transfers[0].note_written(0, None)
    first.chain.fail("enough")
    second.chain.fail("enough")
    waiting.join(30)
    assert not waiting.is_alive()


def test_a_fault_of_one_replica_ends_the_chain_of_all(open_chain: Open) -> None:
    replicas = open_chain(timeout_s=20.0)
    replicas[1].chain.fail("a fault on purpose")
    transfers = together(replicas)
    assert all(transfer.is_over for transfer in transfers)
    assert [bool(replica.chain.failure) for replica in replicas] == [True] * 3
    again = Transfer(EXTENTS, replicas[0].ids)  # a failed chain never starts again
    replicas[0].chain.begin(again)
    assert again.is_over


def test_a_replica_that_does_not_compute_is_given_up_in_time(open_chain: Open) -> None:
    replicas = open_chain(timeout_s=1.0)
    transfers = [Transfer(EXTENTS, replica.ids) for replica in replicas]
    for replica, transfer in zip(replicas, transfers, strict=True):
        replica.chain.begin(transfer)
    for transfer in transfers:
        transfer.wait()
    assert "layer 0 isn't computed after 1 s" in replicas[0].chain.failure
    assert replicas[2].chain.failure


def test_nothing_is_written_once_a_transfer_is_over(open_chain: Open) -> None:
    """Its blocks may belong to other requests by then."""
    transfer = Transfer(EXTENTS, [0, 1, 2, 3, 4])
    transfer.touch_blocks(lambda: None)
    transfer.end()
    with pytest.raises(RunaheadError, match="ended early"):
        transfer.touch_blocks(lambda: pytest.fail("written"))


def test_opening_ends_in_time_when_a_replica_is_missing(open_chain: Open) -> None:
    for error in open_chain(ranks=(0, 2), timeout_s=1.0):
        assert isinstance(error, RunaheadError)
        assert "can't reach the others" in str(error)


def test_all_replicas_time_the_link(open_chain: Open) -> None:
    replicas = open_chain()
    with ThreadPoolExecutor(3) as pool:
        rates = list(pool.map(lambda replica: replica.chain.bytes_per_s(), replicas))
    assert min(rates) > 1e6
    replicas[0].chain.fail("a fault on purpose")
    with pytest.raises(RunaheadError, match="on purpose"):
        replicas[0].chain.bytes_per_s()
