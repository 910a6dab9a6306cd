"""What a compiled kernel takes of a chip, what its machine code does, and limits that no change may
pass unnoticed."""

import json
import re
import subprocess
import tempfile
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import triton
from triton import knobs
from triton.backends.compiler import GPUTarget

LIMITS_FILE: Final = Path(__file__).with_name("limits.toml")
_HEADER: Final = """\
# Limits of each kernel, written by `python -m kernel_settings.compile --write-limits` with Triton
# {version}. Most: registers and spill_bytes of a thread, shared_bytes of a program, instructions.
# Least: programs on a multiprocessor, tensor_core instructions, async_depth of a main loop. As
# measured, but registers up to the next multiple of 8, and a twentieth more instructions.
"""
_MOST: Final = ("registers", "spill_bytes", "shared_bytes", "instructions")
_INSTRUCTIONS_SLACK: Final = 20
"""The part of a kernel's instructions that may come on top."""

Limits = Mapping[str, int]
"""A kernel's limits by the name in `Report.numbers`."""
AllLimits = Mapping[str, Mapping[str, Limits]]
"""By chip and kernel."""
_INSTRUCTION: Final = re.compile(
    r"^(?:\s*/\*[0-9a-f]+\*/\s+[@A-Z]|\t[a-z]\w*(?: |$))", re.MULTILINE
)
"""In SASS, behind an address; in amdgcn, indented."""
_TENSOR_CORE: Final = re.compile(r"\b(?:HG?MMA\.|v_(?:smfmac|mfma)_)")
_LOOP: Final = re.compile(r"^(?=( *)(?:%\S+ = )?scf\.for .*\n((?:\1 .*\n)+)\1\})", re.MULTILINE)
_DOT: Final = re.compile(r"(?:tt\.dot|warp_group_dot) ")
_WAIT: Final = re.compile(r"ttg\.async_wait .*\{num = (\d+)")


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


def in_granules(registers: int) -> int:
    """Registers that a thread gets: chips give them in eights."""
    return -(-registers // 8) * 8


def programs_at_once(chip: Chip, registers: int, shared: int, threads: int) -> int:
    """Programs that fit at once, by registers of a thread, shared bytes and threads of each."""
    reserved = 1024 if chip.target.backend == "cuda" else 0  # CUDA's part of each program's
    by_registers = chip.registers // (in_granules(registers) * threads)
    by_shared = chip.shared_bytes // max(1, shared + reserved)
    return min(by_registers, by_shared, chip.max_threads // threads)


@dataclass(frozen=True, slots=True)
class Report:
    """The result of compiling a kernel."""

    arch: str
    kernel: str
    numbers: Mapping[str, int]
    """By name: of a thread (lane), `registers` and `spill_bytes`, the larger of those written and
    read; `shared_bytes` of a program; `programs` that fit a multiprocessor at once; `instructions`
    of the machine code, and the `tensor_core` instructions (HMMA, HGMMA, MFMA) among them;
    `async_depth_LOOP` of each main loop that waits for asynchronous copies."""
    wanted_programs: int = 1
    """Programs on a multiprocessor, by the settings."""
    fault: str | None = None
    """Why this must not ship."""

    def __str__(self) -> str:
        numbers = ", ".join(f"{name} {value}" for name, value in self.numbers.items())
        fault = f"  FAULT: {self.fault}" if self.fault else ""
        return f"{self.arch:<7} {self.kernel}: {numbers} ({self.wanted_programs} wanted){fault}"


def numbers_of(compiled: Any, chip: Chip, log: str, threads: int) -> dict[str, int]:
    """The numbers of a report, from what `triton.compile` gave for a chip, and ptxas' log if the
    chip is NVIDIA's; `threads` of a program."""
    asm, shared = compiled.asm, int(compiled.metadata.shared)
    if chip.target.backend == "cuda":
        code, registers = _sass(asm["cubin"]), int(re.findall(r"Used (\d+) registers", log)[0])
        spill_bytes = max(map(int, re.findall(r"(\d+) bytes spill", log)))
    else:
        code = asm["amdgcn"]
        registers = int(re.findall(r"\.vgpr_count:\s+(\d+)", code)[0])
        spill_bytes = 4 * int(re.findall(r"\.vgpr_spill_count:\s+(\d+)", code)[0])
    return {
        "registers": registers,
        "spill_bytes": spill_bytes,
        "shared_bytes": shared,
        "programs": programs_at_once(chip, registers, shared, threads),
        "instructions": len(_INSTRUCTION.findall(code)),
        "tensor_core": len(_TENSOR_CORE.findall(code)),
        **async_depths(asm["ttgir"]),
    }


def _sass(cubin: bytes) -> str:
    """Of a kernel, by the disassembler that comes with Triton."""
    with tempfile.NamedTemporaryFile(prefix="batchllm-sass-") as file:
        Path(file.name).write_bytes(cubin)
        command = [knobs.nvidia.nvdisasm.path, "-c", file.name]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def async_depths(ttgir: str) -> dict[str, int]:
    """The async depth of the attention kernel's main loops, by `async_depth_` and their names.

    A *main loop* contains matrix products and no other loop: one run of it is a tile's step over
    keys. Its *async depth* is the least N in a wait for all but the latest N groups of asynchronous
    copies: with 0, all loads have arrived before the next are issued, so they never overlap. A
    step's keys are a group, and so are its values. A kernel with a window lacks the wide loop
    without masks.
    """
    bodies = [loop[2] for loop in _LOOP.finditer(ttgir)]
    loops = [body for body in bodies if "scf.for" not in body and _DOT.search(body)]
    names = ("wide", "wide_masked", "narrow")[3 - len(loops) :]
    depths = {}
    for name, body in zip(names, loops, strict=True):
        if waits := [int(num) for num in _WAIT.findall(body)]:
            depths[f"async_depth_{name}"] = min(waits)
    return depths


def limits_of(report: Report) -> Limits:
    """The limits that a kernel keeps."""
    limits = {**report.numbers, "registers": in_granules(report.numbers["registers"])}
    limits["instructions"] += limits["instructions"] // _INSTRUCTIONS_SLACK
    return limits


def check(report: Report, limits: AllLimits) -> str | None:
    """Why a kernel may not ship by its limits; None if it may."""
    kept = limits.get(report.arch, {}).get(report.kernel)
    if kept is None:
        return "has no limits; --write-limits writes them"
    passed = []
    for name, limit in kept.items():
        value = report.numbers.get(name, 0)
        if value > limit if name in _MOST else value < limit:
            passed.append(f"{value} {name} ({limit})")
    return f"passes its limits: {', '.join(passed)}" if passed else None


def read_limits(file: Path) -> dict[str, dict[str, Limits]]:
    """All limits of a file; none if there is no file."""
    return tomllib.loads(file.read_text()) if file.exists() else {}


def write_limits(reports: Sequence[Report], file: Path) -> None:
    """Renew all limits of these reports' chips; those of other chips stay."""
    limits = read_limits(file) | {report.arch: {} for report in reports}
    for report in reports:
        limits[report.arch][report.kernel] = limits_of(report)
    lines = [_HEADER.format(version=triton.__version__)]
    for arch in sorted(limits):
        lines.append(f"\n[{arch}]\n")
        for kernel, kept in limits[arch].items():
            pairs = ", ".join(f"{name} = {value}" for name, value in kept.items())
            lines.append(f"{json.dumps(kernel)} = {{ {pairs} }}\n")
    file.write_text("".join(lines))
