"""The plan stage's memory budget: whether it is enough, and how it is divided."""

from __future__ import annotations

import resource
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from batchllm_operator.errors import SpecError

BYTES_PER_PROMPT: Final = 340
"""Numbers kept for each prompt where most are kept at once (requests, tree, groups and costs)."""
WORKING_BYTES: Final = 384 << 20
"""For all that is done batch by batch, whatever the table's size: rows of three batches (one ahead,
one behind), texts and token ids, two chunks of prompts, two parts of a shard, compiled code."""
_BYTES_PER_LEARNED: Final = 112  # row of an earlier partition, while its lengths are learned
_BYTES_PER_PROMPT_SORTED: Final = 110
"""Of these, what is kept while rows of hashes are sorted, the sort's own arrays included."""
_LEAST_ROW_BYTES: Final = 32 << 20
_MIB: Final = 1 << 20


@dataclass(frozen=True, slots=True)
class MemoryBudget:
    """Peak resident memory of this process, and what it is used for.

    Attributes:
        total_bytes: the budget.
        resident_bytes: what the process held before any row was read: Python, libraries, the
            tokenizer.
    """

    total_bytes: int
    resident_bytes: int

    @classmethod
    def from_now(cls, total_bytes: int) -> MemoryBudget:
        """A budget for this process as it is."""
        return cls(total_bytes, _resident_bytes())

    def holding(self, num_bytes: int) -> MemoryBudget:
        """The budget of a process that holds so many bytes more from now on."""
        return replace(self, resident_bytes=self.resident_bytes + num_bytes)

    def least_bytes(self, num_prompts: int) -> int:
        """The smallest budget that will do for so many prompts."""
        for_prompts = num_prompts * BYTES_PER_PROMPT + _LEAST_ROW_BYTES
        return self.resident_bytes + WORKING_BYTES + for_prompts

    def check_learned(self, num_rows: int) -> None:
        """Refuse to learn from an earlier partition of so many rows with too small a budget.

        Raises:
            SpecError: as `check`.
        """
        self.check(num_rows * _BYTES_PER_LEARNED // BYTES_PER_PROMPT)

    def check(self, num_prompts: int) -> None:
        """Refuse to plan so many prompts with too small a budget.

        Raises:
            SpecError: says the least that will do, in whole MiB.
        """
        least = self.least_bytes(num_prompts)
        if least > self.total_bytes:
            raise SpecError(
                f"planner.memory_budget_bytes: {self.total_bytes} is too little to plan"
                f" {num_prompts:,} prompts; it takes at least {-(-least // _MIB) * _MIB}"
                f" ({-(-least // _MIB):,} MiB)"
            )

    def row_bytes(self, num_prompts: int) -> int:
        """What the prefix search may take for its rows of hashes: the more, the finer they are.

        Args:
            num_prompts: how many there will be, at most.
        """
        rest = self.total_bytes - self.resident_bytes - WORKING_BYTES
        return max(_LEAST_ROW_BYTES, rest - num_prompts * _BYTES_PER_PROMPT_SORTED)


def _resident_bytes() -> int:
    """Resident memory of this process; on systems without /proc, its peak."""
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        return pages * resource.getpagesize()
    except OSError:
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return peak if sys.platform == "darwin" else peak * 1024
