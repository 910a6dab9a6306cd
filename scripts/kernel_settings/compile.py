"""Compile every shipped kernel ahead of time, without its chip.

    PYTHONPATH=scripts python -m kernel_settings.compile
        [--arch sm90 ...] [--jobs N] [--json FILE] [--write-limits]

Reports registers, spilled bytes, shared memory, programs per multiprocessor, instructions and the
async depth of main loops, of the kernels that lay out a step or merge, and of each entry in the
architectures' settings. Exits with 1 if a kernel spills more than `MAX_SPILL_BYTES`, if fewer
programs fit than its settings say, or if it passes its limits (`limits.toml`), which
`--write-limits` renews.
"""

import argparse
import contextlib
import io
import json
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, field, replace
from multiprocessing import get_context
from pathlib import Path
from typing import Any, Final

import torch
import triton
from triton import knobs
from triton.compiler import ASTSource

from batchllm_kernels.prefix_attention import load_config, schedule
from batchllm_kernels.prefix_attention.batch import HEAD_DIMS, AttentionShape
from batchllm_kernels.prefix_attention.config import ARCHITECTURES, LaunchConfig
from batchllm_kernels.prefix_attention.device.arguments import Constants, Sizes
from batchllm_kernels.prefix_attention.device.attention import prefix_attention_kernel
from batchllm_kernels.prefix_attention.device.online_softmax import merge_kernel
from batchllm_kernels.prefix_attention.launch import TRITON_DTYPES, kernel_constants, kv_format
from kernel_settings.report import (
    CHIPS,
    LIMITS_FILE,
    Chip,
    Report,
    check,
    numbers_of,
    read_limits,
    write_limits,
)

MAX_SPILL_BYTES: Final = 64
"""Bytes of registers that a thread may spill to memory: 16 of up to 255 registers. Assemblers spill
a few around loops, which differ between their versions."""
Q_DTYPE: Final = torch.bfloat16
BLOCK_SIZE: Final = 16
SCHEDULE_KERNELS: Final = ("find_depths", "find_leaders", "measure_groups", "lay_out")
SCHEDULE_REQUESTS: Final = (1024, 4096)
"""Requests of a step for which those are compiled."""
_KERNELS: Final[Mapping[str, Any]] = {
    "attention": prefix_attention_kernel,
    "merge": merge_kernel,
    **{name: getattr(schedule, name) for name in SCHEDULE_KERNELS},
}


@dataclass(frozen=True, slots=True)
class Kernel:
    """A kernel to compile for a chip."""

    arch: str
    name: str
    """In reports and limits: which of `_KERNELS`, then what it is compiled for."""
    constants: Constants | Sizes
    kv_dtype: torch.dtype = Q_DTYPE
    options: Mapping[str, int] = field(default_factory=dict)
    programs: int = 1
    """On a multiprocessor, that the settings want."""


def attention_kernel(
    arch: str, launch: LaunchConfig, *, merge_here: bool, has_extras: bool = False
) -> Kernel:
    """Attention with these settings, plain or with both window and soft cap."""
    kv_dtype = Q_DTYPE if launch.kv_bits == 16 else fp8_dtype(arch)
    constants = kernel_constants(
        launch,
        AttentionShape(32, 8, launch.head_dim, BLOCK_SIZE),
        arch,
        Q_DTYPE,
        kv_dtype,
        window=4096 if has_extras else None,
        has_soft_cap=has_extras,
        merge_here=merge_here,
    )
    name = f"attention, {launch.head_dim}, {str(kv_dtype).removeprefix('torch.')}"
    return Kernel(
        arch,
        name + (", window, soft cap" if has_extras else ""),
        constants,
        kv_dtype,
        {"num_warps": launch.num_warps, **launch.options},
        launch.programs_per_processor,
    )


def schedule_kernel(arch: str, name: str, requests: int) -> Kernel:
    """One of those that lay out a step, for steps of a power of two of requests."""
    sizes = schedule.sizes_of(BLOCK_SIZE, 4, 16, requests)
    return Kernel(arch, f"{name}, {requests} requests", sizes)


