"""An event loop in a thread of its own, for servers beside synchronous tests."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


class LoopThread:
    """Runs coroutines until it is closed; then no task and no thread is left."""

    def __init__(self, name: str) -> None:
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self.loop.run_forever, name=name, daemon=True)
        self._thread.start()

    def run(self, work: Coroutine[Any, Any, T], limit_s: float = 30.0) -> T:
        """Run a coroutine in the loop, from another thread, and return its result."""
        return asyncio.run_coroutine_threadsafe(work, self.loop).result(limit_s)

    def close(self) -> None:
        """Cancel what still runs, and end the thread. May be called twice."""
        if self.loop.is_closed():
            return
        self.run(self._cancel_all())
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join()
        self.loop.run_until_complete(self.loop.shutdown_asyncgens())
        self.loop.run_until_complete(self.loop.shutdown_default_executor())
        self.loop.close()

    async def _cancel_all(self) -> None:
        others = asyncio.all_tasks() - {asyncio.current_task()}
        for task in others:
            task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.gather(*others, return_exceptions=True)
        for _ in range(5):  # transports that were aborted say so in the next rounds
            await asyncio.sleep(0)
