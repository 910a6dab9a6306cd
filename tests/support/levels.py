"""How much a test tries at its level: little in `make test`, all in `make test-all`."""

from __future__ import annotations

from hypothesis import settings

_FEW = 25


def examples(full: int, few: int = _FEW) -> int:
    """For `max_examples` of Hypothesis: all of them in `make test-all`, else a few."""
    return full if settings.get_current_profile_name() == "full" else min(full, few)
