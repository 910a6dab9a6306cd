"""Compile every shipped kernel ahead of time, without its chip.

    python -m batchllm_kernels.compile [--arch sm90 ...] [--jobs N] [--json FILE] [--write-limits]

Reports registers, spilled bytes, shared memory, programs per multiprocessor, instructions and the
async depth of main loops, of the kernels that lay out a step or merge, and of each entry in the
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
from triton.compiler import ASTSource

from batchllm_kernels.compiling.chips import CHIPS, Chip
from batchllm_kernels.compiling.limits import LIMITS_FILE, check, read_limits, write_limits
from batchllm_kernels.compiling.report import Report, numbers_of
from batchllm_kernels.prefix_attention import load_config, schedule
from batchllm_kernels.prefix_attention.batch import HEAD_DIMS, AttentionShape
from batchllm_kernels.prefix_attention.config import ARCHITECTURES, LaunchConfig
from batchllm_kernels.prefix_attention.device.arguments import PLAIN, Constants, Sizes
from batchllm_kernels.prefix_attention.device.attention import prefix_attention_kernel
from batchllm_kernels.prefix_attention.device.merging import merge_kernel
from batchllm_kernels.prefix_attention.grouping import MAX_GATED_DEGREE
from batchllm_kernels.prefix_attention.launch import (
    dot_dtype,
    kernel_constants,
    kv_format,
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
    """One attention kernel to compile."""

    arch: str
    launch: LaunchConfig
    window: int | None = None
    has_soft_cap: bool = False
    merge_in_launch: bool = True

    @property
    def kv_dtype(self) -> torch.dtype:
        return Q_DTYPE if self.launch.kv_bits == 16 else fp8_dtype(self.arch)

    @property
    def constants(self) -> Constants:
        shape = AttentionShape(32, 8, self.launch.head_dim, BLOCK_SIZE)
        return kernel_constants(
            self.launch,
            shape,
            dot_dtype=dot_dtype(Q_DTYPE, self.kv_dtype, interpreted=False),
            kv_format=kv_format(self.kv_dtype, self.arch)[0],
            window=self.window,
            has_soft_cap=self.has_soft_cap,
            merge_here=self.merge_in_launch,
        )

    def with_extras(self) -> Variant:
        """The same with both window and soft cap."""
        return replace(self, window=4096, has_soft_cap=True)


def shipped_variants(arch: str) -> Iterator[Variant]:
    """Each entry of an architecture's settings, plain and with extras."""
    config = load_config(arch)
    for launch in config.launch:
        plain = Variant(arch, launch, merge_in_launch=config.merge_in_launch)
        yield from (plain, plain.with_extras())


def fp8_dtype(arch: str) -> torch.dtype:
    """The format of FP8 caches: that of MI300, which vLLM uses there, has another bias."""
    return torch.float8_e4m3fnuz if arch == "gfx942" else torch.float8_e4m3fn


def compile_variant(variant: Variant, chip: Chip | None = None) -> Report:
    """Compile the attention kernel for its architecture, or for another chip.

    Raises:
        triton.CompilationError: the kernel can't be compiled.
    """
    launch, kv_dtype = variant.launch, str(variant.kv_dtype).removeprefix("torch.")
    extras = ", window, soft cap" if variant.window else ""
    return _compile(
        variant.arch,
        f"attention, {launch.head_dim}, {kv_dtype}{extras}",
        prefix_attention_kernel,
        variant.constants,
        kv_dtype=variant.kv_dtype,
        options={"num_warps": launch.num_warps, **launch.options},
        wanted=launch.programs_per_processor,
        chip=chip,
    )


def compile_schedule_kernel(arch: str, name: str, requests: int) -> Report:
    """Compile one of the kernels that lay out a step, for steps of a power of two of requests.

    Raises:
        triton.CompilationError: the kernel can't be compiled.
    """
    sizes = Sizes(BLOCK_SIZE, 4, 16, MAX_GATED_DEGREE, requests)
    sizes = sizes._replace(chunk=min(requests, sizes.chunk))
    return _compile(arch, f"{name}, {requests} requests", getattr(schedule, name), sizes)


def compile_merge_kernel(arch: str, head_dim: int) -> Report:
    """Compile the kernel that merges if the attention kernel doesn't.

    Raises:
        triton.CompilationError: the kernel can't be compiled.
    """
    launch = load_config(arch).launch_config(head_dim, 16)
    constants, options = Variant(arch, launch).constants, {"num_warps": launch.num_warps}
    return _compile(arch, f"merge, {head_dim}", merge_kernel, constants, options=options)


