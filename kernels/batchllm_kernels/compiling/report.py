"""The result of compiling a kernel."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final

from batchllm_kernels.compiling.assembly import Code

HEADINGS: Final = (
    "arch    registers  spilled  shared  programs (wanted)  tensor  kernel; of each main loop:"
    " instructions, tensor-core instructions, async depth"
)


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
    code: Code | None = None
    """None if it wasn't read."""


def table_line(report: Report) -> str:
    """A kernel's row under `HEADINGS`; its code has been read."""
    usage, code = report.usage, report.code
    assert code, report.kernel
    loops = [
        f"{loop.name} {loop.instructions} {loop.tensor_core}"
        f" {'-' if loop.async_depth is None else loop.async_depth}"
        for loop in code.loops
    ]
    return (
        f"{report.arch:<7} {usage.registers:>9} {usage.spill_bytes:>8} {usage.shared_bytes:>7} "
        f"{usage.programs:>9} ({report.wanted_programs})      {code.tensor_core:>7}  "
        + "; ".join([report.kernel, *loops])
        + (f"  FAULT: {report.fault}" if report.fault else "")
    )


def ptxas_usage(log: str) -> tuple[int, int]:
    """(registers, bytes spilled) from the assembler's output."""
    spills = [int(count) for count in re.findall(r"(\d+) bytes spill", log)]
    return int(re.findall(r"Used (\d+) registers", log)[0]), max(spills)


def amdgcn_usage(assembly: str) -> tuple[int, int]:
    """The same of an AMD kernel, from the notes at the end of its assembly."""

    def value(key: str) -> int:
        return int(re.findall(rf"\.{key}:\s+(\d+)", assembly)[0])

    return value("vgpr_count"), 4 * value("vgpr_spill_count")
