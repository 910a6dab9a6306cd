"""An HTTP server on 127.0.0.1 with a thread for each connection, for synchronous tests."""

from __future__ import annotations

import json
import ssl
import threading
from collections.abc import Callable, Iterable
from datetime import UTC, datetime, timedelta
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import chain
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl, urlsplit

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from support.kubernetes.objects import ApiError


class Request(BaseHTTPRequestHandler):
    """A request, and the way to answer it."""

    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    server: HttpServer
    body: bytes

    def respond(self) -> None:
        """Let the server's application answer, or else answer with the error that it raised."""
        self.body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        try:
            self.server.application(self)
        except ApiError as error:
            self.send_object(error.code, error.body())
        except ConnectionError:  # the client has gone
            self.close_connection = True

    do_GET = do_POST = do_PUT = do_PATCH = do_DELETE = respond  # noqa: N815

    @property
    def query(self) -> dict[str, str]:
        return dict(parse_qsl(urlsplit(self.path).query))

    def send_object(self, code: int, answer: Any) -> None:
        self.send_bytes(code, json.dumps(answer).encode())

    def send_bytes(self, code: int, data: bytes, content_type: str = "application/json") -> None:
        self.send_response(code)
        self.send_header("Content-Type", content_type)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def send_stream(self, lines: Iterable[bytes]) -> None:
        """Answer with JSON, line by line as they come."""
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        for line in chain(lines, [b""]):
            self.wfile.write(b"%x\r\n%s\r\n" % (len(line), line))

    def log_message(self, *_: Any) -> None:
        """Nothing goes to stderr."""


class HttpServer(ThreadingHTTPServer):
    """Answers by `application` from construction until `close`."""

    daemon_threads = True
    request_queue_size = 128

    def __init__(
        self, application: Callable[[Request], None], context: ssl.SSLContext | None = None
    ) -> None:
        super().__init__(("127.0.0.1", 0), Request)
        self.application = application
        if context is not None:
            self.socket = context.wrap_socket(self.socket, server_side=True)
        self._thread = threading.Thread(target=self.serve_forever, args=(0.05,), daemon=True)
        self._thread.start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"

    def close(self) -> None:
        self.shutdown()
        self._thread.join()
        self.server_close()


def self_signed(folder: Path) -> ssl.SSLContext:
    """For a server whose clients don't verify it, as API servers their kubelets by default."""
    key, today = ec.generate_private_key(ec.SECP256R1()), datetime.now(UTC)
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "kubelet")])
    builder = x509.CertificateBuilder().subject_name(name).issuer_name(name)
    builder = builder.public_key(key.public_key()).serial_number(x509.random_serial_number())
    builder = builder.not_valid_before(today - timedelta(days=1))
    certificate = builder.not_valid_after(today + timedelta(days=1)).sign(key, hashes.SHA256())
    pem = serialization.Encoding.PEM
    format_, encryption = serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    path = folder / "kubelet.pem"
    path.write_bytes(key.private_bytes(pem, format_, encryption) + certificate.public_bytes(pem))
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(path)
    return context
