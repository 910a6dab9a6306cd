"""Compile every shipped kernel ahead of time, without its chip.

    python -m batchllm_kernels.compile [--arch sm90 ...] [--jobs N] [--json FILE]

Reports registers, spilled bytes, shared memory and programs per multiprocessor of the kernels that
lay out a step or merge, and of each entry in the architectures' settings. Exits with 1 if a kernel
spills more than `MAX_SPILL_BYTES`, or if fewer programs fit than its settings say.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, replace
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any, Final

import torch
import triton
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from batchllm_kernels.prefix_attention import load_config, schedule
from batchllm_kernels.prefix_attention.batch import HEAD_DIMS, AttentionShape
from batchllm_kernels.prefix_attention.config import ARCHITECTURES, LaunchConfig
from batchllm_kernels.prefix_attention.device.attention import prefix_attention_kernel
from batchllm_kernels.prefix_attention.device.merging import merge_kernel
from batchllm_kernels.prefix_attention.grouping import MAX_GATED_DEGREE
from batchllm_kernels.prefix_attention.launch import (
    dot_dtype,
    kernel_constants,
    kv_format,
    merge_constants,
    triton_dtype,
)

MAX_SPILL_BYTES: Final = 64
"""Bytes of registers that a thread may spill to memory: 16 of up to 255 registers. Assemblers spill
a few around loops, which differ between their versions."""
Q_DTYPE: Final = torch.bfloat16
BLOCK_SIZE: Final = 16
SCHEDULE_KERNELS: Final = ("find_depths", "find_leaders", "measure_groups", "lay_out")


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


@dataclass(frozen=True, slots=True)
class Variant:
    """One kernel to compile."""

    arch: str
    head_dim: int
    kv_dtype: torch.dtype
    launch: LaunchConfig
    window: int | None = None
    has_soft_cap: bool = False
    merge_in_launch: bool = True


@dataclass(frozen=True, slots=True)
class Usage:
    """Resources of a compiled kernel."""

    registers: int
    """Of a thread (lane)."""
    spill_bytes: int
    """Of a thread: the larger of bytes written and read."""
    shared_bytes: int
    programs: int
    """Programs that fit a multiprocessor at once."""


@dataclass(frozen=True, slots=True)
class Report:
    """The result of compiling a kernel."""

    arch: str
    kernel: str
    usage: Usage
    wanted_programs: int
    """Programs on a multiprocessor, by the settings."""
    fault: str | None
    """Why this must not ship."""


def shipped_variants(arch: str) -> Iterator[Variant]:
    """Each entry of an architecture's settings, plain and with both window and soft cap."""
    config = load_config(arch)
    for (head_dim, kv_bits), launch in config.launch.items():
        kv_dtype = torch.bfloat16 if kv_bits == 16 else fp8_dtype(arch)
        merge = config.merge_in_launch
        plain = Variant(arch, head_dim, kv_dtype, launch, merge_in_launch=merge)
        yield plain
        yield replace(plain, window=4096, has_soft_cap=True)


def fp8_dtype(arch: str) -> torch.dtype:
    """The format of FP8 caches: that of MI300, which vLLM uses there, has another bias."""
    return torch.float8_e4m3fnuz if arch == "gfx942" else torch.float8_e4m3fn


def compile_variant(variant: Variant, chip: Chip | None = None) -> Report:
    """Compile the attention kernel, without its chip.

    Args:
        chip: the target; None for the variant's architecture, which must have settings.

    Raises:
        triton.CompilationError: the kernel can't be compiled.
    """
    chip = chip or CHIPS[variant.arch]
    threads = variant.launch.num_warps * chip.target.warp_size
    usage = _compile(chip, *_source(variant), threads)
    wanted = variant.launch.programs_per_processor
    fault = None
    if usage.shared_bytes > chip.shared_bytes_per_program:
        fault = f"needs {usage.shared_bytes} bytes of {chip.shared_bytes_per_program} shared memory"
    elif usage.spill_bytes > MAX_SPILL_BYTES:
        fault = f"spills {usage.spill_bytes} bytes"
    elif usage.programs < wanted:
        fault = f"{usage.programs} programs fit at once, the settings want {wanted}"
    kv_dtype = str(variant.kv_dtype).removeprefix("torch.")
    extras = ", window, soft cap" if variant.window else ""
    name = f"attention, {variant.head_dim}, {kv_dtype}{extras}"
    return Report(variant.arch, name, usage, wanted, fault)


