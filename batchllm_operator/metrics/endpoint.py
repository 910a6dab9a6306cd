"""Serves GET /metrics from daemon threads."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final

from prometheus_client import CollectorRegistry, start_http_server

from batchllm_operator.metrics.collector import ShardCollector

ADDRESS_VARIABLE: Final = "BATCHLLM_METRICS_PORT"
"""Environment variable with the address, for `batchllm run` without `--metrics-port`."""
_LOCAL: Final = "127.0.0.1"
_ADDRESS: Final = re.compile(r"(?:(?P<host>[^\s:\[\]]+|\[[0-9A-Fa-f:.]+\]):)?(?P<port>[0-9]{1,5})")
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


@contextmanager
def serving_metrics(
    address: MetricsAddress | None, collector: ShardCollector
) -> Iterator[MetricsAddress | None]:
    """Serve the metrics of `collector` within the context; yields the address, None for none.

    The collector is called at each scrape, in a thread. Metrics never stop a run: if the address
    (port 0 for any free one) can't be used, a warning is logged and nothing is served.
    """
    if address is None:
        yield None
        return
    registry = CollectorRegistry(auto_describe=False)  # no collection before the first scrape
    registry.register(collector)
    try:
        server, thread = start_http_server(address.port, address.host, registry)
    # UnicodeError: an invalid host name; RuntimeError: too many threads.
    except (OSError, UnicodeError, RuntimeError) as error:
        _log.warning("no metrics: can't listen on %s: %s", address, error)
        yield None
        return
    served = MetricsAddress(address.host, server.server_port)
    _log.info("metrics: http://%s/metrics", served)
    try:
        yield served
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
