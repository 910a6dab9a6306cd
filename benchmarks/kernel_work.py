"""What a step's attention has to read, write and compute: the floor under every measured time.

Counted is what the algorithm needs, not what a kernel does: each key and value once, those of a
shared prefix once for its group. (A kernel reads a prefix once for each tile that the group's
queries fill; on time, the others find it in the L2 cache.) No block padding. Time on a chip is a
roofline over the data sheet's rates (`gpus.toml`): nothing runs much faster, most runs slower.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from kernel_settings.workloads import Group

from batchllm_kernels.prefix_attention import AttentionShape
from batchllm_operator.cost import GPU, find_gpu

_PARTIAL_BYTES = 4
"""Partial outputs and their LSEs are float32."""


_GPU_OF_DEVICE: Final = {
    "NVIDIA H100 80GB HBM3": "H100",
    "NVIDIA H200": "H200",
    "NVIDIA A100-SXM4-80GB": "A100",
    "AMD Instinct MI300X": "MI300X",
}
"""By how the driver's name for it begins."""


def find_chip(device_name: str) -> GPU | None:
    """The GPU that a driver calls `device_name`; None if its rates aren't known."""
    names = [gpu for start, gpu in _GPU_OF_DEVICE.items() if device_name.startswith(start)]
    return find_gpu(names[0]) if names else None


def roofline_s(chip: GPU, num_bytes: float, flop: float) -> float:
    """max(bytes / bandwidth, FLOP / peak), in seconds, by the data sheet."""
    return max(num_bytes / chip.hbm_bytes_per_s, flop / chip.bf16_flop_per_s)


@dataclass(frozen=True, slots=True)
class AttentionWork:
    """One layer of one step. Bytes and floating-point operations."""

    unique_kv_bytes: int
    """Keys and values, every shared prefix once."""
    plain_kv_bytes: int
    """Keys and values as a kernel without sharing reads them: each request its whole context."""
    q_out_bytes: int
    """Queries read and outputs written."""
    partials_bytes: int
    """Partial outputs and LSEs written and read again, two for each token of a group. They may
    stay in the chip's cache. What split-K adds isn't counted: it depends on the kernel."""
    flop: int
    """Two matrix products, Q K^T and P V, over the keys that each query sees; as many with
    sharing as without."""

    def ideal_s(self, chip: GPU) -> float:
        """Floor: max((unique KV + q + out) / bandwidth, FLOP / peak), in seconds."""
        return roofline_s(chip, self.unique_kv_bytes + self.q_out_bytes, self.flop)

    def shared_s(self, chip: GPU) -> float:
        """As `ideal_s`, with the partials going through memory."""
        num_bytes = self.unique_kv_bytes + self.q_out_bytes + self.partials_bytes
        return roofline_s(chip, num_bytes, self.flop)

    def plain_s(self, chip: GPU) -> float:
        """Floor of a kernel without sharing, in seconds."""
        return roofline_s(chip, self.plain_kv_bytes + self.q_out_bytes, self.flop)

    def predicted_speedup(self, chip: GPU) -> float:
        """`plain_s` / `shared_s`: what sharing gains if both reach the same share of the peak.

        Less than 1 where the partials cost more than the prefixes save, 1 for a step without work.
        """
        shared_s = self.shared_s(chip)
        return self.plain_s(chip) / shared_s if shared_s else 1.0


def kv_token_bytes(shape: AttentionShape, kv_bytes: int = 2) -> int:
    """Bytes of a token's keys and values."""
    return 2 * shape.num_kv_heads * shape.head_dim * kv_bytes


def count_work(
    groups: Sequence[Group], shape: AttentionShape, *, q_bytes: int = 2, kv_bytes: int = 2
) -> AttentionWork:
    """Count one layer's causal attention, without a window.

    With q query tokens at the end of s tokens of context, a request's queries see
    q * (s - q) + q * (q + 1) / 2 keys, each of which costs 4 * head_dim FLOP in each query head.
    A partial takes num_q_heads * (head_dim + 1) * 4 bytes, written and read.

    Args:
        groups: the step's requests, by the prefixes that they share.
        shape: heads.
        q_bytes: of an element of a query, and of an output.
        kv_bytes: of an element of the KV cache; 1 for FP8.
    """
    num_unique = num_plain = num_queries = num_grouped = num_seen = 0
    for group in groups:
        prefix, queries = group.num_prefix_tokens, sum(query for _, query in group.members)
        own = sum(prior + query for prior, query in group.members)
        num_unique += prefix + own
        num_plain += prefix * len(group.members) + own
        num_queries += queries
        num_grouped += queries if prefix and len(group.members) > 1 else 0
        num_seen += sum(q * (prefix + prior) + q * (q + 1) // 2 for prior, q in group.members)
    token_bytes = kv_token_bytes(shape, kv_bytes)
    row_elements = shape.num_q_heads * shape.head_dim
    partial_bytes = shape.num_q_heads * (shape.head_dim + 1) * _PARTIAL_BYTES
    return AttentionWork(
        unique_kv_bytes=num_unique * token_bytes,
        plain_kv_bytes=num_plain * token_bytes,
        q_out_bytes=2 * num_queries * row_elements * q_bytes,
        partials_bytes=num_grouped * 2 * partial_bytes * 2,
        flop=num_seen * 4 * row_elements,
    )
