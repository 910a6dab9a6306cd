"""Reads a pod's log in pieces, and passes each line on once."""

from __future__ import annotations

import math
import re
import time
from collections.abc import Callable
from datetime import datetime
from typing import Any, Final

from aiohttp import ClientError
from kubernetes_asyncio.client.exceptions import ApiException

_FORBIDDEN: Final = 403
_FIRST_LINES: Final = 2_000
"""Lines to read of a log that was written before the first read."""
_MAX_BYTES: Final = 4 << 20
_MARGIN_S: Final = 2.0
_LINE: Final = re.compile(
    rb"(\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d)(?:\.(\d{1,9}))?(Z|[+-]\d\d:\d\d) ?(.*)"
)


class LogReader:
    """Passes on new lines of a container's log, and reports a failing read once.

    The API returns lines with the node's times, but takes only ages, in whole seconds. Ages count
    from the previous read, by this machine's monotonic clock; times are compared only with each
    other. So no two clocks have to agree.

    Args:
        name: the pod's, with its namespace and container.
        log: receives each line.
        last_ns: the attribute of an earlier reader of the same log, which this one continues.
    """

    def __init__(
        self,
        name: str,
        namespace: str,
        container: str,
        log: Callable[[str], None],
        last_ns: int = -1,
    ) -> None:
        self._name, self._namespace, self._container = name, namespace, container
        self._log = log
        self._read_at: float | None = None
        self.last_ns = last_ns
        """The last line's time by the node's clock, in nanoseconds since 1970; -1 before it."""
        self._trouble = ""

    async def pass_on(self, api: Any, request_s: float) -> bool:
        """Log new lines; returns whether the log could be read."""
        started_at = time.monotonic()
        arguments: dict[str, Any] = {"tail_lines": _FIRST_LINES}
        if self._read_at is not None:
            age_s = started_at - self._read_at
            arguments = {"since_seconds": math.ceil(age_s + request_s + _MARGIN_S)}
        try:
            response = await api.read_namespaced_pod_log(
                self._name,
                self._namespace,
                container=self._container,
                timestamps=True,
                limit_bytes=_MAX_BYTES,
                _preload_content=False,
                _request_timeout=request_s,
                **arguments,
            )
            data: bytes = await response.read()
        except (ApiException, ClientError, OSError, TimeoutError) as error:
            return self._fail(type(error).__name__)
        if response.status >= 400:
            hint = "; may this Airflow read pods' logs?" if response.status == _FORBIDDEN else ""
            return self._fail(f"status {response.status}{hint}")
        self._read_at, self._trouble = started_at, ""
        for line in data.split(b"\n"):
            self._pass_line_on(line)
        if len(data) >= _MAX_BYTES:
            self._log("(lines were left out: the pod writes more than can be read)")
        return True

    def _fail(self, trouble: str) -> bool:
        if trouble != self._trouble:
            self._trouble = trouble
            self._log(f"Can't read the log of pod {self._name}: {trouble}")
        return False

    def _pass_line_on(self, line: bytes) -> None:
        """Log one line; of a progress bar, which overwrites itself, its last state."""
        match = _LINE.match(line)
        if match is None:
            return  # cut off at the limit, or the end of the text
        seconds = datetime.fromisoformat((match[1] + match[3]).decode()).timestamp()
        time_ns = int(seconds) * 10**9 + int((match[2] or b"0").ljust(9, b"0"))
        if time_ns <= self.last_ns:
            return
        self.last_ns = time_ns
        text = match[4].decode("utf-8", errors="replace").rstrip("\r").rpartition("\r")[2]
        if text:
            self._log(text)