def compile_schedule_kernel(arch: str, name: str, requests: int = 1024) -> Report:
    """Compile one of the kernels that lay out a step, for a power of two of requests.

    Raises:
        triton.CompilationError: the kernel can't be compiled.
    """
    chip = CHIPS[arch]
    constants = {
        "BLOCK_SIZE": BLOCK_SIZE,
        "REQUESTS": requests,
        "CHUNK": min(requests, schedule.CHUNK),
        "BLOCKS": 128,
        "MAX_DEGREE": MAX_GATED_DEGREE,
        "PIECE_ALIGN": schedule.PIECE_ALIGN,
        "NARROW_TOKENS": 4,
        "WIDE_TOKENS": 16,
    }
    scalars = {"table_stride", "num_requests", "max_member_tokens", "num_probes"}
    scalars |= {"min_piece_tokens", "target_pieces", "max_pieces", "first_own_counter"}
    kernel = getattr(schedule, name)
    types = {
        arg: "constexpr" if arg in constants else "i32" if arg in scalars else "*i32"
        for arg in kernel.arg_names
    }
    usage = _compile(chip, *_ast_source(kernel, types, constants), 4 * chip.target.warp_size)
    fault = f"spills {usage.spill_bytes} bytes" if usage.spill_bytes > MAX_SPILL_BYTES else None
    return Report(arch, f"{name}, {requests} requests", usage, 1, fault)


def compile_merge_kernel(arch: str, head_dim: int) -> Report:
    """Compile the kernel that merges if the attention kernel doesn't.

    Raises:
        triton.CompilationError: the kernel can't be compiled.
    """
    chip = CHIPS[arch]
    launch = load_config(arch).launch_config(head_dim, 16)
    variant = Variant(arch, head_dim, torch.bfloat16, launch)
    constants = merge_constants(_constants(variant))
    types = _types(variant, merge_kernel.arg_names) | dict.fromkeys(constants, "constexpr")
    threads = launch.num_warps * chip.target.warp_size
    usage = _compile(chip, *_ast_source(merge_kernel, types, constants), threads)
    fault = f"spills {usage.spill_bytes} bytes" if usage.spill_bytes > MAX_SPILL_BYTES else None
    return Report(arch, f"merge, {head_dim}", usage, 1, fault)


def _compile(chip: Chip, source: ASTSource, options: dict[str, Any], threads: int) -> Usage:
    said = io.StringIO()
    # A cached kernel has no assembler output.
    with knobs.nvidia.scope(), knobs.compilation.scope(), contextlib.redirect_stdout(said):
        knobs.nvidia.dump_ptxas_log = True
        knobs.compilation.always_compile = True
        compiled = triton.compile(source, target=chip.target, options=options)
    if chip.target.backend == "cuda":
        registers, spill_bytes = _ptxas_usage(said.getvalue())
    else:
        registers, spill_bytes = _amdgcn_usage(compiled.asm["amdgcn"])
    shared = compiled.metadata.shared
    programs = _programs_at_once(chip, registers, shared, threads)
    return Usage(registers, spill_bytes, shared, programs)


def _source(variant: Variant) -> tuple[ASTSource, dict[str, Any]]:
    constants = _constants(variant)
    types = _types(variant, prefix_attention_kernel.arg_names)
    types |= dict.fromkeys(constants, "constexpr")
    source, options = _ast_source(prefix_attention_kernel, types, constants)
    return source, {**options, "num_warps": variant.launch.num_warps, **variant.launch.options}


def _constants(variant: Variant) -> dict[str, Any]:
    return kernel_constants(
        variant.launch,
        AttentionShape(
            num_q_heads=32, num_kv_heads=8, head_dim=variant.head_dim, block_size=BLOCK_SIZE
        ),
        dot_dtype=dot_dtype(Q_DTYPE, variant.kv_dtype, interpreted=False),
        kv_code=kv_format(variant.kv_dtype, variant.arch).code,
        window=variant.window,
        has_soft_cap=variant.has_soft_cap,
        merge_here=variant.merge_in_launch,
    )


