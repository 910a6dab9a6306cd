"""Chains of replicas for tests: sizes and rates over the ranges that matter, and beyond."""

from typing import Final

import numpy as np
from hypothesis import strategies as st

from batchllm_operator.runahead.placement import GroupLoads
from batchllm_operator.runahead.prediction import Chain, ReplicaCost

COST: Final = ReplicaCost(4, 2e-6, 6e-6, 1e-9, 4096.0)
"""A small model: 4 layers, with nothing but matrices and causal attention."""

# As measured on a CPU with vLLM: 12 layers, some 3.2 s for 4,096 tokens on one core, and the least
# TTFT with two of them where the first computes 2,560.
_CPU_TOKEN_S: Final = 3.65e-4 / 12
CPU_COST: Final = ReplicaCost(
    12,
    0.3 * _CPU_TOKEN_S,
    0.7 * _CPU_TOKEN_S,
    2.04e-7 / 12,
    4096.0,
    weights_s=2e-4,
    step_overhead_s=4e-3,
)
"""A replica on one core."""
CPU_CHAIN: Final = Chain(CPU_COST, 2, 1e9, block_size=32, max_chunk_blocks=256)


def group_loads(*groups: tuple[int, int, int, int]) -> GroupLoads:
    """Groups of (prefix, members, distinct tokens of each, output tokens of each)."""
    prefix, members, distinct, outputs = np.array(groups, dtype=np.float64).T
    return GroupLoads(prefix, members, members * distinct, members * outputs)


@st.composite
def costs(draw: st.DrawFn) -> ReplicaCost:
    """From matrices alone to attention alone, with or without what keeps small chunks slow."""
    token_s = draw(st.sampled_from([1e-7, 1e-6, 1e-4]))
    qkv_share = draw(st.sampled_from([0.05, 0.25, 0.5]))
    return ReplicaCost(
        num_layers=draw(st.integers(1, 12)),
        qkv_s_per_token=token_s * qkv_share,
        other_s_per_token=token_s * (1 - qkv_share),
        s_per_pair=token_s * draw(st.sampled_from([0.0, 1e-5, 1e-4, 1e-3, 1e-2])),
        kv_bytes_per_token=draw(st.sampled_from([512.0, 4096.0, 16384.0])),
        weights_s=token_s * draw(st.sampled_from([0.0, 50.0, 300.0])),
        kv_copy_s_per_token=token_s * draw(st.sampled_from([0.0, 0.02])),
        step_overhead_s=draw(st.sampled_from([0.0, 1e-3])),
        sampled_token_s=token_s * draw(st.sampled_from([0.0, 1.0])),
    )


@st.composite
def chains(draw: st.DrawFn) -> Chain:
    """Any cost with a link that nothing waits for, or everything; no limit on chunks."""
    return Chain(
        draw(costs()),
        draw(st.integers(1, 5)),
        draw(st.sampled_from([1e6, 1e8, 1e9, 1e10, 1e11, 1e13])),
        block_size=draw(st.sampled_from([1, 16, 32])),
    )


@st.composite
def splits(draw: st.DrawFn, chain: Chain) -> tuple[int, ...]:
    """Whole blocks, but for the last chunk."""
    p, size = chain.num_replicas, chain.block_size
    blocks = draw(st.lists(st.integers(1, 60), min_size=p, max_size=p))
    short = draw(st.integers(0, size - 1))
    return (*(num * size for num in blocks[:-1]), blocks[-1] * size - short)
