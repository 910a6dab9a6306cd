"""How many requests an engine takes before each step.

Adding a request takes vLLM about 0.39 ms, in the process that steps. So the engine begins with a
few, and takes the others while it works, a few more than have finished: 32 take 12 ms, about a
step's time, in which the device is busy with the step before.
"""

from __future__ import annotations

from typing import Final

_FIRST: Final = 64
_MORE: Final = 32
_LOOK_AHEAD: Final = 2
"""Requests held by the engine, as a multiple of the most that it runs at a time, so that its
scheduler never runs dry."""


def most_in_flight(max_num_seqs: int) -> int:
    """Requests that an engine holds at most, if it runs `max_num_seqs` at a time."""
    return _LOOK_AHEAD * max_num_seqs


def num_to_feed(num_in_flight: int, num_finished: int, most: int) -> int:
    """Requests to add before the next step.

    Steps that finish many requests are followed by ones that get as many.

    Args:
        num_in_flight: requests that the engine holds.
        num_finished: requests that the last step has finished; 0 before the first.
        most: see `most_in_flight`.
    """
    return min(max(_FIRST - num_in_flight, num_finished + _MORE), most - num_in_flight)
