"""Serves GET /metrics from daemon threads."""

from __future__ import annotations

import logging
import re
import socket
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from socketserver import TCPServer
from typing import Any, Final
from wsgiref.simple_server import WSGIRequestHandler

from prometheus_client import CollectorRegistry, make_wsgi_app
from prometheus_client.exposition import ThreadingWSGIServer

from batchllm_operator.metrics.collector import ShardCollector

ADDRESS_VARIABLE: Final = "BATCHLLM_METRICS_PORT"
"""Environment variable with the address, for `batchllm run` without `--metrics-port`."""
_LOCAL: Final = "127.0.0.1"
_ADDRESS: Final = re.compile(r"(?:(?P<host>[^\s:\[\]]+|\[[0-9A-Fa-f:.]+\]):)?(?P<port>[0-9]{1,5})")
_PATH: Final = "/metrics"
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class MetricsAddress:
    """An address to listen on."""

    host: str
    """0.0.0.0 for all IPv4 addresses of the machine, :: for all of IPv6."""
    port: int

    @classmethod
    def parse(cls, text: str) -> MetricsAddress | None:
        """Parse `[HOST:]PORT`, with an IPv6 HOST in brackets. None for an empty text or port 0.

        Without a host, only this machine can read the metrics.

        Raises:
            ValueError: it isn't such an address.
        """
        if not text:
            return None
        match = _ADDRESS.fullmatch(text)
        if match is None or int(match["port"]) > 65535:
            raise ValueError(
                f"{text!r} isn't [HOST:]PORT with a port from 1 to 65535, such as 9400 or"
                " 0.0.0.0:9400; 0 is for none"
            )
        port = int(match["port"])
        return cls((match["host"] or _LOCAL).strip("[]"), port) if port else None

    def beside(self, number: int) -> MetricsAddress:
        """The address whose port is higher by `number`."""
        return MetricsAddress(self.host, self.port + number)

    def __str__(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{host}:{self.port}"


class _Handler(WSGIRequestHandler):
    timeout = 10.0
    """Seconds that a client, which occupies a thread, may take over a request."""

    def log_message(self, format: str, *args: Any) -> None:
        """Don't log scrapes."""


class _Server(ThreadingWSGIServer):
    def __init__(self, address: MetricsAddress) -> None:
        self.address_family = socket.AF_INET6 if ":" in address.host else socket.AF_INET
        super().__init__((address.host, address.port), _Handler)

    def server_bind(self) -> None:
        """Bind without a look-up of the host's name, which takes minutes if DNS is down."""
        TCPServer.server_bind(self)
        self.server_name, self.server_port = self.server_address[:2]  # type: ignore[assignment]
        self.setup_environ()


@contextmanager
def serving_metrics(
    address: MetricsAddress | None, collector: ShardCollector
) -> Iterator[MetricsAddress | None]:
    """Serve the metrics of `collector` within the context; yields the address, None for none.

    The collector is called at each scrape, in a thread. Metrics never stop a run: if the address
    (port 0 for any free one) can't be used, a warning is logged and nothing is served.
    """
    server = _listen(address, collector) if address is not None else None
    if address is None or server is None:
        yield None
        return
    thread = threading.Thread(target=server.serve_forever, name="metrics", daemon=True)
    try:
        thread.start()
    except RuntimeError as error:  # too many threads
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
    try:
        server = _Server(address)
    except (OSError, UnicodeError) as error:  # UnicodeError: an invalid host name
        _log.warning("no metrics: can't listen on %s: %s", address, error)
        return None
    registry = CollectorRegistry(auto_describe=False)  # no collection before the first scrape
    registry.register(collector)
    server.set_app(_only_metrics(make_wsgi_app(registry)))
    return server


def _only_metrics(app: Callable[..., Iterable[bytes]]) -> Callable[..., Iterable[bytes]]:
    """Restrict `app`, which answers at any path, to /metrics."""

    def answer(environ: dict[str, Any], start_response: Callable[..., Any]) -> Iterable[bytes]:
        if environ["PATH_INFO"] != _PATH:
            start_response("404 Not Found", [("Content-Type", "text/plain; charset=utf-8")])
            return [f"404 Not Found: GET {_PATH}\n".encode()]
        # Without the query: `name[]` selects only names that were registered, and none is.
        return app({**environ, "QUERY_STRING": ""}, start_response)

    return answer
