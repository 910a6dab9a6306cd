"""What a compiled kernel takes of a chip, and what its code does."""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from triton import knobs

from batchllm_kernels.compiling.chips import Chip, programs_at_once

_INSTRUCTION: Final = re.compile(
    r"^(?:\s*/\*[0-9a-f]+\*/\s+[@A-Z]|\t[a-z]\w*(?: |$))", re.MULTILINE
)
"""In SASS, behind an address; in amdgcn, indented."""
_TENSOR_CORE: Final = re.compile(r"\b(?:HG?MMA\.|v_(?:smfmac|mfma)_)")
_LOOP: Final = re.compile(r"^(?=( *)(?:%\S+ = )?scf\.for .*\n((?:\1 .*\n)+)\1\})", re.MULTILINE)
_DOT: Final = re.compile(r"(?:tt\.dot|warp_group_dot) ")
_WAIT: Final = re.compile(r"ttg\.async_wait .*\{num = (\d+)")


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
    """The numbers of a report.

    Args:
        compiled: by `triton.compile`.
        chip: that it was compiled for.
        log: ptxas' output, for a chip of NVIDIA.
        threads: of a program.
    """
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
