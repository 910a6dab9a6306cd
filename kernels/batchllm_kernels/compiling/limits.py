"""Limits of compiled kernels, from `limits.toml`: what a change may not pass unnoticed."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import triton

from batchllm_kernels.compiling.assembly import Code, Loop
from batchllm_kernels.compiling.report import Report, Usage

LIMITS_FILE: Final = Path(__file__).with_name("limits.toml")
_HEADER: Final = """\
# Limits of each kernel, written by `python -m batchllm_kernels.compile --write-limits` with Triton
# {version}. Most: registers and spill_bytes of a thread, shared_bytes of a program, instructions of
# a main loop. Least: programs on a multiprocessor, async_depth of a main loop. As measured, but
# registers up to the next multiple of 8, and a twentieth more instructions.
"""
_INSTRUCTIONS_SLACK: Final = 20
"""The part of a loop's instructions that may come on top."""
_REGISTERS_GRANULE: Final = 8
"""Chips give registers in such numbers."""


@dataclass(frozen=True, slots=True)
class LoopLimits:
    """Limits of a main loop."""

    instructions: int
    async_depth: int | None = None
    """The least; None for a loop that needn't wait for asynchronous copies."""

    @classmethod
    def of(cls, loop: Loop) -> LoopLimits:
        """Those that a loop keeps."""
        slack = loop.instructions // _INSTRUCTIONS_SLACK
        return cls(loop.instructions + slack, loop.async_depth)

    def passed_by(self, loop: Loop) -> Iterator[str]:
        """What the loop has too much or too little of."""
        if loop.instructions > self.instructions:
            yield f"{loop.instructions} instructions in the {loop.name} loop ({self.instructions})"
        if self.async_depth is not None and (loop.async_depth or 0) < self.async_depth:
            yield f"async depth {loop.async_depth} in the {loop.name} loop ({self.async_depth})"


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits of a kernel for a chip."""

    registers: int
    spill_bytes: int
    shared_bytes: int
    programs: int
    """The least."""
    loops: Mapping[str, LoopLimits]
    """By name; the kernel has these loops and no other."""

    @classmethod
    def of(cls, usage: Usage, code: Code) -> Limits:
        """Those that a kernel keeps."""
        return cls(
            -(-usage.registers // _REGISTERS_GRANULE) * _REGISTERS_GRANULE,
            usage.spill_bytes,
            usage.shared_bytes,
            usage.programs,
            {loop.name: LoopLimits.of(loop) for loop in code.loops},
        )

    @classmethod
    def parse(cls, given: Mapping[str, Any]) -> Limits:
        """Limits from their TOML form.

        Raises:
            TypeError, KeyError: a number is missing or unknown.
        """
        loops = {name: LoopLimits(**loop) for name, loop in given["loops"].items()}
        return cls(**{**given, "loops": loops})

    def passed_by(self, usage: Usage, code: Code) -> Iterator[str]:
        """What the kernel has too much or too little of, each with its limit."""
        for name in ("registers", "spill_bytes", "shared_bytes"):
            found, most = getattr(usage, name), getattr(self, name)
            if found > most:
                yield f"{found} {name} ({most})"
        if usage.programs < self.programs:
            yield f"{usage.programs} programs ({self.programs})"
        loops = {loop.name: loop for loop in code.loops}
        if loops.keys() != self.loops.keys():
            yield f"main loops {', '.join(loops) or 'none'} ({', '.join(self.loops) or 'none'})"
        for name, limits in self.loops.items():
            if name in loops:
                yield from limits.passed_by(loops[name])


def check(report: Report, limits: Mapping[tuple[str, str], Limits]) -> str | None:
    """Why a kernel may not ship by its limits; None if it may.

    Args:
        report: with its code.
        limits: by chip and kernel.
    """
    assert report.code, report.kernel
    found = limits.get((report.arch, report.kernel))
    if found is None:
        return "has no limits; --write-limits writes them"
    passed = ", ".join(found.passed_by(report.usage, report.code))
    return f"passes its limits: {passed}" if passed else None


def read_limits(file: Path = LIMITS_FILE) -> dict[tuple[str, str], Limits]:
    """Limits by chip and kernel.

    Raises:
        ValueError: the file isn't TOML, or a limit is missing or unknown.
    """
    try:
        return {
            (arch, kernel): Limits.parse(given)
            for arch, kernels in tomllib.loads(file.read_text()).items()
            for kernel, given in kernels.items()
        }
    except (TypeError, KeyError, AttributeError, tomllib.TOMLDecodeError) as error:
        raise ValueError(f"{file}: {error!r}") from error


def write_limits(reports: Iterable[Report], file: Path = LIMITS_FILE) -> None:
    """Renew all limits of these reports' chips; those of other chips stay."""
    limits = {
        (each.arch, each.kernel): Limits.of(each.usage, each.code) for each in reports if each.code
    }
    renewed = {arch for arch, _ in limits}
    kept = read_limits(file) if file.exists() else {}
    kept = {key: each for key, each in kept.items() if key[0] not in renewed}
    lines: dict[str, list[str]] = {}
    for (arch, kernel), each in {**kept, **limits}.items():
        lines.setdefault(arch, []).append(f"{json.dumps(kernel)} = {_inline(each)}")
    tables = ["\n".join(["", f"[{arch}]", *lines[arch], ""]) for arch in sorted(lines)]
    file.write_text(_HEADER.format(version=triton.__version__) + "".join(tables))


def _inline(limits: Limits) -> str:
    loops = []
    for name, loop in limits.loops.items():
        depth = "" if loop.async_depth is None else f", async_depth = {loop.async_depth}"
        loops.append(f"{json.dumps(name)} = {{ instructions = {loop.instructions}{depth} }}")
    numbers = ", ".join(
        f"{name} = {getattr(limits, name)}"
        for name in ("registers", "spill_bytes", "shared_bytes", "programs")
    )
    return f"{{ {numbers}, loops = {{{', '.join(loops)}}} }}"
