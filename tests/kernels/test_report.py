"""Main loops in a compiler's output written by hand, and limits against reports made up."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from kernel_settings import compile as compiling
from kernel_settings.report import (
    CHIPS,
    LIMITS_FILE,
    Report,
    async_depths,
    check,
    limits_of,
    numbers_of,
    read_limits,
    write_limits,
)

from batchllm_kernels.prefix_attention.config import ARCHITECTURES

LOOP = """\
        %out:2 = scf.for %first = %0 to %1 step %c32 iter_args(%x = %cst) -> (i32)  : i32 {
          %k = ttg.async_wait %a, %b {num = 4 : i32} loc(#loc1)
          scf.if %2 {
            %v = ttg.async_wait %k, %b {num = DEPTH : i32} loc(#loc1)
          }
          %s = DOT %q, %k, %cst : tensor<64x64xbf16>
          scf.yield %s : i32
        } {tt.num_stages = 3 : i32} loc(#loc2)
        %w = ttg.async_wait {num = 0 : i32} loc(#loc2)
"""
MERGE = "        scf.for %piece = %0 to %1 step %c1  : i32 {\n          tt.load %x\n        }\n"


def ttgir(*loops: tuple[int, str]) -> str:
    """A loop over tiles around main loops of (async depth, operation) and one that merges."""
    bodies = [LOOP.replace("DEPTH", str(depth)).replace("DOT", dot) for depth, dot in loops]
    head = "    scf.for %item = %0 to %1 step %2  : i32 {\n"
    return "".join([head, *bodies, MERGE, "    } {tt.num_stages = 1 : i32} loc(#loc5)\n"])


def test_the_async_depth_of_a_main_loop_is_that_of_its_shallowest_wait() -> None:
    wide = (2, "ttng.warp_group_dot")
    assert async_depths(ttgir(wide, (1, "tt.dot"), (3, "tt.dot"))) == {
        "async_depth_wide": 2,
        "async_depth_wide_masked": 1,
        "async_depth_narrow": 3,
    }


def test_a_kernel_with_a_window_lacks_the_loop_without_masks() -> None:
    depths = async_depths(ttgir((1, "tt.dot"), (2, "tt.dot")))
    assert depths == {"async_depth_wide_masked": 1, "async_depth_narrow": 2}


def test_loops_without_products_or_without_waits_have_no_depth() -> None:
    assert async_depths(ttgir()) == {}
    waiting = ttgir((1, "tt.dot"), (2, "tt.dot"))
    assert async_depths(waiting.replace("ttg.async_wait", "tt.load")) == {}


AMD = """
	.text
kernel:
	s_load_dwordx2 s[0:1], s[4:5], 0x0
.LBB0_1:                                ; a comment
	v_mfma_f32_32x32x8_bf16_1k v[0:15], v[0:1], v[2:3], 0
	v_smfmac_f32_16x16x32_bf16 v[0:3], v[4:5], v[6:9], v10
	s_cbranch_scc1 .LBB0_1
	s_endpgm
    .vgpr_count:     130
    .vgpr_spill_count: 2
"""


@pytest.mark.parametrize(("shared", "programs"), [(16_384, 3), (40_000, 1)])
def test_the_numbers_of_an_amd_kernel(shared: int, programs: int) -> None:
    compiled = SimpleNamespace(
        asm={"amdgcn": AMD, "ttgir": ttgir()}, metadata=SimpleNamespace(shared=shared)
    )
    assert numbers_of(compiled, CHIPS["gfx942"], "", threads=256) == {
        "registers": 130,
        "spill_bytes": 8,
        "shared_bytes": shared,
        "programs": programs,
        "instructions": 5,
        "tensor_core": 2,
    }


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
    limits = {"sm90": {"attention": LIMITS}}
    assert check(replace(REPORT, numbers={**NUMBERS, name: kept}), limits) is None
    fault = check(replace(REPORT, numbers={**NUMBERS, name: passed}), limits)
    assert fault == f"passes its limits: {passed} {name} ({LIMITS[name]})"


def test_a_loop_that_no_longer_waits_passes_its_least_depth() -> None:
    numbers = {name: value for name, value in NUMBERS.items() if name != "async_depth_narrow"}
    fault = check(replace(REPORT, numbers=numbers), {"sm90": {"attention": LIMITS}})
    assert fault == "passes its limits: 0 async_depth_narrow (3)"
    without = check(REPORT, {"sm80": {"attention": LIMITS}})
    assert without == "has no limits; --write-limits writes them"


def test_a_chips_limits_are_written_together(tmp_path: Path) -> None:
    file = tmp_path / "limits.toml"
    plain = replace(REPORT, kernel="lay_out, 1024")
    other = {"sm80": {"attention": LIMITS}}
    write_limits([REPORT, plain, replace(REPORT, arch="sm80")], file)
    both = {"sm90": {"attention": LIMITS, "lay_out, 1024": LIMITS}}
    assert read_limits(file) == {**both, **other}
    write_limits([plain], file)
    assert read_limits(file) == {"sm90": {"lay_out, 1024": LIMITS}, **other}


def test_all_that_ships_has_limits() -> None:
    shipped = {
        arch: {kernel.name for kernel in compiling.shipped_kernels(arch)} for arch in ARCHITECTURES
    }
    assert {arch: set(own) for arch, own in read_limits(LIMITS_FILE).items()} == shipped
