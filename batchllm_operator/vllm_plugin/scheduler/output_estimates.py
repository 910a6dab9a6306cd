"""Estimated output lengths, corrected by finished requests."""

import math
from typing import Final

_PRIOR_REQUESTS: Final = 16  # weight of given estimates and `_PRIOR_DEVIATION`
_PRIOR_DEVIATION: Final = 0.3
_LONGER_BY: Final = 0.25  # of its length, for an output beyond its estimate
_AT_LEAST: Final = 4  # tokens


class OutputEstimates:
    """Scales given estimates by actual output lengths.

    The ratio of a request is its length over its estimate. `scale` is the mean ratio, weighted by
    tokens; given estimates weigh as much as `prior_requests` finished requests. An output that
    outgrows its estimate counts at once, before the first long outputs end.
    """

    def __init__(self, prior_requests: int = _PRIOR_REQUESTS) -> None:
        self._prior_requests = prior_requests
        self._num_known = 0
        self._num_tokens = self._estimated = self._ratios = self._squares = 0.0
        self.scale = 1.0
        """Factor from given estimates to expected lengths."""
        self.deviation = _PRIOR_DEVIATION
        """Standard deviation of the ratios."""

    def rather_long(self, given: int, most: int) -> int:
        """One standard deviation above the expected length; at least 1, and at most `most`."""
        return max(1, min(math.ceil(given * (self.scale + self.deviation)), most))

    def extended(self, num_tokens: int, most: int) -> int:
        """Expected length of an output that already has `num_tokens` and continues."""
        longer = num_tokens + max(_AT_LEAST, round(num_tokens * _LONGER_BY))
        return max(num_tokens + 1, min(longer, most))

    def learn(self, given: int, num_tokens: int, learned_before: int = 0) -> None:
        """Learn that an output estimated as `given` has `num_tokens`, not `learned_before`."""
        ratio, before = num_tokens / given, learned_before / given
        self._num_known += not learned_before
        self._estimated += 0 if learned_before else given
        self._num_tokens += num_tokens - learned_before
        self._ratios += ratio - before
        self._squares += ratio**2 - before**2
        prior = self._prior_requests * self._estimated / self._num_known
        self.scale = (self._num_tokens + prior) / (self._estimated + prior)
        squares = self._prior_requests * _PRIOR_DEVIATION**2
        squares += max(0.0, self._squares - self._ratios**2 / self._num_known)
        self.deviation = math.sqrt(squares / (self._prior_requests + self._num_known))
