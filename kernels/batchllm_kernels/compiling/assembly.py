"""What a kernel's machine code does: its main loops, in SASS or amdgcn.

A *loop* is all that lies on a way from an instruction back to it (a natural loop of the control
flow, wherever the assembler puts its parts). A *main loop* contains tensor-core instructions and
no other loop that does: one run of it is a tile's step over keys. Its
*async depth* is the least N in a wait for all but the latest N groups of asynchronous copies
(`cp.async.wait_group N`; in SASS `DEPBAR.LE SB0, N`): with 0, all loads have arrived before the
next are issued, so they never overlap. A step's keys are a group, and so are its values.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Final, NamedTuple

from triton import knobs

_SASS: Final = re.compile(
    r"^\s*(?:(?P<label>\.L_\w+):"
    r"|/\*[0-9a-f]+\*/\s+(?P<predicate>@!?\w+\s+)?(?P<opcode>[A-Z][\w.]*)(?P<operands>[^;\n]*))",
    re.MULTILINE,
)
_AMDGCN: Final = re.compile(
    r"^(?:(?P<label>\.LBB\w+):|\t(?P<predicate>@)?(?P<opcode>[a-z]\w*)(?P<operands>[^;\n]*))",
    re.MULTILINE,
)
_TARGET: Final = re.compile(r"\.L\w+")
_ALWAYS: Final = re.compile(r"(?:BRA|EXIT|RET|s_branch|s_endpgm|s_setpc)")
"""Instructions that are never followed by the next one, unless they have a predicate."""
_TENSOR_CORE: Final = re.compile(
    r"[A-Z]G?MMA\.(?:SP\.)?(?:16(?P<n>8)(?P<k>16|8)|(?P<hopper>\d+x\d+x\d+))"
    r"|v_(?:smfmac|mfma)_\w+?_(?P<amd>\d+x\d+x\d+)"
)
_WAIT: Final = re.compile(r"SB0, 0x([0-9a-f]+)")
_WARPS_OF_GROUP: Final = 4


@dataclass(frozen=True, slots=True)
class Loop:
    """A main loop."""

    name: str
    instructions: int
    tensor_core: int
    """Tensor-core instructions: HMMA or HGMMA, on AMD MFMA."""
    async_depth: int | None
    """None if it doesn't wait for asynchronous copies."""


@dataclass(frozen=True, slots=True)
class Code:
    """A kernel's machine code."""

    tensor_core: int
    """Tensor-core instructions, in and outside of loops."""
    loops: tuple[Loop, ...]
    """Main loops, in the order of the code."""


def disassemble(cubin: bytes) -> str:
    """SASS of a kernel, with labels, by the disassembler that comes with Triton."""
    with tempfile.TemporaryDirectory(prefix="batchllm-sass-") as folder:
        file = Path(folder, "kernel.cubin")
        file.write_bytes(cubin)
        command = [knobs.nvidia.nvdisasm.path, "-c", str(file)]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def read_code(assembly: str, *, is_cuda: bool) -> Code:
    """Count instructions.

    Args:
        assembly: SASS with labels, or amdgcn.
        is_cuda: which of them.
    """
    listing = _Listing.of(assembly, _SASS if is_cuda else _AMDGCN)
    loops = listing.main_loops()
    names = _names([sum(_multiply_adds(each.opcode) for each in loop) for loop in loops])
    return Code(
        _count_tensor_core(listing.instructions),
        tuple(_describe(name, loop) for name, loop in zip(names, loops, strict=True)),
    )


class _Instruction(NamedTuple):
    opcode: str
    operands: str
    has_predicate: bool

    @property
    def target(self) -> str | None:
        """The label that it branches to; a way for warps that have diverged doesn't count."""
        is_branch = self.opcode.startswith(("BRA", "s_branch", "s_cbranch"))
        is_branch &= not self.opcode.startswith("BRA.DIV")
        found = _TARGET.search(self.operands) if is_branch else None
        return found[0] if found else None

    @property
    def goes_on(self) -> bool:
        """Whether the next instruction may follow it."""
        # A branch may have its condition among the operands, in front of the label.
        is_conditional = self.has_predicate or "," in self.operands
        return is_conditional or not _ALWAYS.match(self.opcode)


