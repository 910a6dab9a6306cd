"""KV blocks into messages and out of them, for the layouts that vLLM has."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from batchllm_operator.errors import SpecError
from batchllm_operator.runahead.blocks import KVBlocks

NUM_BLOCKS = 12
SHAPES = {
    "packed": (NUM_BLOCKS, 2, 16, 32),  # [blocks, heads, tokens, keys and values]
    "halves-first": (2, NUM_BLOCKS, 16, 2, 16),  # [keys or values, blocks, tokens, heads, head]
    "smaller-kernel-blocks": (3 * NUM_BLOCKS, 2, 8, 32),
}


def random_bits(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Any bits, also those of NaN."""
    size = torch.empty(0, dtype=dtype).element_size()
    return torch.randint(0, 256, (*shape[:-1], shape[-1] * size), dtype=torch.uint8).view(dtype)


def bits(cache: Tensor) -> Tensor:
    return cache.contiguous().view(torch.uint8)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn])
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES.keys())
@given(ids=st.permutations(range(NUM_BLOCKS)), number=st.integers(0, NUM_BLOCKS))
def test_blocks_arrive_as_they_were_and_others_stay(
    shape: tuple[int, ...], dtype: torch.dtype, ids: list[int], number: int
) -> None:
    source, target = random_bits(shape, dtype), random_bits(shape, dtype)
    before = target.clone()
    here, there = KVBlocks({"a": source}, NUM_BLOCKS), KVBlocks({"a": target}, NUM_BLOCKS)
    assert here.block_bytes * NUM_BLOCKS == source.numel() * source.element_size()
    message = torch.empty(number * here.block_bytes, dtype=torch.uint8)
    taken, given_ids = ids[:number], ids[::-1][:number]
    here.gather(0, taken, message)
    there.scatter(0, given_ids, message)
    axis = 1 if shape[0] == 2 else 0
    split = shape[axis] // NUM_BLOCKS
    for block_id in range(NUM_BLOCKS):
        origin = source if block_id in given_ids else before
        from_id = taken[given_ids.index(block_id)] if block_id in given_ids else block_id
        for part in range(split):
            found = target.select(axis, block_id * split + part)
            wanted = origin.select(axis, from_id * split + part)
            assert torch.equal(bits(found), bits(wanted))


def test_strides_may_differ_between_the_ends() -> None:
    source = torch.randn(NUM_BLOCKS, 16, 2, 32).transpose(1, 2)
    target = torch.zeros(NUM_BLOCKS, 2, 16, 32)
    here, there = KVBlocks({"a": source}, NUM_BLOCKS), KVBlocks({"a": target}, NUM_BLOCKS)
    message = torch.empty(2 * here.block_bytes, dtype=torch.uint8)
    here.gather(0, [3, 1], message)
    there.scatter(0, [0, 5], message)
    assert torch.equal(target[[0, 5]], source[[3, 1]])
    assert here.layout() == there.layout()


def test_layers_that_share_a_cache_count_once() -> None:
    cache, other = torch.zeros(2, NUM_BLOCKS, 2, 16, 32).unbind(0)
    blocks = KVBlocks({"a": cache, "b": other, "c": cache}, NUM_BLOCKS)
    assert blocks.num_layers == 2
    assert blocks.layer_idxs == {"a": 0, "b": 1, "c": 0}


@pytest.mark.parametrize(
    ("caches", "reason"),
    [
        ({}, "no KV cache"),
        ({"a": torch.zeros(NUM_BLOCKS + 1, 2, 16, 32)}, "has no dimension of 12 blocks"),
        (
            {"a": torch.zeros(NUM_BLOCKS, 2, 16, 32), "b": torch.zeros(NUM_BLOCKS, 1, 16, 32)},
            "differ in size",
        ),
    ],
)
def test_other_caches_are_refused(caches: dict[str, Tensor], reason: str) -> None:
    with pytest.raises(SpecError, match=reason):
        KVBlocks(caches, NUM_BLOCKS)
