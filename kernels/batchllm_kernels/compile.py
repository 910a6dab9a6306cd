"""Compile every shipped kernel ahead of time, for chips that needn't be there.

    python -m batchllm_kernels.compile [--arch sm90 ...] [--json FILE]

For each entry of the architectures' settings: registers, bytes spilled, shared memory, and how
many programs fit a multiprocessor at once. Exits with 1 if an entry doesn't compile, spills more
than `MAX_SPILL_BYTES`, or doesn't fit the chip as often as its settings say.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Final

import torch
import triton
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from batchllm_kernels.prefix_attention import load_config
from batchllm_kernels.prefix_attention.config import ARCHITECTURES, LaunchConfig
from batchllm_kernels.prefix_attention.launch import (
    kernel_constants,
    kv_format,
    triton_dtype,
)
from batchllm_kernels.prefix_attention.triton_kernel import PLAIN, prefix_attention_kernel

MAX_SPILL_BYTES: Final = 0
"""Bytes of registers that a thread may spill to memory."""


@dataclass(frozen=True, slots=True)
class Chip:
    """What a multiprocessor (compute unit) has, from the vendors' architecture manuals."""

    target: GPUTarget
    shared_bytes: int
    """Shared memory (LDS) in all."""
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
"""What CUDA keeps of each program's shared memory."""


@dataclass(frozen=True, slots=True)
class Variant:
    """One kernel to compile."""

    arch: str
    head_dim: int
    kv_dtype: torch.dtype
    launch: LaunchConfig
    q_dtype: torch.dtype = torch.bfloat16
    heads_per_kv: int = 4
    num_kv_heads: int = 8
    block_size: int = 16
    window: int | None = None
    has_soft_cap: bool = False


@dataclass(frozen=True, slots=True)
class Report:
    """What the compiler made of a variant."""

    arch: str
    head_dim: int
    kv_dtype: str
    extras: str
    """What it has beside plain causal attention."""
    registers: int
    """Of a thread (lane)."""
    spill_bytes: int
    """Of a thread, written or read, whichever is more."""
    shared_bytes: int
    programs: int
    """That fit a multiprocessor at once."""
    wanted_programs: int
    fault: str | None
    """Why this entry must not ship."""


def shipped_variants(arch: str) -> Iterator[Variant]:
    """Each entry of an architecture's settings: plain, and with window and soft cap at once."""
    for (head_dim, kv_bits), launch in load_config(arch).launch.items():
        kv_dtype = torch.bfloat16 if kv_bits == 16 else fp8_dtype(arch)
        plain = Variant(arch, head_dim, kv_dtype, launch)
        yield plain
        yield replace(plain, window=4096, has_soft_cap=True)


def fp8_dtype(arch: str) -> torch.dtype:
    """The format of FP8 caches: MI300's has another bias, and vLLM stores keys in that."""
    return torch.float8_e4m3fnuz if arch == "gfx942" else torch.float8_e4m3fn


def compile_variant(variant: Variant, chip: Chip | None = None) -> Report:
    """Compile for a chip that needn't be there, and read what the compiler says.

    Args:
        variant: the kernel.
        chip: what to compile for; None: the variant's architecture, which settings ship for.

    Raises:
        triton.CompilationError: the kernel can't be compiled.
    """
    chip = chip or CHIPS[variant.arch]
    source, options = _source(variant)
    said = io.StringIO()
    # A cached kernel would come without the assembler's word on it.
    with knobs.nvidia.scope(), knobs.compilation.scope(), contextlib.redirect_stdout(said):
        knobs.nvidia.dump_ptxas_log = True
        knobs.compilation.always_compile = True
        compiled = triton.compile(source, target=chip.target, options=options)
    if chip.target.backend == "cuda":
        registers, spill_bytes = _ptxas_usage(said.getvalue())
    else:
        registers, spill_bytes = _amdgcn_usage(compiled.asm["amdgcn"])
    threads = variant.launch.num_warps * chip.target.warp_size
    shared = compiled.metadata.shared
    programs = _programs_at_once(chip, registers, shared, threads)
    wanted = variant.launch.programs_per_processor
    fault = None
    if shared > chip.shared_bytes_per_program:
        fault = f"{shared} bytes of shared memory, {chip.shared_bytes_per_program} there are"
    elif spill_bytes > MAX_SPILL_BYTES:
        fault = f"spills {spill_bytes} bytes"
    elif programs < wanted:
        fault = f"{programs} programs fit at once, the settings want {wanted}"
    return Report(
        variant.arch,
        variant.head_dim,
        str(variant.kv_dtype).removeprefix("torch."),
        "window, soft cap" if variant.window else "",
        registers,
        spill_bytes,
        shared,
        programs,
        wanted,
        fault,
    )


