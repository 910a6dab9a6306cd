"""Checks the plan stage's memory budget."""

from __future__ import annotations

import resource
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from batchllm_operator.errors import SpecError

BYTES_PER_PROMPT: Final = 340
"""Bytes of numbers per prompt at the peak (requests, tree, groups and costs)."""
WORKING_BYTES: Final = 384 << 20
"""For work batch by batch, independent of the table's size: rows of three batches (one ahead, one
behind), texts and token ids, two chunks of prompts, two parts of a shard, compiled code."""
_MIB: Final = 1 << 20


@dataclass(frozen=True, slots=True)
class MemoryBudget:
    """Upper bound of this process's resident memory.

    Attributes:
        total_bytes: the budget.
        resident_bytes: memory of the process before any row was read: Python, libraries, the
            tokenizer.
    """

    total_bytes: int
    resident_bytes: int

    @classmethod
    def from_now(cls, total_bytes: int) -> MemoryBudget:
        """A budget for this process with its current memory."""
        return cls(total_bytes, _resident_bytes())

    def holding(self, num_bytes: int) -> MemoryBudget:
        """The budget after the process has taken `num_bytes` more."""
        return replace(self, resident_bytes=self.resident_bytes + num_bytes)

    def least_bytes(self, num_prompts: int) -> int:
        """The smallest budget for so many prompts."""
        return self.resident_bytes + WORKING_BYTES + num_prompts * BYTES_PER_PROMPT

    def check(self, num_prompts: int) -> None:
        """Refuse to plan `num_prompts` prompts if the budget is too small.

        Raises `SpecError`: names the smallest budget, in whole MiB.
        """
        least = self.least_bytes(num_prompts)
        if least > self.total_bytes:
            raise SpecError(
                f"planner.memory_budget_bytes: {self.total_bytes} is too little to plan"
                f" {num_prompts:,} prompts; it takes at least {-(-least // _MIB) * _MIB}"
                f" ({-(-least // _MIB):,} MiB)"
            )


def _resident_bytes() -> int:
    """Resident memory of this process."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()
