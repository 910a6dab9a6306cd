"""An API server of Airflow that has a health page and nothing else."""

from __future__ import annotations

import json
import ssl
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, HTTPServer
from threading import Thread
from typing import Any


@dataclass
class ApiServer:
    """What it answers, each once, and then the last over and over; None closes the connection."""

    url: str
    answers: list[bytes | None]


def health(triggerer: str | None, metadatabase: str = "healthy") -> bytes:
    """The health page."""
    components = {"metadatabase": metadatabase, "triggerer": triggerer}
    return json.dumps({name: {"status": status} for name, status in components.items()}).encode()


@contextmanager
def api_server(
    answers: Sequence[bytes | None], tls: ssl.SSLContext | None = None
) -> Iterator[ApiServer]:
    """Answer until the end, on 127.0.0.1."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            assert self.path == "/api/v2/monitor/health"
            answer = given.answers.pop(0) if len(given.answers) > 1 else given.answers[0]
            if answer is None:
                return
            self.send_response(200)
            self.send_header("Content-Length", str(len(answer)))
            self.end_headers()
            self.wfile.write(answer)

        def log_message(self, *_: Any) -> None:
            """Keep quiet."""

    class Server(HTTPServer):
        def handle_error(self, *_: Any) -> None:
            """A client that doesn't trust this server goes away."""

    with Server(("127.0.0.1", 0), Handler) as server:
        if tls is not None:
            server.socket = tls.wrap_socket(server.socket, server_side=True)
        scheme = "http" if tls is None else "https"
        given = ApiServer(f"{scheme}://127.0.0.1:{server.server_port}", list(answers))
        thread = Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
        thread.start()
        try:
            yield given
        finally:
            server.shutdown()
            thread.join()
