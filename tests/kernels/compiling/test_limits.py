"""Limits against reports made up for them."""

from __future__ import annotations

import tomllib
from dataclasses import replace
from pathlib import Path

import pytest

from batchllm_kernels import compile as compiling
from batchllm_kernels.compiling.limits import (
    LIMITS_FILE,
    check,
    limits_of,
    read_limits,
    write_limits,
)
from batchllm_kernels.compiling.report import Report
from batchllm_kernels.prefix_attention.config import ARCHITECTURES

NUMBERS = {
    "registers": 241,
    "spill_bytes": 4,
    "shared_bytes": 72192,
    "programs": 2,
    "instructions": 400,
    "tensor_core": 42,
    "async_depth_narrow": 3,
}
REPORT = Report("sm90", "attention", NUMBERS, 2)
LIMITS = {**NUMBERS, "registers": 248, "instructions": 420}


def test_limits_leave_room_for_another_few_instructions_and_the_granule_of_registers() -> None:
    assert limits_of(REPORT) == LIMITS


@pytest.mark.parametrize(
    ("name", "kept", "passed"),
    [
        ("registers", 248, 249),
        ("spill_bytes", 4, 5),
        ("shared_bytes", 1, 72193),
        ("programs", 3, 1),
        ("instructions", 420, 421),
        ("tensor_core", 43, 41),
        ("async_depth_narrow", 4, 2),
    ],
)
def test_each_limit_is_kept_or_named(name: str, kept: int, passed: int) -> None:
    limits = {("sm90", "attention"): LIMITS}
    assert check(replace(REPORT, numbers={**NUMBERS, name: kept}), limits) is None
    fault = check(replace(REPORT, numbers={**NUMBERS, name: passed}), limits)
    assert fault == f"passes its limits: {passed} {name} ({LIMITS[name]})"


def test_a_loop_that_no_longer_waits_passes_its_least_depth() -> None:
    numbers = {name: value for name, value in NUMBERS.items() if name != "async_depth_narrow"}
    fault = check(replace(REPORT, numbers=numbers), {("sm90", "attention"): LIMITS})
    assert fault == "passes its limits: 0 async_depth_narrow (3)"


def test_a_kernel_without_limits_is_a_fault() -> None:
    fault = "has no limits; --write-limits writes them"
    assert check(REPORT, {("sm80", "attention"): LIMITS}) == fault


def test_a_chips_limits_are_written_together(tmp_path: Path) -> None:
    file = tmp_path / "limits.toml"
    plain = replace(REPORT, kernel="lay_out, 1024")
    other = {("sm80", "attention"): LIMITS}
    write_limits([REPORT, plain, replace(REPORT, arch="sm80")], file)
    both = {("sm90", "attention"): LIMITS, ("sm90", "lay_out, 1024"): LIMITS}
    assert read_limits(file) == {**both, **other}
    write_limits([plain], file)
    assert read_limits(file) == {("sm90", "lay_out, 1024"): LIMITS, **other}


def test_all_that_ships_has_limits() -> None:
    shipped = tomllib.loads(LIMITS_FILE.read_text())
    assert shipped.keys() == ARCHITECTURES.keys()
    for arch, kernels in shipped.items():
        assert len(kernels) == len(list(compiling._jobs(arch)))