def _compile(
    arch: str,
    name: str,
    kernel: Any,
    constants: Constants | Sizes,
    *,
    kv_dtype: torch.dtype = Q_DTYPE,
    options: Mapping[str, int] | None = None,
    wanted: int = 1,
    chip: Chip | None = None,
) -> Report:
    """Compile a kernel as a launch would: pointers and strides are multiples of 16."""
    chip, options = chip or CHIPS[arch], {"num_warps": 4, "num_stages": 1, **(options or {})}
    types = {
        param.name: "constexpr" if param.is_constexpr else _type(param, arch, kv_dtype)
        for param in kernel.params
    }
    at = {name: (idx,) for idx, name in enumerate(types)}
    aligned = [
        param.name
        for param in kernel.params
        if types[param.name].startswith("*")
        or (param.name.startswith("stride") and not param.do_not_specialize)
    ]
    source = ASTSource(
        kernel,
        signature=types,
        constexprs={(len(types) - 1,): constants},
        attrs={at[name]: [["tt.divisibility", 16]] for name in aligned},
    )
    log = io.StringIO()
    # A cached kernel has no assembler output.
    with knobs.nvidia.scope(), knobs.compilation.scope(), contextlib.redirect_stdout(log):
        knobs.nvidia.dump_ptxas_log = True
        knobs.compilation.always_compile = True
        compiled = triton.compile(source, target=chip.target, options=dict(options))
    threads = options["num_warps"] * chip.target.warp_size
    numbers, fault = numbers_of(compiled, chip, log.getvalue(), threads), None
    if (shared := numbers["shared_bytes"]) > chip.shared_bytes_per_program:
        fault = f"needs {shared} bytes of {chip.shared_bytes_per_program} shared memory"
    elif numbers["spill_bytes"] > MAX_SPILL_BYTES:
        fault = f"spills {numbers['spill_bytes']} bytes"
    elif numbers["programs"] < wanted:
        fault = f"{numbers['programs']} programs fit at once, the settings want {wanted}"
    return Report(arch, name, numbers, wanted, fault)


def _type(param: Any, arch: str, kv_dtype: torch.dtype) -> str:
    name: str = param.name
    if name in ("scale", "soft_cap", "v_scale"):
        return "fp32"
    if name in ("k_cache", "v_cache"):
        is_plain = kv_format(kv_dtype, arch)[0] == PLAIN
        return f"*{triton_dtype(kv_dtype).name}" if is_plain else "*u8"
    if name.startswith("stride") or param.do_not_specialize:
        return "i32"
    if name in ("q", "out"):
        return f"*{triton_dtype(Q_DTYPE).name}"
    return "*fp32" if name.startswith("partial") else "*i32"


def _jobs(arch: str) -> Iterator[partial[Report]]:
    for name in SCHEDULE_KERNELS:
        for requests in SCHEDULE_REQUESTS:
            yield partial(compile_schedule_kernel, arch, name, requests)
    for head_dim in HEAD_DIMS:
        yield partial(compile_merge_kernel, arch, head_dim)
    for variant in shipped_variants(arch):
        yield partial(compile_variant, variant)


def main(arguments: Sequence[str] | None = None) -> int:
    """Compile and print a line for each kernel; returns 1 if one must not ship."""
    parser = argparse.ArgumentParser(prog="python -m batchllm_kernels.compile")
    parser.add_argument("--arch", action="append", choices=sorted(ARCHITECTURES))
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="processes at once")
    parser.add_argument("--json", type=Path, help="write the reports there")
    parser.add_argument("--limits", type=Path, default=LIMITS_FILE, help="limits, as TOML")
    parser.add_argument(
        "--write-limits", action="store_true", help="renew the limits of what is compiled"
    )
    options = parser.parse_args(arguments)
    jobs = [job for arch in options.arch or ARCHITECTURES for job in _jobs(arch)]
    limits = None if options.write_limits else read_limits(options.limits)
    reports = []
    with ProcessPoolExecutor(options.jobs, mp_context=get_context("spawn")) as pool:
        for report in pool.map(operator.call, jobs):
            if limits is not None:
                report = replace(report, fault=report.fault or check(report, limits))
            reports.append(report)
            print(report, flush=True)
    if limits is None:
        write_limits(reports, options.limits)
    if options.json:
        options.json.write_text(json.dumps([asdict(report) for report in reports], indent=2))
    return 1 if any(report.fault for report in reports) else 0


if __name__ == "__main__":
    sys.exit(main())
