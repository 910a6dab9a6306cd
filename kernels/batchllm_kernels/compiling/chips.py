"""Chips to compile for, and how many programs fit a multiprocessor."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from triton.backends.compiler import GPUTarget


@dataclass(frozen=True, slots=True)
class Chip:
    """Resources of a multiprocessor (compute unit), from the vendors' architecture manuals."""

    target: GPUTarget
    shared_bytes: int
    """Total shared memory (LDS)."""
    shared_bytes_per_program: int
    registers: int
    """32-bit registers of all lanes."""
    max_threads: int


CHIPS: Final[Mapping[str, Chip]] = {
    "sm80": Chip(GPUTarget("cuda", 80, 32), 164 * 1024, 163 * 1024, 65536, 2048),
    "sm90": Chip(GPUTarget("cuda", 90, 32), 228 * 1024, 227 * 1024, 65536, 2048),
    # 512 vector registers (with the accumulators) for each lane of four SIMDs of 64.
    "gfx90a": Chip(GPUTarget("hip", "gfx90a", 64), 64 * 1024, 64 * 1024, 131072, 2048),
    "gfx942": Chip(GPUTarget("hip", "gfx942", 64), 64 * 1024, 64 * 1024, 131072, 2048),
}
_RESERVED_SHARED_BYTES = 1024
"""CUDA's part of each program's shared memory."""


def programs_at_once(chip: Chip, registers: int, shared: int, threads: int) -> int:
    """Programs that fit at once, by registers of a thread, shared bytes and threads of each."""
    is_cuda = chip.target.backend == "cuda"
    granule = 8
    registers = -(-registers // granule) * granule
    by_registers = chip.registers // (registers * threads)
    by_shared = chip.shared_bytes // max(1, shared + (_RESERVED_SHARED_BYTES if is_cuda else 0))
    return min(by_registers, by_shared, chip.max_threads // threads)
