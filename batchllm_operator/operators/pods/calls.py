"""Calls of the cluster's API with retries within time limits."""

from __future__ import annotations

import logging
import math
import random
import threading
import time
from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass
from typing import Any, Final, TypeVar

from kubernetes.client import CoreV1Api
from kubernetes.client.exceptions import ApiException
from urllib3.exceptions import HTTPError

from batchllm_operator.operators.pods.api_errors import is_passing, message_of

_REQUEST_S: Final = 30.0
_SHORTEST_REQUEST_S: Final = 0.5
"""A request is sent even if there is no time to wait for its answer."""
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.5, 15.0
_Answer = TypeVar("_Answer")


class StoppedError(Exception):
    """The task was killed while a call waited for the cluster."""


@dataclass
class ClusterCalls:
    """Repeats calls that fail for a passing reason, for `patience_s`.

    Passing reasons are no connection, 429, 5xx, an expired token, or a conflict over a quota, so
    that a restart of the API server goes unnoticed.
    """

    connect: Callable[[], CoreV1Api]
    """Returns a client without retries of its own; called again after each failure."""
    log: logging.Logger | Any
    _: KW_ONLY
    patience_s: float
    """Seconds for each call."""
    limit_s: float | None = None
    """Seconds for all calls together, from now on; None for no limit."""
    is_stopped: Callable[[], bool]
    """Whether the task was killed meanwhile."""

    def __post_init__(self) -> None:
        self._over_at = time.monotonic() + (math.inf if self.limit_s is None else self.limit_s)
        self._api = self.connect()
        self._caller: int | None = None

    @property
    def is_over(self) -> bool:
        return time.monotonic() >= self._over_at

    def interrupt(self) -> None:
        """End a running call, when called from a signal handler in its thread.

        Raises:
            StoppedError: there is one; whether the cluster carries it out is unknown.
        """
        if self._caller == threading.get_ident():
            raise StoppedError

    def call(self, name: str, *args: Any, **options: Any) -> Any:
        """Call a method of the current client.

        Raises:
            ApiException: the cluster refuses.
            HTTPError: it doesn't answer in time.
            StoppedError: the task was killed.
        """
        return self.retried(lambda api, **limits: getattr(api, name)(*args, **options, **limits))

    def call_unlogged(self, name: str, *args: Any) -> None:
        """Like `call`, but discards the answer, which the client would log when debugging."""
        answer = self.call(name, *args, _preload_content=False)
        answer.drain_conn()  # else the next request on this connection fails
        answer.release_conn()

    def retried(self, function: Callable[..., _Answer]) -> _Answer:
        """Call `function(api, _request_timeout=...)`, which may make several requests."""
        give_up_at = min(time.monotonic() + self.patience_s, self._over_at)
        pause_s = _FIRST_PAUSE_S
        while True:
            if self.is_stopped():
                raise StoppedError
            left_s = give_up_at - time.monotonic()
            try:
                self._caller = threading.get_ident()
                try:
                    return function(
                        self._api,
                        _request_timeout=max(_SHORTEST_REQUEST_S, min(_REQUEST_S, left_s)),
                    )
                finally:
                    self._caller = None
            except (ApiException, HTTPError) as error:
                left_s = give_up_at - time.monotonic()
                if not is_passing(error) or left_s <= 0:
                    raise
                self.log.warning("The cluster's API: %s; trying again", message_of(error))
                self.pause(min(left_s, pause_s * random.uniform(0.5, 1.0)))
                pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
                self._api = self.connect()

    def pause(self, seconds: float) -> None:
        """Sleep; raises `StoppedError` if the task is killed meanwhile."""
        until = time.monotonic() + seconds
        while (left_s := until - time.monotonic()) > 0:
            if self.is_stopped():
                raise StoppedError
            time.sleep(min(left_s, 0.5))
