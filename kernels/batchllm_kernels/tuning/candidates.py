"""Candidates of launch settings for one head size, ranked by the compiler's reports."""

from __future__ import annotations

import multiprocessing
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Executor, ProcessPoolExecutor
from dataclasses import replace
from functools import partial
from itertools import product, zip_longest
from typing import Final

from triton.errors import TritonError

from batchllm_kernels.compile import Variant, compile_variant
from batchllm_kernels.compiling.chips import Chip
from batchllm_kernels.compiling.report import Report
from batchllm_kernels.prefix_attention.config import LaunchConfig, Tiling

_STEP_BYTES: Final = (4096, 16384)
"""Bytes of a narrow step's keys of one head: fewer are overhead, more don't fit the registers."""
_MOST_PROGRAMS: Final = 4


def grid(
    head_dim: int, kv_bits: int, *, is_amd: bool
) -> tuple[list[Tiling], list[tuple[Tiling, int, Mapping[str, int]]]]:
    """Narrow tilings, and wide ones with warps and options of a vendor's compiler.

    To try more, add to the tuples here.
    """
    row_bytes = 1 << (head_dim * kv_bits // 8 - 1).bit_length()
    least, most = _STEP_BYTES
    steps = [n for n in (16, 32, 64, 128) if least <= n * row_bytes <= most]
    options: dict[int, tuple[Mapping[str, int], ...]]
    if is_amd:
        stages, wide_stages = [2, 3], [2]
        nonkdim = {"waves_per_eu": 2, "matrix_instr_nonkdim": 16}
        options = {4: ({"waves_per_eu": 2}, nonkdim), 8: (nonkdim,)}
    else:
        stages, wide_stages = [3, 4], [3, 4]
        # Register limits for 3 or 4 programs at once; with 8 warps, 2 would spill.
        options = {4: ({}, {"maxnreg": 168}, {"maxnreg": 128}), 8: ({},)}
    rows = {4: (32, 64, 128) if is_amd else (32, 64), 8: (64, 128)}
    keys = (16, 32) if head_dim == 256 else (32, 64)
    return [Tiling(16, n, count) for n, count in product(steps, stages)], [
        (Tiling(m, n, count), warps, extra)
        for warps, sizes in rows.items()
        for m, n, count, extra in product(sizes, keys, wide_stages, options[warps])
    ]


def steps_ahead(num_stages: int, *, is_amd: bool) -> int:
    """Steps whose keys and values are prefetched while one is computed.

    Seen in the async waits of compiled kernels (Triton 3.6 and 3.9): on NVIDIA the copies of one
    step less are outstanding when a step begins than on AMD, which waits for its own in registers.
    """
    return max(0, num_stages - (1 if is_amd else 2))


def shortlist(
    arch: str, chip: Chip, head_dim: int, kv_bits: int, *, count: int, jobs: int
) -> list[LaunchConfig]:
    """Up to `count` settings that compile without a fault, the most promising first.

    Those run two programs at once, have a large wide tile, and prefetch many bytes. Tries every
    wide tiling alone first, so that those that spill aren't tried with every narrow one.

    Args:
        arch: name of the architecture, in reports.
        chip: that the settings must fit.
        head_dim: elements of a head.
        kv_bits: bits of an element of the cache.
        count: of settings to find.
        jobs: processes that compile.
    """
    is_amd = chip.target.backend == "hip"
    narrow, wide = grid(head_dim, kv_bits, is_amd=is_amd)

    def bytes_ahead(launch: LaunchConfig) -> int:
        ahead = steps_ahead(launch.narrow.num_stages, is_amd=is_amd)
        return launch.programs_per_processor * ahead * launch.narrow.block_n

    def rank(launch: LaunchConfig) -> tuple[bool, int, int]:
        return launch.programs_per_processor >= 2, launch.wide.block_m, bytes_ahead(launch)

    with ProcessPoolExecutor(jobs, multiprocessing.get_context("spawn")) as pool:
        fitting = partial(_fitting, pool, arch, chip)
        alone = [
            LaunchConfig(head_dim, kv_bits, Tiling(16, 16, 1), tiling, warps, 1, options)
            for tiling, warps, options in wide
        ]
        by_wide = [
            sorted(
                (replace(launch, narrow=tiling, programs_per_processor=1) for tiling in narrow),
                key=bytes_ahead,
                reverse=True,
            )
            for launch in sorted(fitting(alone), key=lambda launch: -launch.wide.block_m)
        ]
        waiting = [launch for turn in zip_longest(*by_wide) for launch in turn if launch]
        fits: list[LaunchConfig] = []
        while waiting and len(fits) < count:
            missing = count - len(fits)
            fits += fitting(waiting[:missing])
            waiting = waiting[missing:]
    return sorted(fits, key=rank, reverse=True)


def _fitting(
    pool: Executor, arch: str, chip: Chip, launches: Sequence[LaunchConfig]
) -> Iterator[LaunchConfig]:
    """Those that compile without a fault, plain and with extras, for most programs at once."""
    # As in the shipped settings: by the last tile on NVIDIA, by a second launch on AMD.
    merges = chip.target.backend == "cuda"
    plain = [Variant(arch, launch, merge_in_launch=merges) for launch in launches]
    variants = [kind for variant in plain for kind in (variant, variant.with_extras())]
    reports = list(pool.map(partial(_report_of, chip=chip), variants))
    for launch, both in zip(launches, zip(reports[::2], reports[1::2], strict=True), strict=True):
        if not any(report.fault for report in both):
            programs = min(report.numbers["programs"] for report in both)
            yield replace(launch, programs_per_processor=min(programs, _MOST_PROGRAMS))


def _report_of(variant: Variant, chip: Chip) -> Report:
    """The compiler's report; a refused kernel has a fault."""
    try:
        return compile_variant(variant, chip)
    except (TritonError, RuntimeError) as error:  # LLVM's passes fail with RuntimeError
        return Report(variant.arch, "attention", {}, fault=f"doesn't compile: {error}")