def _source(variant: Variant) -> tuple[ASTSource, dict[str, Any]]:
    reading = kv_format(variant.kv_dtype, variant.arch)
    constants = kernel_constants(
        variant.launch,
        head_dim=variant.head_dim,
        heads_per_kv=variant.heads_per_kv,
        num_kv_heads=variant.num_kv_heads,
        block_size=variant.block_size,
        dot_dtype=triton_dtype(variant.q_dtype),
        kv_code=reading.code,
        window=variant.window,
        has_soft_cap=variant.has_soft_cap,
    )
    q = "*" + triton_dtype(variant.q_dtype).name
    kv = "*u8" if reading.code != PLAIN else "*" + triton_dtype(variant.kv_dtype).name
    types = {"q": q, "out": q, "k_cache": kv, "v_cache": kv}
    types |= {"partial_out": "*fp32", "partial_lse": "*fp32"}
    types |= dict.fromkeys(("scale", "soft_cap", "v_scale"), "fp32")
    names = prefix_attention_kernel.arg_names
    signature = {
        name: "constexpr"
        if name in constants
        else types.get(name, "i32" if name.startswith("stride") else "*i32")
        for name in names
    }
    at = {name: (idx,) for idx, name in enumerate(names)}
    aligned = [name for name, kind in signature.items() if kind.startswith("*")]
    aligned += [name for name in names if name.startswith("stride") and name != "stride_table"]
    return (
        ASTSource(
            prefix_attention_kernel,
            signature=signature,
            constexprs={at[name]: value for name, value in constants.items()},
            attrs={at[name]: [["tt.divisibility", 16]] for name in aligned},
        ),
        {"num_warps": variant.launch.num_warps, "num_stages": 1, **variant.launch.options},
    )


def _ptxas_usage(log: str) -> tuple[int, int]:
    """(registers, bytes spilled) from what the assembler said."""
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
    by_shared = chip.shared_bytes // (shared + (_RESERVED_SHARED_BYTES if is_cuda else 0))
    return min(by_registers, by_shared, chip.max_threads // threads)


def main(arguments: Sequence[str] | None = None) -> int:
    """Compile, print a table, and say whether everything may ship."""
    parser = argparse.ArgumentParser(prog="python -m batchllm_kernels.compile")
    parser.add_argument("--arch", action="append", choices=sorted(ARCHITECTURES))
    parser.add_argument("--json", type=Path, help="write the reports there")
    options = parser.parse_args(arguments)
    print("arch    head_dim  KV               registers  spilled  shared  programs (wanted)  with")
    reports = []
    for arch in options.arch or ARCHITECTURES:
        for variant in shipped_variants(arch):
            report = compile_variant(variant)
            reports.append(report)
            print(
                f"{report.arch:<7} {report.head_dim:>8}  {report.kv_dtype:<15} "
                f"{report.registers:>10} {report.spill_bytes:>8} {report.shared_bytes:>7} "
                f"{report.programs:>9} ({report.wanted_programs})       {report.extras}"
                + (f"  FAULT: {report.fault}" if report.fault else ""),
                flush=True,
            )
    if options.json:
        options.json.write_text(json.dumps([asdict(report) for report in reports], indent=2))
    return 1 if any(report.fault for report in reports) else 0


if __name__ == "__main__":
    sys.exit(main())
