"""How much a test tries at its level: little in `make test`, all in `make test-all`."""

from collections.abc import Iterable

from hypothesis import settings

_FEW = 25


def examples(full: int, few: int = _FEW) -> int:
    """For `max_examples` of Hypothesis: all of them in `make test-all`, else a few."""
    return full if settings.get_current_profile_name() == "full" else min(full, few)


def some(values: Iterable[str], *, one_in: int, first: int = 0) -> list[str]:
    """For parameters of property tests: all of them in `make test-all`, else one in so many."""
    is_full = settings.get_current_profile_name() == "full"
    return list(values) if is_full else list(values)[first::one_in]
