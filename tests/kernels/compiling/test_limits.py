"""Limits against reports made up for them."""

from __future__ import annotations

import tomllib
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from batchllm_kernels import compile as compiling
from batchllm_kernels.compiling.assembly import Code, Loop
from batchllm_kernels.compiling.limits import (
    LIMITS_FILE,
    check,
    limits_of,
    read_limits,
    write_limits,
)
from batchllm_kernels.compiling.report import Report, Usage
from batchllm_kernels.prefix_attention.config import ARCHITECTURES

NARROW, WIDE = Loop("narrow", 400, 32, 3), Loop("wide masked", 99, 10, None)
USAGE, CODE = Usage(241, 4, 72192, 2), Code(42, (NARROW, WIDE))
REPORT = Report("sm90", "attention", USAGE, 2, None, CODE)
LIMITS = limits_of(REPORT)


def report(**changes: Any) -> Report:
    """REPORT with other numbers in its usage or its code."""
    usage = {name: value for name, value in changes.items() if name != "loops"}
    code = replace(CODE, loops=changes.get("loops", CODE.loops))
    return replace(REPORT, usage=replace(USAGE, **usage), code=code)


def test_limits_leave_room_for_another_few_instructions_and_the_granule_of_registers() -> None:
    assert LIMITS == {
        **{"registers": 248, "spill_bytes": 4, "shared_bytes": 72192, "programs": 2},
        "loops": {
            "narrow": {"instructions": 420, "async_depth": 3},
            "wide masked": {"instructions": 103},
        },
    }


@pytest.mark.parametrize(
    ("kept", "passed", "said"),
    [
        ({"registers": 248}, {"registers": 249}, "249 registers (248)"),
        ({"spill_bytes": 4}, {"spill_bytes": 5}, "5 spill_bytes (4)"),
        ({"shared_bytes": 1}, {"shared_bytes": 72193}, "72193 shared_bytes (72192)"),
        ({"programs": 3}, {"programs": 1}, "1 programs (2)"),
        (
            {"loops": (replace(NARROW, instructions=420), WIDE)},
            {"loops": (replace(NARROW, instructions=421), WIDE)},
            "421 instructions in the narrow loop (420)",
        ),
        (
            {"loops": (replace(NARROW, async_depth=4), WIDE)},
            {"loops": (replace(NARROW, async_depth=2), WIDE)},
            "async depth 2 in the narrow loop (3)",
        ),
        (
            {"loops": (WIDE, NARROW)},
            {"loops": (replace(NARROW, async_depth=None), WIDE)},
            "async depth None in the narrow loop (3)",
        ),
        ({}, {"loops": (NARROW,)}, "main loops narrow (narrow, wide masked)"),
    ],
)
def test_each_limit_is_kept_or_named(
    kept: dict[str, Any], passed: dict[str, Any], said: str
) -> None:
    limits = {("sm90", "attention"): LIMITS}
    assert check(report(**kept), limits) is None
    assert check(report(**passed), limits) == f"passes its limits: {said}"


def test_a_kernel_without_limits_is_a_fault() -> None:
    fault = "has no limits; --write-limits writes them"
    assert check(REPORT, {("sm80", "attention"): LIMITS}) == fault


def test_a_chips_limits_are_written_together(tmp_path: Path) -> None:
    file = tmp_path / "limits.toml"
    plain = replace(REPORT, kernel="lay_out, 1024", code=Code(0, ()))
    write_limits([REPORT, plain, replace(REPORT, arch="sm80")], file)
    both = {("sm90", "attention"): LIMITS, ("sm90", "lay_out, 1024"): {**LIMITS, "loops": {}}}
    assert read_limits(file) == {**both, ("sm80", "attention"): LIMITS}
    write_limits([plain], file)
    assert read_limits(file) == {
        ("sm90", "lay_out, 1024"): {**LIMITS, "loops": {}},
        ("sm80", "attention"): LIMITS,
    }


@pytest.mark.parametrize("text", ["[sm90]\nattention = { registers = 1 }", "sm90 = 1", "["])
def test_a_broken_file_is_named(text: str, tmp_path: Path) -> None:
    file = tmp_path / "limits.toml"
    file.write_text(text)
    with pytest.raises(ValueError, match=r"limits\.toml"):
        read_limits(file)


def test_all_that_ships_has_limits() -> None:
    shipped = tomllib.loads(LIMITS_FILE.read_text())
    assert shipped.keys() == ARCHITECTURES.keys()
    for arch, kernels in shipped.items():
        assert len(kernels) == len(list(compiling._jobs(arch)))
