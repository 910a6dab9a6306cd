"""KV blocks that running requests will hold in each later step.

A prefilled request grows by a token per step until it ends, and then frees its blocks. So their
peak follows from output lengths. Reserving final sizes would leave memory idle that is needed only
when others have ended.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray


class Growth(NamedTuple):
    """The blocks of one request beyond those that it shares.

    In step s it holds the blocks of `num_tokens + (s - start) * tokens_per_step` tokens, less
    `num_shared_blocks`, for all s in [start, end), and before `start` as many as in `start`.
    """

    start: int
    end: int
    num_tokens: int
    num_shared_blocks: int
    tokens_per_step: float = 1.0


class BlockProjection:
    """Blocks in use in each step from the current one on. Steps are counted from 0."""

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._blocks = np.zeros(0, dtype=np.int64)  # by step
        self._filled = self._blocks  # blocks that so many tokens fill
        self.now = 0  # the current step
        self._end = 1  # no blocks from this step on
        self._num_held = 0

    def clear(self) -> None:
        """Set all steps to 0 blocks."""
        self._blocks[self.now :] = 0
        self._num_held = 0

    def add(self, growth: Growth, sign: int = 1) -> None:
        """Add a request's blocks from now on, or remove them with a `sign` of -1."""
        if self.now < growth.end:
            ahead = self._until(growth.end)
            (np.add if sign > 0 else np.subtract)(ahead, self._of(growth), out=ahead)

    def hold(self, num_blocks: int, until: int | None, begin: int = 0) -> None:
        """Add blocks in those of the steps [begin, until) that aren't over.

        A negative number removes them; without `until` there is no end, and no begin.
        """
        if until is None:
            self._num_held += num_blocks
        else:
            self._until(until)[max(begin - self.now, 0) :] += num_blocks

    def num_blocks(self) -> int:
        """Blocks in use in the current step."""
        return int(self._until(self.now + 1)[0]) + self._num_held

    def peak_with(self, growth: Growth, num_blocks: int = 0) -> int:
        """The most blocks in use in any step from now on, with one more request.

        While it runs, it adds `num_blocks` for others to share.
        """
        most = 0
        if self.now < growth.end:
            most = int((self._until(growth.end) + self._of(growth)).max()) + num_blocks
        after = self._blocks[max(growth.end, self.now) : self._end]
        return max(most, int(after.max(initial=0))) + self._num_held

    def _of(self, growth: Growth) -> NDArray[np.int64]:
        """Blocks of a request in each step from now to its end."""
        begin, end = self.now - growth.start, growth.end - growth.start
        whole, part = divmod(growth.num_tokens - 1, self._block_size)
        num_own = whole + 1 - growth.num_shared_blocks
        if growth.tokens_per_step == 1.0 and begin >= 0:
            return self._filled[begin + part : end + part] + num_own
        steps = np.maximum(np.arange(begin, end), 0)
        tokens = np.ceil(steps * growth.tokens_per_step).astype(np.int64) + part
        return np.asarray(tokens // self._block_size + num_own)

    def _until(self, end: int) -> NDArray[np.int64]:
        """The blocks of the steps from now to `end`, to be changed."""
        self._end = max(self._end, end)
        if end > len(self._blocks):
            self._blocks = np.append(self._blocks, np.zeros(end, dtype=np.int64))
            self._filled = np.arange(len(self._blocks) + self._block_size) // self._block_size
        return self._blocks[self.now : end]
