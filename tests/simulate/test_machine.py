"""Engines to simulate, and the policies."""

from __future__ import annotations

import dataclasses

import pytest

from batchllm_operator.cost import MODEL_SHAPES, EngineLimits, find_gpu, kv_capacity_tokens
from batchllm_operator.errors import PlanError
from batchllm_operator.simulate.machine import Machine

MISTRAL, H100 = MODEL_SHAPES["Mistral-7B"], find_gpu("H100")


def test_a_gpu_has_the_blocks_that_fit_beside_the_weights() -> None:
    machine = Machine.of(MISTRAL, H100)
    assert machine.num_blocks == kv_capacity_tokens(MISTRAL, H100, EngineLimits()) // 16
    assert machine.num_blocks == pytest.approx(27_000, rel=0.05)
    limits = EngineLimits(num_gpus=2, kv_cache_bytes=1 << 30, max_num_batched_tokens=512)
    machine = Machine.of(MISTRAL, H100, limits, block_size=32)
    assert machine.num_blocks == 2 * (1 << 30) // 131_072 // 32
    assert (machine.num_gpus, machine.max_num_batched_tokens) == (2, 512)


def test_a_number_of_blocks_can_be_given_whatever_there_is_room_for() -> None:
    small = dataclasses.replace(H100, memory_bytes=15e9)
    with pytest.raises(PlanError, match="no room for KV"):
        Machine.of(MISTRAL, small)
    assert Machine.of(MISTRAL, small, num_blocks=7).num_blocks == 7
