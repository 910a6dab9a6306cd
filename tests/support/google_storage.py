"""A double of Google Cloud Storage's XML API, which is S3's but for the names of headers, and
preconditions: they compare generations of objects, not ETags.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterable
from typing import Any
from urllib.parse import quote, unquote

App = Callable[[dict[str, Any], Callable[..., Any]], Iterable[bytes]]


class GoogleStorage:
    """Around a WSGI application of S3: objects get generations, which writes compare."""

    def __init__(self, s3: App) -> None:
        self._s3 = s3
        self.busy = 0
        """So many requests are answered with 429 first."""
        self._lock = threading.Lock()
        self._generations: dict[str, int] = {}
        self._numbers = itertools.count(1_700_000_000_000_001)

    def __call__(self, environ: dict[str, Any], start: Callable[..., Any]) -> Iterable[bytes]:
        if self.busy:
            self.busy -= 1
            start("429 Too Many Requests", [("Content-Length", "0")])
            return []
        wanted = environ.pop("HTTP_X_GOOG_IF_GENERATION_MATCH", None)
        if (source := environ.pop("HTTP_X_GOOG_COPY_SOURCE", None)) is not None:
            environ["HTTP_X_AMZ_COPY_SOURCE"] = unquote(source)
        environ["HTTP_AUTHORIZATION"] = "AWS test:test"
        uri = quote(environ["PATH_INFO"].encode("latin-1"))  # Google's clients escape more
        environ["RAW_URI"] = environ["REQUEST_URI"] = f"{uri}?{environ['QUERY_STRING']}"
        if environ["REQUEST_METHOD"] in ("GET", "HEAD"):
            return self._pass_on(environ, start)
        with self._lock:
            now = self._generations.get(environ["PATH_INFO"], 0)
            if wanted is not None and int(wanted) != now:
                environ["wsgi.input"].read(int(environ.get("CONTENT_LENGTH") or 0))
                start("412 Precondition Failed", [("Content-Type", "application/xml")])
                return [b"<Error><Code>PreconditionFailed</Code></Error>"]
            return self._pass_on(environ, start)

    def _pass_on(self, environ: dict[str, Any], start: Callable[..., Any]) -> Iterable[bytes]:
        path, method, query = (
            environ[key] for key in ("PATH_INFO", "REQUEST_METHOD", "QUERY_STRING")
        )
        is_write = method == "PUT" and "partNumber=" not in query
        is_write |= method == "POST" and query.startswith("uploadId=")

        def answer(status: str, headers: list[tuple[str, str]], *rest: Any) -> Any:
            if status.startswith("2") and is_write:
                self._generations[path] = next(self._numbers)
            elif status.startswith("2") and method == "DELETE" and not query:
                self._generations.pop(path, None)
            if path in self._generations:
                headers = [*headers, ("x-goog-generation", str(self._generations[path]))]
            return start(status, headers, *rest)

        return self._s3(environ, answer)
