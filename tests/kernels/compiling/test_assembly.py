"""Loops in assembly written by hand."""

from __future__ import annotations

from batchllm_kernels.compiling.assembly import Code, Loop, read_code


def sass(*lines: str) -> str:
    """Instructions with their addresses as a comment, and labels, as nvdisasm prints them."""
    return "\n".join(
        line if line.startswith(".L") else f"        /*{16 * idx:04x}*/                   {line} ;"
        for idx, line in enumerate(lines)
    )


# A persistent loop (.L_x_9) around a loop of 16-row tiles, a wide one without masks, one with masks
# and one that merges. Parts of the wide ones lie elsewhere: one for diverged warps, one that isn't.
ATTENTION = sass(
    "LDC R1, c[0x0][0x28]",
    "@P0 EXIT",
    ".L_x_9:",
    "@P1 BRA `(.L_x_1)",
    ".L_x_0:",
    "DEPBAR.LE SB0, 0x3",
    "HMMA.16816.F32.BF16 R48, R40.reuse, R60, RZ",
    "HMMA.16816.F32.BF16 R40, R40, R36, RZ",
    "LDGDEPBAR",
    "@!P0 BRA `(.L_x_0)",
    "DEPBAR.LE SB0, 0x0",
    "BRA `(.L_x_5)",
    ".L_x_1:",
    "DEPBAR.LE SB0, 0x2",
    "BRA.DIV ~URZ, `(.L_x_7)",
    "HGMMA.64x32x16.F32.BF16 R88, gdesc[UR40], RZ, !UPT",
    ".L_x_2:",
    "DEPBAR.LE SB0, 0x1",
    "DEPBAR.LE SB1, 0x0",
    "@P2 BRA `(.L_x_1)",
    ".L_x_3:",
    "HGMMA.64x32x16.F32.BF16 R88, gdesc[UR40], RZ, !UPT",
    "HGMMA.64x128x16.F32.BF16 R24, R112, gdesc[UR12].tnspB, R24, gsb0",
    "BRA `(.L_x_6)",
    ".L_x_4:",
    "@P3 BRA `(.L_x_3)",
    ".L_x_5:",
    "FADD R1, R1, R2",
    "@P4 BRA `(.L_x_5)",
    "@P5 BRA `(.L_x_9)",
    "EXIT",
    ".L_x_6:",
    "FADD R1, R1, R2",
    "BRA `(.L_x_4)",
    ".L_x_7:",
    "WARPSYNC.COLLECTIVE R1, `(.L_x_8)",
    ".L_x_8:",
    "BRA `(.L_x_2)",
)

AMD = """
	.text
kernel:
; %bb.0:
	s_load_dwordx2 s[0:1], s[4:5], 0x0
.LBB0_1:                                ; =>This Loop Header: Depth=1
	s_waitcnt vmcnt(0)
.LBB0_2:                                ;   Parent Loop BB0_1 Depth=1
	v_mfma_f32_32x32x8_bf16_1k v[0:15], v[0:1], v[2:3], 0
	v_mfma_f32_32x32x8bf16_1k v[0:15], v[0:1], v[2:3], 0
	s_cbranch_scc1 .LBB0_2
; %bb.3:
	s_waitcnt vmcnt(0)
.LBB0_4:
	v_mfma_f32_16x16x16_bf16 v[0:3], v[4:5], v[6:7], 0 ; a comment
	s_cbranch_scc0 .LBB0_5
	s_branch .LBB0_4
.LBB0_5:
	s_cbranch_scc1 .LBB0_1
	s_endpgm
"""


def test_main_loops_are_found_wherever_their_parts_lie() -> None:
    assert read_code(ATTENTION, is_cuda=True) == Code(
        tensor_core=5,
        loops=(
            Loop("narrow", 5, 2, 3),
            Loop("wide", 6, 1, 1),
            Loop("wide masked", 6, 2, None),
        ),
    )


def test_amdgcn_waits_for_no_asynchronous_copies() -> None:
    """A kernel with a window lacks the loop without masks, and its narrow loop may come last."""
    assert read_code(AMD, is_cuda=False) == Code(
        tensor_core=3, loops=(Loop("wide masked", 3, 2, None), Loop("narrow", 3, 1, None))
    )


def test_a_kernel_without_matrices_has_no_main_loop() -> None:
    plain = sass(".L_x_0:", "FADD R1, R1, R2", "@P0 BRA `(.L_x_0)", "EXIT")
    assert read_code(plain, is_cuda=True) == Code(0, ())


def test_loops_of_another_kernel_have_numbers() -> None:
    one = sass(".L_x_0:", "HMMA.1688.F32.TF32 R4, R8, R12, R4", "@P0 BRA `(.L_x_0)", "EXIT")
    assert read_code(one, is_cuda=True) == Code(1, (Loop("loop 1", 2, 1, None),))
