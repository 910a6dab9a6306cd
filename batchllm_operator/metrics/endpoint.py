"""The endpoint: GET /metrics, from threads that end with the process."""

from __future__ import annotations

import logging
import socket
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from socketserver import TCPServer, ThreadingMixIn
from typing import Any, ClassVar, Final
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer

from prometheus_client import CollectorRegistry, make_wsgi_app

from batchllm_operator.metrics.address import MetricsAddress
from batchllm_operator.metrics.collector import ShardCollector

_PATH: Final = "/metrics"
_CLIENT_PATIENCE_S: Final = 10.0
"""How long a client may take over a request: it holds a thread."""
_log = logging.getLogger(__name__)

_Environ = dict[str, Any]
_StartResponse = Callable[..., Any]


class _Handler(WSGIRequestHandler):
    timeout = _CLIENT_PATIENCE_S

    def log_message(self, format: str, *args: Any) -> None:
        """Say nothing of each scrape."""


class _Server(ThreadingMixIn, WSGIServer):
    daemon_threads: ClassVar[bool] = True  # type: ignore[misc]

    def server_bind(self) -> None:
        """Bind without asking for the host's name: where DNS is down, that takes minutes."""
        TCPServer.server_bind(self)
        self.server_name, self.server_port = self.server_address[:2]  # type: ignore[assignment]
        self.setup_environ()


class _Server6(_Server):
    address_family = socket.AF_INET6


@contextmanager
def serving_metrics(
    address: MetricsAddress | None, collector: ShardCollector
) -> Iterator[MetricsAddress | None]:
    """Serve what `collector` makes for as long as the context lasts; yields where.

    Metrics never stop a run: if the address can't be had, that is a warning, and nothing is
    served.

    Args:
        address: where to listen; port 0 for any free one, None for not at all.
        collector: is asked at each scrape, in a thread of its own.
    """
    server = _listen(address, collector) if address is not None else None
    if address is None or server is None:
        yield None
        return
    thread = threading.Thread(target=server.serve_forever, name="metrics", daemon=True)
    try:
        thread.start()
    except RuntimeError as error:  # the machine gives no more threads
        _log.warning("no metrics: %s", error)
        server.server_close()
        yield None
        return
    served = MetricsAddress(address.host, server.server_port)
    _log.info("metrics: http://%s%s", served, _PATH)
    try:
        yield served
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def _listen(address: MetricsAddress, collector: ShardCollector) -> _Server | None:
    kind = _Server6 if ":" in address.host else _Server
    try:
        server = kind((address.host, address.port), _Handler)
    except (OSError, UnicodeError) as error:  # the latter of a host that can't be a name
        _log.warning("no metrics: can't listen on %s: %s", address, error)
        return None
    registry = CollectorRegistry(auto_describe=False)  # doesn't ask before the first scrape
    registry.register(collector)
    server.set_app(_only_metrics(make_wsgi_app(registry)))
    return server


def _only_metrics(app: Callable[..., Iterable[bytes]]) -> Callable[..., Iterable[bytes]]:
    """`app`, answering to GET /metrics alone."""

    def answer(environ: _Environ, start_response: _StartResponse) -> Iterable[bytes]:
        if environ["PATH_INFO"] != _PATH:
            return _refuse(start_response, "404 Not Found")
        if environ["REQUEST_METHOD"] != "GET":
            return _refuse(start_response, "405 Method Not Allowed", ("Allow", "GET"))
        # A choice of names works on names that are known beforehand only.
        return app({**environ, "QUERY_STRING": ""}, start_response)

    return answer


def _refuse(
    start_response: _StartResponse, status: str, *headers: tuple[str, str]
) -> Iterable[bytes]:
    start_response(status, [("Content-Type", "text/plain; charset=utf-8"), *headers])
    return [f"{status}: GET {_PATH}\n".encode()]
