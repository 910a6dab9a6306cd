"""An HTTPS server on 127.0.0.1 that is really closed when it says so."""

from __future__ import annotations

import asyncio
import ssl

from aiohttp import web

# How long a connection may take to say goodbye: clients that keep theirs don't answer.
_FAREWELL_S = 0.005
# How long those that are still shaking hands may take.
_HANDSHAKES_S = 0.5


class HttpsServer:
    """Serves an application. `port` is chosen at the first start, and kept."""

    def __init__(self, app: web.Application) -> None:
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.2)
        self.port = 0

    async def start(self, context: ssl.SSLContext) -> None:
        await self._runner.setup()
        factory = self._runner.server
        assert factory is not None
        self._server = await asyncio.get_running_loop().create_server(
            factory, "127.0.0.1", self.port, ssl=context, ssl_shutdown_timeout=_FAREWELL_S
        )
        self.port = self._server.sockets[0].getsockname()[1]

    async def close(self) -> None:
        """Stop listening, and end all connections."""
        await stop_accepting(self._server)
        self._server.close()
        await self._runner.cleanup()
        await asyncio.sleep(4 * _FAREWELL_S)


async def stop_accepting(server: asyncio.Server) -> None:
    """Wait for the connections that are accepted to arrive, so that they can be closed.

    A server of asyncio that is closed before that forgets them, and they stay open for ever.
    """
    loop = asyncio.get_running_loop()
    for each in server.sockets:
        loop.remove_reader(each.fileno())
    if arriving := {each for each in asyncio.all_tasks() if _accepts(each)}:
        await asyncio.wait(arriving, timeout=_HANDSHAKES_S)


def _accepts(task: asyncio.Task[object]) -> bool:
    """Whether a task is asyncio's own, between a connection's accept and its handshake's end."""
    return getattr(task.get_coro(), "__name__", "") == "_accept_connection2"