def _types(variant: Variant, names: Sequence[str]) -> dict[str, str]:
    q = "*" + triton_dtype(Q_DTYPE).name
    is_read_as_bits = kv_format(variant.kv_dtype, variant.arch).as_bits
    kv = "*u8" if is_read_as_bits else "*" + triton_dtype(variant.kv_dtype).name
    known = {"q": q, "out": q, "k_cache": kv, "v_cache": kv}
    known |= {"partial_out": "*fp32", "partial_lse": "*fp32"}
    known |= dict.fromkeys(("scale", "soft_cap", "v_scale"), "fp32")
    return {name: known.get(name, "i32" if name.startswith("stride") else "*i32") for name in names}


def _ast_source(
    kernel: Any, types: dict[str, str], constants: dict[str, Any]
) -> tuple[ASTSource, dict[str, Any]]:
    """A kernel as a launch would compile it: pointers and strides are multiples of 16."""
    at = {name: (idx,) for idx, name in enumerate(kernel.arg_names)}
    aligned = [
        name
        for name, kind in types.items()
        if kind.startswith("*") or (name.startswith("stride") and name != "stride_table")
    ]
    source = ASTSource(
        kernel,
        signature=types,
        constexprs={at[name]: value for name, value in constants.items() if name in at},
        attrs={at[name]: [["tt.divisibility", 16]] for name in aligned},
    )
    return source, {"num_stages": 1}


def _ptxas_usage(log: str) -> tuple[int, int]:
    """(registers, bytes spilled) from the assembler's output."""
    spills = [int(count) for count in re.findall(r"(\d+) bytes spill", log)]
    return int(re.findall(r"Used (\d+) registers", log)[0]), max(spills)


def _amdgcn_usage(assembly: str) -> tuple[int, int]:
    def value(key: str) -> int:
        return int(re.findall(rf"\.{key}:\s+(\d+)", assembly)[0])

    return value("vgpr_count"), 4 * value("vgpr_spill_count")


def _programs_at_once(chip: Chip, registers: int, shared: int, threads: int) -> int:
    is_cuda = chip.target.backend == "cuda"
    granule = 8
    registers = -(-registers // granule) * granule
    by_registers = chip.registers // (registers * threads)
    by_shared = chip.shared_bytes // max(1, shared + (_RESERVED_SHARED_BYTES if is_cuda else 0))
    return min(by_registers, by_shared, chip.max_threads // threads)


def _jobs(arch: str) -> Iterator[partial[Report]]:
    for name in SCHEDULE_KERNELS:
        for requests in (1024, 4096):
            yield partial(compile_schedule_kernel, arch, name, requests)
    for head_dim in HEAD_DIMS:
        yield partial(compile_merge_kernel, arch, head_dim)
    for variant in shipped_variants(arch):
        yield partial(compile_variant, variant)


def _run(job: partial[Report]) -> Report:
    return job()


def _line(report: Report) -> str:
    usage = report.usage
    return (
        f"{report.arch:<7} {usage.registers:>9} {usage.spill_bytes:>8} {usage.shared_bytes:>7} "
        f"{usage.programs:>9} ({report.wanted_programs})       {report.kernel}"
        + (f"  FAULT: {report.fault}" if report.fault else "")
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Compile and print a table; returns 1 if a kernel must not ship."""
    parser = argparse.ArgumentParser(prog="python -m batchllm_kernels.compile")
    parser.add_argument("--arch", action="append", choices=sorted(ARCHITECTURES))
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="processes at once")
    parser.add_argument("--json", type=Path, help="write the reports there")
    options = parser.parse_args(arguments)
    print("arch    registers  spilled  shared  programs (wanted)  kernel")
    jobs = [job for arch in options.arch or ARCHITECTURES for job in _jobs(arch)]
    reports = []
    with ProcessPoolExecutor(options.jobs, mp_context=get_context("spawn")) as pool:
        for report in pool.map(_run, jobs):
            reports.append(report)
            print(_line(report), flush=True)
    if options.json:
        options.json.write_text(json.dumps([asdict(report) for report in reports], indent=2))
    return 1 if any(report.fault for report in reports) else 0


if __name__ == "__main__":
    sys.exit(main())
