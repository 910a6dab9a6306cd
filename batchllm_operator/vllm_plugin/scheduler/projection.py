"""KV blocks that running requests will hold in each later step.

A prefilled request grows by a token per step until it ends, and then frees its blocks. So their
peak follows from output lengths. Reserving final sizes would leave memory idle that is needed only
when others have ended.
"""

from __future__ import annotations

from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

_FIRST_STEPS: Final = 1024


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
        self._blocks = np.zeros(_FIRST_STEPS, dtype=np.int64)  # by step
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
            ahead += sign * self._of(growth)

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
        most = int(self._until(max(self._end, self.now + 1)).max())  # after it has ended
        if self.now < growth.end:
            with_it = self._until(growth.end) + self._of(growth)
            most = max(most, int(with_it.max()) + num_blocks)
        return most + self._num_held

    def _of(self, growth: Growth) -> NDArray[np.int64]:
        """Blocks of a request in each step from now to its end."""
        steps = np.arange(self.now - growth.start, growth.end - growth.start)
        np.maximum(steps, 0, out=steps)
        if growth.tokens_per_step != 1.0:
            steps = np.ceil(steps * growth.tokens_per_step).astype(np.int64)
        steps += growth.num_tokens + self._block_size - 1
        return np.asarray(steps // self._block_size - growth.num_shared_blocks)

    def _until(self, end: int) -> NDArray[np.int64]:
        """The blocks of the steps from now to `end`, to be changed."""
        self._end = max(self._end, end)
        if end > len(self._blocks):
            self._blocks = np.append(self._blocks, np.zeros(end, dtype=np.int64))
        return self._blocks[self.now : end]
