"""Tells a slow worker when to leave the last shards to others (ADR 33)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, NamedTuple

_MARGIN: Final = 1.5
"""At least 1. More, as a worker's next shard may take less time than its last."""


class _Claim(NamedTuple):
    at: float
    num_by_others: int
    """Shards that others had finished then."""


class Pace:
    """What a worker finishes, beside what others finish meanwhile.

    Args:
        clock: monotonic seconds.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._claims: dict[int, _Claim] = {}
        self._num_ended = 0
        self._last: tuple[_Claim, float] | None = None
        """The shard that was finished last, with the seconds from its claim to its end."""

    def claimed(self, shard_idx: int, num_finished: int) -> None:
        self._claims[shard_idx] = _Claim(self._clock(), num_finished - self._num_ended)

    def ended(self, shard_idx: int) -> None:
        claim = self._claims.pop(shard_idx)
        self._last = claim, self._clock() - claim.at
        self._num_ended += 1

    def is_behind(self, num_finished: int, num_free: int, num_begun: int) -> bool:
        """Whether others will finish all shards before this worker would finish one more.

        They go on as since the claim of the shard that it finished last.

        Args:
            num_finished: of all workers.
            num_free: shards that can be claimed.
            num_begun: shards that others are at work on; without any, it isn't behind.
        """
        if self._last is None or not num_begun:
            return False
        claim, took_s = self._last
        num_meanwhile = num_finished - self._num_ended - claim.num_by_others
        since_s = self._clock() - claim.at
        return num_meanwhile * took_s > (num_free + _MARGIN * num_begun) * since_s