@dataclass(frozen=True, slots=True)
class _Listing:
    instructions: Sequence[_Instruction]
    labels: Mapping[str, int]
    """Index of the instruction that follows."""

    @classmethod
    def of(cls, assembly: str, pattern: re.Pattern[str]) -> _Listing:
        labels: dict[str, int] = {}
        instructions: list[_Instruction] = []
        for found in pattern.finditer(assembly):
            if found["label"]:
                labels[found["label"]] = len(instructions)
            else:
                instructions.append(
                    _Instruction(found["opcode"], found["operands"], bool(found["predicate"]))
                )
        return cls(instructions, labels)

    def main_loops(self) -> list[list[_Instruction]]:
        """Instructions of each, in the order of the code."""
        blocks = self._blocks()
        next_blocks = {start: self._next(end, blocks) for start, end in blocks.items()}
        loops = [
            loop
            for loop in _natural_loops(next_blocks)
            if any(_count_tensor_core(self.instructions[at : blocks[at]]) for at in loop)
        ]
        innermost = [loop for loop in loops if not any(other < loop for other in loops)]
        return [
            [each for at in sorted(loop) for each in self.instructions[at : blocks[at]]]
            for loop in sorted(innermost, key=min)
        ]

    def _blocks(self) -> dict[int, int]:
        """Ends of basic blocks by their starts."""
        starts = {0, *self.labels.values()}
        starts |= {
            idx + 1 for idx, each in enumerate(self.instructions) if each.target or not each.goes_on
        }
        cuts = sorted(starts | {len(self.instructions)})
        return dict(pairwise(cuts))

    def _next(self, end: int, blocks: Mapping[int, int]) -> list[int]:
        """Blocks that may follow that which ends there."""
        last = self.instructions[end - 1]
        found = [end] if last.goes_on else []
        if last.target is not None and last.target in self.labels:
            found.append(self.labels[last.target])
        return [start for start in found if start in blocks]


def _natural_loops(next_blocks: Mapping[int, Sequence[int]]) -> list[set[int]]:
    """Blocks of each loop that is reached; several ways back to one block are one loop."""
    back_edges, reached = _walk(next_blocks)
    before: dict[int, list[int]] = {start: [] for start in next_blocks}
    for start in reached:
        for each in next_blocks[start]:
            before[each].append(start)
    loops: dict[int, set[int]] = {}
    for latch, header in back_edges:
        loop = loops.setdefault(header, {header})
        waiting = [latch]
        while waiting:
            block = waiting.pop()
            if block not in loop:
                loop.add(block)
                waiting += before[block]
    return list(loops.values())


def _walk(next_blocks: Mapping[int, Sequence[int]]) -> tuple[list[tuple[int, int]], set[int]]:
    """(from, to) of each branch to a block on the way to it, and all blocks, from the first on."""
    found, reached, path = [], {0}, {0}
    waiting = [(0, iter(next_blocks[0]))]
    while waiting:
        block, following = waiting[-1]
        for each in following:
            if each in path:
                found.append((block, each))
            elif each not in reached:
                reached.add(each)
                path.add(each)
                waiting.append((each, iter(next_blocks[each])))
                break
        else:
            path.remove(block)
            waiting.pop()
    return found, reached


def _describe(name: str, loop: Sequence[_Instruction]) -> Loop:
    waits = [
        int(found[1], 16)
        for each in loop
        if each.opcode.startswith("DEPBAR") and (found := _WAIT.search(each.operands))
    ]
    return Loop(name, len(loop), _count_tensor_core(loop), min(waits, default=None))


def _count_tensor_core(instructions: Sequence[_Instruction]) -> int:
    return sum(_multiply_adds(each.opcode) > 0 for each in instructions)


def _multiply_adds(opcode: str) -> int:
    """Of a warp (wave); 0 if it isn't a tensor-core instruction."""
    found = _TENSOR_CORE.match(opcode)
    if not found:
        return 0
    if found["n"]:
        return 16 * int(found["n"]) * int(found["k"])
    m, n, k = map(int, (found["hopper"] or found["amd"]).split("x"))
    return m * n * k // (_WARPS_OF_GROUP if found["hopper"] else 1)


def _names(work: Sequence[int]) -> list[str]:
    """Names of the attention kernel's loops, from their multiply-adds in the order of the code.

    The narrow loop has the fewest. Of the wide ones, that without masks comes first; a kernel with
    a window lacks it.
    """
    wide = {2: ["wide masked"], 3: ["wide", "wide masked"]}.get(len(work))
    if wide is None:
        return [f"loop {number}" for number in range(1, len(work) + 1)]
    narrow = work.index(min(work))
    return [*wide[:narrow], "narrow", *wide[narrow:]]