def shipped_kernels(arch: str) -> Iterator[Kernel]:
    """Of a chip: the schedule's, then merging, then each of its settings, plain and with extras."""
    config = load_config(arch)
    for name in SCHEDULE_KERNELS:
        for requests in SCHEDULE_REQUESTS:
            yield schedule_kernel(arch, name, requests)
    for head_dim in HEAD_DIMS:
        launch = config.launch_config(head_dim, 16)
        constants = attention_kernel(arch, launch, merge_here=True).constants
        yield Kernel(arch, f"merge, {head_dim}", constants, options={"num_warps": launch.num_warps})
    for launch in config.launch:
        for has_extras in (False, True):
            yield attention_kernel(
                arch, launch, merge_here=config.merge_in_launch, has_extras=has_extras
            )


def fp8_dtype(arch: str) -> torch.dtype:
    """The format of FP8 caches: that of MI300, which vLLM uses there, has another bias."""
    return torch.float8_e4m3fnuz if arch == "gfx942" else torch.float8_e4m3fn


def compile_kernel(kernel: Kernel, chip: Chip | None = None) -> Report:
    """Compile as a launch would, pointers and strides multiples of 16; for another chip if given.

    Raises:
        triton.CompilationError: the kernel can't be compiled.
    """
    chip = chip or CHIPS[kernel.arch]
    function = _KERNELS[kernel.name.partition(",")[0]]
    options = {"num_warps": 4, "num_stages": 1, **kernel.options}
    types = {
        param.name: "constexpr" if param.is_constexpr else _type(param, kernel)
        for param in function.params
    }
    aligned = [
        idx
        for idx, param in enumerate(function.params)
        if types[param.name].startswith("*")
        or (param.name.startswith("stride") and not param.do_not_specialize)
    ]
    source = ASTSource(
        function,
        signature=types,
        constexprs={(len(types) - 1,): kernel.constants},
        attrs={(idx,): [["tt.divisibility", 16]] for idx in aligned},
    )
    log = io.StringIO()
    # A cached kernel has no assembler output.
    with knobs.nvidia.scope(), knobs.compilation.scope(), contextlib.redirect_stdout(log):
        knobs.nvidia.dump_ptxas_log = True
        knobs.compilation.always_compile = True
        compiled = triton.compile(source, target=chip.target, options=options)
    threads = options["num_warps"] * chip.target.warp_size
    numbers, fault = numbers_of(compiled, chip, log.getvalue(), threads), None
    if (shared := numbers["shared_bytes"]) > chip.shared_bytes_per_program:
        fault = f"needs {shared} bytes of {chip.shared_bytes_per_program} shared memory"
    elif numbers["spill_bytes"] > MAX_SPILL_BYTES:
        fault = f"spills {numbers['spill_bytes']} bytes"
    elif (programs := numbers["programs"]) < kernel.programs:
        fault = f"{programs} programs fit at once, the settings want {kernel.programs}"
    return Report(kernel.arch, kernel.name, numbers, kernel.programs, fault)


def _type(param: Any, kernel: Kernel) -> str:
    name: str = param.name
    if name in ("scale", "soft_cap", "v_scale"):
        return "fp32"
    if name in ("k_cache", "v_cache"):
        is_plain = kv_format(kernel.kv_dtype, kernel.arch)[0] == "plain"
        return f"*{TRITON_DTYPES[kernel.kv_dtype].name}" if is_plain else "*u8"
    if name.startswith("stride") or param.do_not_specialize:
        return "i32"
    if name in ("q", "out"):
        return f"*{TRITON_DTYPES[Q_DTYPE].name}"
    return "*fp32" if name.startswith("partial") else "*i32"


def main(arguments: Sequence[str] | None = None) -> int:
    """Compile and print a line for each kernel; returns 1 if one must not ship."""
    parser = argparse.ArgumentParser(prog="python -m kernel_settings.compile")
    add = parser.add_argument
    add("--arch", action="append", choices=sorted(ARCHITECTURES))
    add("--jobs", type=int, default=os.cpu_count(), help="processes at once")
    add("--json", type=Path, help="write the reports there")
    add("--limits", type=Path, default=LIMITS_FILE, help="limits, as TOML")
    add("--write-limits", action="store_true", help="renew the limits of what is compiled")
    options = parser.parse_args(arguments)
    kernels = [kernel for arch in options.arch or ARCHITECTURES for kernel in shipped_kernels(arch)]
    limits = None if options.write_limits else read_limits(options.limits)
    reports = []
    with ProcessPoolExecutor(options.jobs, mp_context=get_context("spawn")) as pool:
        for report in pool.map(compile_kernel, kernels):
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
