"""The HTTPS endpoint of a kubelet, where an API server reads the logs of containers."""

from __future__ import annotations

import asyncio
import ssl
import time
from collections.abc import Callable

from aiohttp import web
from support.kubernetes.container_log import ContainerLog, LogQuery
from support.kubernetes.https_server import HttpsServer

# (namespace, pod, container) -> its log, or the status and text of a refusal.
FindLog = Callable[[str, str, str], ContainerLog | tuple[int, str]]


class KubeletServer:
    """Serves `GET /containerLogs/{namespace}/{pod}/{container}`.

    Any client is answered: real kubelets want a client certificate, or a token.
    """

    def __init__(self, find_log: FindLog) -> None:
        self._find_log = find_log
        app = web.Application()
        app.router.add_get("/containerLogs/{namespace}/{pod}/{container}", self._answer)
        self._server = HttpsServer(app)

    @property
    def port(self) -> int:
        return self._server.port

    async def start(self, context: ssl.SSLContext) -> None:
        await self._server.start(context)

    async def close(self) -> None:
        """Stop listening, and cut those who follow a log."""
        await self._server.close()

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        where = request.match_info
        found = self._find_log(where["namespace"], where["pod"], where["container"])
        if not isinstance(found, ContainerLog):
            code, text = found
            return web.Response(status=code, text=text)
        response = web.StreamResponse(headers={"Content-Type": "text/plain"})
        try:
            await response.prepare(request)
            async for line in found.read(_query(request)):
                await response.write(line)
            await response.write_eof()
        except ConnectionError:  # the reader went away
            return response
        except asyncio.CancelledError:
            if request.transport is not None:
                request.transport.abort()
            raise
        return response


def _query(request: web.Request) -> LogQuery:
    query = request.query
    since_ns = None
    if "sinceSeconds" in query:
        since_ns = time.time_ns() - int(query["sinceSeconds"]) * 10**9
    return LogQuery(
        follow=query.get("follow") in ("true", "True", "1"),
        timestamps=query.get("timestamps") in ("true", "True", "1"),
        tail_lines=int(query["tailLines"]) if "tailLines" in query else None,
        since_ns=since_ns,
        limit_bytes=int(query["limitBytes"]) if "limitBytes" in query else None,
    )
