"""Candidates of launch settings for one head size, ranked by the compiler's reports."""

from __future__ import annotations

import multiprocessing
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from itertools import product, zip_longest
from typing import Final

import torch
from triton.errors import TritonError

from batchllm_kernels.compile import Variant, compile_variant, fp8_dtype
from batchllm_kernels.compiling.chips import CHIPS, Chip
from batchllm_kernels.compiling.report import Report, Usage
from batchllm_kernels.prefix_attention.config import LaunchConfig, Tiling

_STEP_BYTES: Final = (4096, 16384)
"""Bytes of a narrow step's keys of one head: fewer are overhead, more don't fit the registers."""


@dataclass(frozen=True, slots=True)
class Grid:
    """Settings to combine; `wide` includes warps and compiler options."""

    narrow: tuple[Tiling, ...]
    wide: tuple[tuple[Tiling, int, Mapping[str, int]], ...]
    """(tiling, num_warps, options)."""
    programs_per_processor: tuple[int, ...] = (1, 2, 3, 4)


@dataclass(frozen=True, slots=True)
class Candidate:
    """Settings that compile, with the compiler's report."""

    launch: LaunchConfig
    head_dim: int
    kv_bits: int
    report: Report
    """Report of the most demanding variant."""

    @property
    def label(self) -> str:
        """Name in tables and files."""
        return launch_label(self.launch)

    @property
    def kv_bytes_in_flight(self) -> int:
        """Bytes of keys and values that a multiprocessor prefetches while it computes."""
        step = 2 * self.launch.narrow.block_n * self.head_dim * self.kv_bits // 8
        ahead = steps_ahead(self.launch.narrow.num_stages, is_amd=self.report.arch.startswith("gf"))
        return self.launch.programs_per_processor * ahead * step

    @property
    def rank(self) -> tuple[bool, bool, int, int]:
        """Better ones are larger: no fault, two programs, a large wide tile, bytes in flight."""
        two = self.launch.programs_per_processor >= 2
        return self.report.fault is None, two, self.launch.wide.block_m, self.kv_bytes_in_flight


def launch_label(launch: LaunchConfig) -> str:
    """Settings in one short line."""
    narrow, wide = (
        f"{tiling.block_m}x{tiling.block_n}/{tiling.num_stages}"
        for tiling in (launch.narrow, launch.wide)
    )
    options = "".join(f" {name}={value}" for name, value in sorted(launch.options.items()))
    return f"{narrow} {wide} warps={launch.num_warps} x{launch.programs_per_processor}{options}"


def steps_ahead(num_stages: int, *, is_amd: bool) -> int:
    """Steps whose keys and values are prefetched while one is computed.

    Seen in the async waits of compiled kernels (Triton 3.6 and 3.9): on NVIDIA the copies of one
    step less are outstanding when a step begins than on AMD, which waits for its own in registers.
    """
    return max(0, num_stages - (1 if is_amd else 2))


