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
        self._blocks = np.zeros(_FIRST_STEPS, dtype=np.int64)  # by step - first
        self._first = 0
        self.now = 0  # the current step
        self._num_held = 0

    def advance(self, now: int) -> None:
        """Move to a later step, and drop the earlier ones."""
        self.now = now
        if now - self._first > len(self._blocks) // 2:
            rest = self._blocks[now - self._first :]
            self._blocks[: len(rest)] = rest
            self._blocks[len(rest) :] = 0
            self._first = now

    def clear(self) -> None:
        """Set all steps to 0 blocks."""
        self._blocks[:] = 0
        self._num_held = 0

    def add(self, growth: Growth, sign: int = 1) -> None:
        """Add a request's blocks from now on, or remove them with a `sign` of -1."""
        if self.now < growth.end:
            self._reach(growth.end)
            ahead = self._blocks[self.now - self._first : growth.end - self._first]
            ahead += sign * self._of(growth)

    def hold(self, num_blocks: int, until: int | None, begin: int = 0) -> None:
        """Add blocks in those of the steps [begin, until) that aren't over.

        A negative number removes them; without `until` there is no end, and no begin.
        """
        begin = max(begin, self.now)
        if until is None:
            self._num_held += num_blocks
        elif begin < until:
            self._reach(until)
            self._blocks[begin - self._first : until - self._first] += num_blocks

    def num_blocks(self) -> int:
        """Blocks in use in the current step."""
        return int(self._blocks[self.now - self._first]) + self._num_held

    def peak_with(self, growth: Growth, num_blocks: int = 0) -> int:
        """The most blocks in use in any step from now on, with one more request.

        While it runs, it adds `num_blocks` for others to share.
        """
        self._reach(growth.end)
        ahead = self._blocks[self.now - self._first :]
        most = int(ahead.max())  # after it has ended
        if self.now < growth.end:
            with_it = ahead[: growth.end - self.now] + self._of(growth)
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

    def _reach(self, end: int) -> None:
        """Make room for the steps before `end`."""
        if end - self._first > len(self._blocks):
            larger = np.zeros(max(end - self._first, 2 * len(self._blocks)), dtype=np.int64)
            larger[: len(self._blocks)] = self._blocks
            self._blocks = larger
