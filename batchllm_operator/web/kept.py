"""A short-lived cache, so that many viewers cost no more than one."""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import Any, Final, Generic, TypeVar

_T = TypeVar("_T")
_MAX_ENTRIES: Final = 64


@dataclass(slots=True)
class _Entry:
    lock: threading.Lock = field(default_factory=threading.Lock)
    made_at: float = float("-inf")
    value: Any = None


class Kept(Generic[_T]):
    """Values by key, each computed again once it is older than `keep_s` seconds.

    While one is computed, other callers wait for it, but not for long, as their threads are
    Airflow's. Exceptions aren't cached.
    """

    def __init__(
        self, keep_s: float, *, wait_s: float = 5.0, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._keep_s, self._wait_s, self._clock = keep_s, wait_s, clock
        self._lock = threading.Lock()
        self._entries: OrderedDict[Hashable, _Entry] = OrderedDict()

    def get(self, key: Hashable, make: Callable[[], _T]) -> _T:
        """The value of `key`, computed by `make` if there is no recent one.

        Raises:
            TimeoutError: the wait for another thread's computation took more than `wait_s` seconds.
        """
        with self._lock:
            entry = self._entries.setdefault(key, _Entry())
            self._entries.move_to_end(key)
            while len(self._entries) > _MAX_ENTRIES:
                self._entries.popitem(last=False)
        if not entry.lock.acquire(timeout=self._wait_s):
            raise TimeoutError
        try:
            if self._clock() - entry.made_at >= self._keep_s:
                entry.value = make()
                entry.made_at = self._clock()
            value: _T = entry.value
            return value
        finally:
            entry.lock.release()
