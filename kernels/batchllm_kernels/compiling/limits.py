"""Limits of compiled kernels, from `limits.toml`: what a change may not pass unnoticed."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any, Final

import triton

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
_NAMES: Final = {"loops", *(field.name for field in fields(Usage))}


Limits = Mapping[str, Any]
"""A kernel's limits, as in the file: numbers by the name in `Usage`, and its main loops by name."""


def limits_of(report: Report) -> Limits:
    """The limits that a kernel keeps; its code has been read."""
    assert report.code, report.kernel
    usage = asdict(report.usage)
    usage["registers"] = -(-usage["registers"] // _REGISTERS_GRANULE) * _REGISTERS_GRANULE
    loops: dict[str, dict[str, int]] = {}
    for loop in report.code.loops:
        slack = loop.instructions // _INSTRUCTIONS_SLACK
        loops[loop.name] = {"instructions": loop.instructions + slack}
        if loop.async_depth is not None:
            loops[loop.name]["async_depth"] = loop.async_depth
    return {**usage, "loops": loops}


def check(report: Report, limits: Mapping[tuple[str, str], Limits]) -> str | None:
    """Why a kernel may not ship by its limits; None if it may.

    Args:
        report: with its code.
        limits: by chip and kernel.
    """
    kept = limits.get((report.arch, report.kernel))
    if kept is None:
        return "has no limits; --write-limits writes them"
    passed = ", ".join(_passed(report, kept))
    return f"passes its limits: {passed}" if passed else None


def _passed(report: Report, limits: Limits) -> Iterator[str]:
    """What the kernel has too much or too little of, with its limits."""
    assert report.code, report.kernel
    for name in ("registers", "spill_bytes", "shared_bytes"):
        if (value := getattr(report.usage, name)) > limits[name]:
            yield f"{value} {name} ({limits[name]})"
    if report.usage.programs < limits["programs"]:
        yield f"{report.usage.programs} programs ({limits['programs']})"
    loops, kept = {loop.name: loop for loop in report.code.loops}, limits["loops"]
    if loops.keys() != kept.keys():
        yield f"main loops {', '.join(loops) or 'none'} ({', '.join(kept) or 'none'})"
    for name in filter(loops.__contains__, kept):
        loop, most, depth = loops[name], kept[name]["instructions"], kept[name].get("async_depth")
        if loop.instructions > most:
            yield f"{loop.instructions} instructions in the {name} loop ({most})"
        if depth is not None and (loop.async_depth or 0) < depth:
            yield f"async depth {loop.async_depth} in the {name} loop ({depth})"


def read_limits(file: Path = LIMITS_FILE) -> dict[tuple[str, str], Limits]:
    """Limits by chip and kernel.

    Raises:
        ValueError: the file isn't TOML, or a limit is missing or unknown.
    """
    try:
        limits = {
            (arch, kernel): given
            for arch, kernels in tomllib.loads(file.read_text()).items()
            for kernel, given in kernels.items()
        }
        for given in limits.values():
            if given.keys() != _NAMES:
                raise ValueError(f"{file}: limits of {sorted(given)}, not of {sorted(_NAMES)}")
    except (AttributeError, tomllib.TOMLDecodeError) as error:
        raise ValueError(f"{file}: {error!r}") from error
    return limits


def write_limits(reports: Iterable[Report], file: Path = LIMITS_FILE) -> None:
    """Renew all limits of these reports' chips; those of other chips stay."""
    renewed = {(report.arch, report.kernel): limits_of(report) for report in reports}
    archs = {arch for arch, _ in renewed}
    before = read_limits(file) if file.exists() else {}
    kept = {key: limits for key, limits in before.items() if key[0] not in archs}
    lines: dict[str, list[str]] = {}
    for (arch, kernel), limits in {**kept, **renewed}.items():
        lines.setdefault(arch, []).append(f"{json.dumps(kernel)} = {_inline(limits)}")
    tables = ["\n".join(["", f"[{arch}]", *lines[arch], ""]) for arch in sorted(lines)]
    file.write_text(_HEADER.format(version=triton.__version__) + "".join(tables))


def _inline(limits: Limits) -> str:
    loops = ", ".join(
        f"{json.dumps(name)} = {{ {_pairs(loop)} }}" for name, loop in limits["loops"].items()
    )
    numbers = {name: value for name, value in limits.items() if name != "loops"}
    return f"{{ {_pairs(numbers)}, loops = {{{loops}}} }}"


def _pairs(numbers: Mapping[str, int]) -> str:
    return ", ".join(f"{name} = {value}" for name, value in numbers.items())
