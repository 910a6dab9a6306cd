"""Compile every shipped kernel ahead of time, without its chip.

    python -m batchllm_kernels.compile [--arch sm90 ...] [--jobs N] [--json FILE] [--write-limits]

Reports registers, spilled bytes, shared memory, programs per multiprocessor, tensor-core
instructions and main loops of the kernels that lay out a step or merge, and of each entry in the
architectures' settings. Exits with 1 if a kernel spills more than `MAX_SPILL_BYTES`, if fewer
programs fit than its settings say, or if it passes its limits (`compiling/limits.toml`), which
`--write-limits` renews.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import operator
import os
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, replace
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any, Final

import torch
import triton
from triton import knobs
from triton.compiler import ASTSource

from batchllm_kernels.compiling.assembly import Code, disassemble, read_code
from batchllm_kernels.compiling.chips import CHIPS, Chip, programs_at_once
from batchllm_kernels.compiling.limits import LIMITS_FILE, check, read_limits, write_limits
from batchllm_kernels.compiling.report import (
    HEADINGS,
    Report,
    Usage,
    amdgcn_usage,
    ptxas_usage,
    table_line,
)
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
SCHEDULE_REQUESTS: Final = (1024, 4096)
"""Requests of a step for which those are compiled."""


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


def compile_variant(
    variant: Variant, chip: Chip | None = None, *, reads_code: bool = False
) -> Report:
    """Compile the attention kernel, without its chip.

    Args:
        variant: what to compile.
        chip: the target; None for the variant's architecture, which must have settings.
        reads_code: whether the report describes the machine code, which takes half a second.

    Raises:
        triton.CompilationError: the kernel can't be compiled.
    """
    chip = chip or CHIPS[variant.arch]
    threads = variant.launch.num_warps * chip.target.warp_size
    usage, code = _compile(chip, *_source(variant), threads, reads_code)
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
    return Report(variant.arch, name, usage, wanted, fault, code)


def compile_schedule_kernel(arch: str, name: str, requests: int) -> Report:
    """Compile one of the kernels that lay out a step, for steps of a power of two of requests.

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
    threads = 4 * chip.target.warp_size
    return _report(
        arch, f"{name}, {requests} requests", _ast_source(kernel, types, constants), threads
    )


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
    return _report(arch, f"merge, {head_dim}", _ast_source(merge_kernel, types, constants), threads)


def _report(arch: str, name: str, source: tuple[ASTSource, dict[str, Any]], threads: int) -> Report:
    """Of a kernel without settings."""
    usage, code = _compile(CHIPS[arch], *source, threads, reads_code=True)
    fault = f"spills {usage.spill_bytes} bytes" if usage.spill_bytes > MAX_SPILL_BYTES else None
    return Report(arch, name, usage, 1, fault, code)


def _compile(
    chip: Chip, source: ASTSource, options: dict[str, Any], threads: int, reads_code: bool
) -> tuple[Usage, Code | None]:
    said = io.StringIO()
    # A cached kernel has no assembler output.
    with knobs.nvidia.scope(), knobs.compilation.scope(), contextlib.redirect_stdout(said):
        knobs.nvidia.dump_ptxas_log = True
        knobs.compilation.always_compile = True
        compiled = triton.compile(source, target=chip.target, options=options)
    is_cuda = chip.target.backend == "cuda"
    if is_cuda:
        registers, spill_bytes = ptxas_usage(said.getvalue())
    else:
        registers, spill_bytes = amdgcn_usage(compiled.asm["amdgcn"])
    shared = compiled.metadata.shared
    usage = Usage(
        registers, spill_bytes, shared, programs_at_once(chip, registers, shared, threads)
    )
    if not reads_code:
        return usage, None
    assembly = disassemble(compiled.asm["cubin"]) if is_cuda else compiled.asm["amdgcn"]
    return usage, read_code(assembly, is_cuda=is_cuda)


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


def _jobs(arch: str) -> Iterator[partial[Report]]:
    for name in SCHEDULE_KERNELS:
        for requests in SCHEDULE_REQUESTS:
            yield partial(compile_schedule_kernel, arch, name, requests)
    for head_dim in HEAD_DIMS:
        yield partial(compile_merge_kernel, arch, head_dim)
    for variant in shipped_variants(arch):
        yield partial(compile_variant, variant, reads_code=True)


def main(arguments: Sequence[str] | None = None) -> int:
    """Compile and print a table; returns 1 if a kernel must not ship."""
    parser = argparse.ArgumentParser(prog="python -m batchllm_kernels.compile")
    parser.add_argument("--arch", action="append", choices=sorted(ARCHITECTURES))
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="processes at once")
    parser.add_argument("--json", type=Path, help="write the reports there")
    parser.add_argument("--limits", type=Path, default=LIMITS_FILE, help="limits, as TOML")
    parser.add_argument(
        "--write-limits", action="store_true", help="renew the limits of what is compiled"
    )
    options = parser.parse_args(arguments)
    print(HEADINGS)
    jobs = [job for arch in options.arch or ARCHITECTURES for job in _jobs(arch)]
    limits = None if options.write_limits else read_limits(options.limits)
    reports = []
    with ProcessPoolExecutor(options.jobs, mp_context=get_context("spawn")) as pool:
        for report in pool.map(operator.call, jobs):
            if limits is not None:
                report = replace(report, fault=report.fault or check(report, limits))
            reports.append(report)
            print(table_line(report), flush=True)
    if limits is None:
        write_limits(reports, options.limits)
    if options.json:
        options.json.write_text(json.dumps([asdict(report) for report in reports], indent=2))
    return 1 if any(report.fault for report in reports) else 0


if __name__ == "__main__":
    sys.exit(main())