def grid_for(vendor: str, head_dim: int, kv_bits: int) -> Grid:
    """The grid for a vendor's chips. To try more, add to the tuples here.

    Args:
        vendor: "nvidia" or "amd".
        head_dim: elements of a head.
        kv_bits: bits of an element of the cache.
    """
    row_bytes = 1 << (head_dim * kv_bits // 8 - 1).bit_length()
    least, most = _STEP_BYTES
    steps = [n for n in (16, 32, 64, 128) if least <= n * row_bytes <= most]
    options: dict[int, tuple[Mapping[str, int], ...]]
    if vendor == "nvidia":
        stages, wide_stages = [3, 4], [3, 4]
        # Register limits for 3 or 4 programs at once; with 8 warps, 2 would spill.
        options = {4: ({}, {"maxnreg": 168}, {"maxnreg": 128}), 8: ({},)}
    else:
        stages, wide_stages = [2, 3], [2]
        options = {
            4: ({"waves_per_eu": 2}, {"waves_per_eu": 2, "matrix_instr_nonkdim": 16}),
            8: ({"waves_per_eu": 2, "matrix_instr_nonkdim": 16},),
        }
    rows = {4: (32, 64, 128) if vendor == "amd" else (32, 64), 8: (64, 128)}
    keys = (16, 32) if head_dim == 256 else (32, 64)
    return Grid(
        tuple(Tiling(16, n, count) for n, count in product(steps, stages)),
        tuple(
            (Tiling(m, n, count), warps, extra)
            for warps, sizes in rows.items()
            for m, n, count, extra in product(sizes, keys, wide_stages, options[warps])
        ),
    )


@dataclass(frozen=True, slots=True)
class Compiler:
    """Compiles settings for one chip, head size and width of KV elements; needs no GPU.

    Uses `jobs` processes; 1 means this process.
    """

    arch: str
    head_dim: int
    kv_bits: int
    jobs: int = 1
    chip: Chip | None = None
    """None for that of `arch` in `CHIPS`."""

    def reports(self, launches: Sequence[LaunchConfig], *, with_extras: bool) -> list[Report]:
        """The worse report of each plain kernel and, if asked, that with window and soft cap."""
        kv_dtype = torch.bfloat16 if self.kv_bits == 16 else fp8_dtype(self.arch)
        variants = []
        for launch in launches:
            # As in the shipped settings: by the last tile on NVIDIA, by a second launch on AMD.
            merge = not self.arch.startswith("gf")
            plain = Variant(self.arch, self.head_dim, kv_dtype, launch, merge_in_launch=merge)
            variants.append(plain)
            if with_extras:
                variants.append(replace(plain, window=4096, has_soft_cap=True))
        found = self._compile(variants)
        if not with_extras:
            return found
        return [worse(*pair) for pair in zip(found[::2], found[1::2], strict=True)]

    def _compile(self, variants: Sequence[Variant]) -> list[Report]:
        chips = [self.chip or CHIPS[self.arch]] * len(variants)
        if self.jobs == 1 or len(variants) < 2:
            return list(map(report_of, variants, chips))
        with ProcessPoolExecutor(self.jobs, multiprocessing.get_context("spawn")) as pool:
            return list(pool.map(report_of, variants, chips))

    def shortlist(self, grid: Grid, count: int) -> Iterator[Candidate]:
        """Up to `count` settings that compile without a fault, some with each wide tiling.

        Tries every wide tiling alone first, so that those that spill aren't tried with every narrow
        one, then the rest with their narrow tilings, most bytes in flight first.
        """
        smallest = Tiling(16, 16, 1)
        alone = [LaunchConfig(smallest, wide, warps, 1, extra) for wide, warps, extra in grid.wide]
        reports = self.reports(alone, with_extras=False)
        fits = [one for one, report in zip(alone, reports, strict=True) if report.fault is None]
        is_amd = self.arch.startswith("gf")
        narrow = sorted(
            grid.narrow,
            key=lambda each: -each.block_n * steps_ahead(each.num_stages, is_amd=is_amd),
        )
        fits.sort(key=lambda launch: -launch.wide.block_m)
        by_wide = [[replace(launch, narrow=each) for each in narrow] for launch in fits]
        waiting = [one for turn in zip_longest(*by_wide) for one in turn if one is not None]
        found = 0
        while waiting and found < count:
            batch, waiting = waiting[: count - found], waiting[count - found :]
            for launch, report in zip(batch, self.reports(batch, with_extras=True), strict=True):
                at_once = [n for n in grid.programs_per_processor if n <= report.usage.programs]
                if report.fault is None and at_once:
                    found += 1
                    most = replace(launch, programs_per_processor=at_once[-1])
                    wanted = replace(report, wanted_programs=at_once[-1])
                    yield Candidate(most, self.head_dim, self.kv_bits, wanted)


def worse(plain: Report, extras: Report) -> Report:
    """The maximum of both reports for the same settings."""
    one, other = plain.usage, extras.usage
    usage = Usage(
        max(one.registers, other.registers),
        max(one.spill_bytes, other.spill_bytes),
        max(one.shared_bytes, other.shared_bytes),
        min(one.programs, other.programs),
    )
    return replace(plain, usage=usage, fault=plain.fault or extras.fault)


def report_of(variant: Variant, chip: Chip) -> Report:
    """The compiler's report; a refused kernel has a fault."""
    try:
        return compile_variant(variant, chip)
    except (TritonError, RuntimeError) as error:  # LLVM's passes fail with RuntimeError
        fault = f"doesn't compile: {type(error).__name__}: {str(error).splitlines()[0][:80]}"
        wanted = variant.launch.programs_per_processor
        return Report(variant.arch, "attention", Usage(0, 0, 0, 0), wanted, fault)
