"""An S3 server, and a proxy in front of it that fails as S3 and networks do."""

import http.client
import logging
import os
import signal
import threading
import time
from collections.abc import Callable, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Final

FAULTS: Final = ("500", "timeout", "slow_down", "lost_response")
_SILENCE_S: Final = 2.0  # the clients' own limit is 1 s, where they have one that can be set
_ERROR: Final = b"<?xml version='1.0'?><Error><Code>%s</Code><Message>no</Message></Error>"
_ERRORS: Final = {"500": (500, _ERROR % b"InternalError"), "slow_down": (503, _ERROR % b"SlowDown")}


class S3Server:
    """moto's server, in a process of its own."""

    def __init__(self) -> None:
        """Fork it; the caller has no thread yet."""
        here, there = os.pipe()
        self.pid = os.fork()
        if self.pid == 0:
            os.close(here)
            _serve(there)
        os.close(there)
        with os.fdopen(here) as pipe:
            self.address = pipe.readline().strip()

    def close(self) -> None:
        """End it."""
        os.kill(self.pid, signal.SIGKILL)
        os.waitpid(self.pid, 0)


def _serve(pipe: int) -> None:
    parent = os.getppid()
    try:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        from moto.server import ThreadedMotoServer

        logging.getLogger("werkzeug").setLevel(logging.ERROR)
        server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
        server.start()
        host, port = server.get_host_and_port()
        os.write(pipe, f"{host}:{port}\n".encode())
        while os.getppid() == parent:
            time.sleep(0.5)
    finally:
        os._exit(0)


class FaultyProxy(ThreadingHTTPServer):
    """Hands requests on, except for a burst of them once it is armed."""

    daemon_threads = True
    request_queue_size = 128

    def __init__(self, address: str) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.upstream = address
        self._lock = threading.Lock()
        self._kind, self._burst = "", range(0)
        self._kill: Callable[[], object] | None = None
        self.errors: dict[str, tuple[int, bytes]] = dict(_ERRORS)
        """Status and body of answers, by kind of fault."""
        self.num_seen = 0
        """Requests since it was armed."""
        self.num_faults = 0
        """... that failed."""
        threading.Thread(target=self.serve_forever, args=(0.02,), daemon=True).start()

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"

    def arm(
        self, kind: str = "", burst: range = range(0), kill: Callable[[], object] | None = None
    ) -> None:
        """From here on, the requests whose numbers (from 0) are in `burst` fail.

        Args:
            kind: one of `FAULTS`, or `kill_before` and `kill_after` the request was handed on.
            burst: which ones.
            kill: what kills the client.
        """
        with self._lock:
            self._kind, self._burst, self._kill = kind, burst, kill
            self.num_seen = self.num_faults = 0

    def fault_of(self, command: str, path: str) -> str:
        """The kind of fault for a request that has just come; "" for none."""
        with self._lock:
            self.num_seen += 1
            if self.num_seen - 1 not in self._burst:
                return ""
            self.num_faults += 1
            return self._kind

    def kill_client(self) -> None:
        if self._kill is not None:
            self._kill()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Clients that hang up are no news."""


class _Handler(BaseHTTPRequestHandler):
    server: FaultyProxy
    protocol_version = "HTTP/1.1"

    def log_message(self, format: str, *args: Any) -> None:
        """Nothing."""

    def handle_any(self) -> None:
        proxy = self.server
        body = self.read_body()
        kind = proxy.fault_of(self.command, self.path)
        if kind == "kill_before":
            proxy.kill_client()
        if kind in proxy.errors:
            status, text = proxy.errors[kind]
            self.answer(status, {"Content-Type": "application/xml"}, text)
            return
        if kind == "timeout":
            time.sleep(_SILENCE_S)
        if kind in ("timeout", "kill_before"):
            self.close_connection = True
            return
        upstream = http.client.HTTPConnection(proxy.upstream)
        left_out = ("expect", "transfer-encoding", "connection")
        headers = {n: value for n, value in self.headers.items() if n.lower() not in left_out}
        upstream.request(self.command, self.path, body, headers)
        reply = upstream.getresponse()
        data = reply.read()
        upstream.close()
        if kind == "kill_after":
            proxy.kill_client()
        if kind in ("lost_response", "kill_after"):
            self.close_connection = True
            return
        self.answer(reply.status, dict(reply.getheaders()), data)

    def read_body(self) -> bytes:
        """All of it; AWS's C++ client sends it in chunks."""
        if self.headers.get("Transfer-Encoding", "").lower() != "chunked":
            return self.rfile.read(int(self.headers.get("Content-Length", 0)))
        body = b""
        while size := int(self.rfile.readline().partition(b";")[0], 16):
            body += self.rfile.read(size)
            self.rfile.readline()
        while self.rfile.readline().strip():
            pass  # trailers
        return body

    def answer(self, status: int, headers: Mapping[str, str], data: bytes) -> None:
        self.send_response_only(status)
        for name, value in headers.items():
            if name.lower() not in ("connection", "transfer-encoding", "content-length"):
                self.send_header(name, value)
        length = headers.get("Content-Length", str(len(data)))
        self.send_header("Content-Length", length if self.command == "HEAD" else str(len(data)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)

    do_GET = do_PUT = do_HEAD = do_POST = do_DELETE = handle_any  # noqa: N815
