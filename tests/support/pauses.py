"""A clock that a loop of retries can be run by, and what its pauses have to be like."""

MANY = 200


class Clock:
    """Sleeps at once, and remembers for how long."""

    def __init__(self) -> None:
        self.pauses: list[float] = []
        self.now = 0.0

    def sleep(self, seconds: float) -> None:
        self.pauses.append(seconds)
        self.now += seconds

    def monotonic(self) -> float:
        return self.now

    def time(self) -> float:
        return self.now


def check_pauses(series: list[list[float]], longest_s: float) -> None:
    """Series of pauses: none too long, and no two the same."""
    assert all(0 <= pause_s <= longest_s for pauses in series for pause_s in pauses)
    assert len({tuple(pauses) for pauses in series}) == len(series)
