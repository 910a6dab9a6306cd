"""What a container has written, line by line, with the time of each line."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass
from datetime import UTC, datetime

_LONGEST_LINE = 16 * 1024  # container runtimes split there


@dataclass(frozen=True, slots=True)
class LogQuery:
    """Which lines, as the kubelet's endpoint and the API name it."""

    follow: bool = False
    timestamps: bool = False
    tail_lines: int | None = None
    since_ns: int | None = None
    limit_bytes: int | None = None


def rfc3339_nano(time_ns: int) -> str:
    """The time as container runtimes write it, in UTC."""
    seconds, rest = divmod(time_ns, 10**9)
    return f"{datetime.fromtimestamp(seconds, UTC):%Y-%m-%dT%H:%M:%S}.{rest:09d}Z"


class ContainerLog:
    """Lines with their times; readers that follow wait for more until `close`."""

    def __init__(self) -> None:
        self._lines: list[tuple[int, bytes]] = []
        self._partial = b""
        self._closed = False
        self._more = asyncio.Condition()

    async def write(self, data: bytes) -> None:
        """Add output; what has no end of line yet waits for it."""
        *whole, rest = (self._partial + data).split(b"\n")
        lines = [line + b"\n" for line in whole]
        while len(rest) >= _LONGEST_LINE:
            lines.append(rest[:_LONGEST_LINE])
            rest = rest[_LONGEST_LINE:]
        self._partial = rest
        await self._add(lines)

    async def close(self) -> None:
        """Nothing comes any more."""
        await self._add([self._partial] if self._partial else [])
        self._partial = b""
        async with self._more:
            self._closed = True
            self._more.notify_all()

    async def _add(self, lines: list[bytes]) -> None:
        if lines:
            now = time.time_ns()
            async with self._more:
                self._lines += [(now + at, line) for at, line in enumerate(lines)]
                self._more.notify_all()

    def tail(self, max_lines: int, max_bytes: int) -> str:
        """The end of the log, for a termination message."""
        text = b"".join(line for _, line in self._lines[-max_lines:])
        return text[-max_bytes:].decode(errors="replace")

    async def read(self, query: LogQuery) -> AsyncIterator[bytes]:
        """The lines that a query asks for."""
        at, left = self._first(query), query.limit_bytes
        while True:
            while at < len(self._lines):
                time_ns, line = self._lines[at]
                at += 1
                if query.timestamps:
                    line = rfc3339_nano(time_ns).encode() + b" " + line
                if left is not None:
                    line = line[:left]
                    left -= len(line)
                if line:
                    yield line
                if left == 0:
                    return
            if not query.follow or self._closed:
                return
            async with self._more:
                while at >= len(self._lines) and not self._closed:
                    await self._more.wait()

    def _first(self, query: LogQuery) -> int:
        first = 0
        if query.tail_lines is not None:
            first = max(0, len(self._lines) - query.tail_lines)
        if query.since_ns is not None:
            since = query.since_ns
            later = (i for i, (at, _) in enumerate(self._lines) if at >= since)
            first = max(first, next(later, len(self._lines)))
        return first
