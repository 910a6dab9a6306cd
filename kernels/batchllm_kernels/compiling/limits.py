"""Limits of compiled kernels, from `limits.toml`: what a change may not pass unnoticed."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Final

import triton

from batchllm_kernels.compiling.report import Report

LIMITS_FILE: Final = Path(__file__).with_name("limits.toml")
_HEADER: Final = """\
# Limits of each kernel, written by `python -m batchllm_kernels.compile --write-limits` with Triton
# {version}. Most: registers and spill_bytes of a thread, shared_bytes of a program, instructions.
# Least: programs on a multiprocessor, tensor_core instructions, async_depth of a main loop. As
# measured, but registers up to the next multiple of 8, and a twentieth more instructions.
"""
_MOST: Final = ("registers", "spill_bytes", "shared_bytes", "instructions")
_INSTRUCTIONS_SLACK: Final = 20
"""The part of a kernel's instructions that may come on top."""
_REGISTERS_GRANULE: Final = 8
"""Chips give registers in such numbers."""

Limits = Mapping[str, int]
"""A kernel's limits by the name in `Report.numbers`."""


def limits_of(report: Report) -> Limits:
    """The limits that a kernel keeps."""
    limits = dict(report.numbers)
    limits["registers"] = -(-limits["registers"] // _REGISTERS_GRANULE) * _REGISTERS_GRANULE
    limits["instructions"] += limits["instructions"] // _INSTRUCTIONS_SLACK
    return limits


def check(report: Report, limits: Mapping[tuple[str, str], Limits]) -> str | None:
    """Why a kernel may not ship by its limits, which are by chip and kernel; None if it may."""
    kept = limits.get((report.arch, report.kernel))
    if kept is None:
        return "has no limits; --write-limits writes them"
    passed = []
    for name, limit in kept.items():
        value = report.numbers.get(name, 0)
        if value > limit if name in _MOST else value < limit:
            passed.append(f"{value} {name} ({limit})")
    return f"passes its limits: {', '.join(passed)}" if passed else None


def read_limits(file: Path = LIMITS_FILE) -> dict[tuple[str, str], Limits]:
    """Limits by chip and kernel."""
    by_arch = tomllib.loads(file.read_text())
    return {(arch, kernel): kept for arch, own in by_arch.items() for kernel, kept in own.items()}


def write_limits(reports: Iterable[Report], file: Path = LIMITS_FILE) -> None:
    """Renew all limits of these reports' chips; those of other chips stay."""
    renewed = {(report.arch, report.kernel): limits_of(report) for report in reports}
    archs = {arch for arch, _ in renewed}
    before = read_limits(file) if file.exists() else {}
    kept = {key: limits for key, limits in before.items() if key[0] not in archs}
    lines: dict[str, list[str]] = {}
    for (arch, kernel), limits in {**kept, **renewed}.items():
        pairs = ", ".join(f"{name} = {value}" for name, value in limits.items())
        lines.setdefault(arch, []).append(f"{json.dumps(kernel)} = {{ {pairs} }}")
    tables = ["\n".join(["", f"[{arch}]", *lines[arch], ""]) for arch in sorted(lines)]
    file.write_text(_HEADER.format(version=triton.__version__) + "".join(tables))
