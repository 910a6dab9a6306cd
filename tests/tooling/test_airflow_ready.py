"""`scripts/airflow_ready.py` on an API server that fails now and then."""

import os
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from threading import Thread
from typing import Any
from urllib.error import HTTPError

import pytest
from airflow_ready import Api, NotReadyError, Wait, set_pool

POOL = "/api/v2/pools"


def requests_to_set_a_pool(*statuses: int, limit_s: float = 60) -> Iterator[str]:
    """The requests that a server gets, which answers with these statuses in turn."""
    left, requests = list(statuses), list[str]()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["Content-Length"]))
            requests.append(f"{self.command} {self.path}")
            self.send_response(left.pop(0))
            self.send_header("Content-Length", "2")
            self.end_headers()
            self.wfile.write(b"{}")

        do_PATCH = do_POST  # noqa: N815

        def log_message(self, *_: Any) -> None:
            """Keep quiet."""

    with HTTPServer(("127.0.0.1", 0), Handler) as http:
        thread = Thread(target=http.serve_forever, kwargs={"poll_interval": 0.05})
        thread.start()
        try:
            url, wait = f"http://127.0.0.1:{http.server_port}", Wait(os.getpid(), limit_s)
            set_pool(Api(url, wait), "gpu", 2)
        finally:
            http.shutdown()
            thread.join()
            yield from requests


def test_a_server_that_fails_is_asked_again() -> None:
    requests = requests_to_set_a_pool(500, 503, 409, 500, 200)
    assert list(requests) == [f"POST {POOL}"] * 3 + [f"PATCH {POOL}/gpu?update_mask=slots"] * 2


def test_a_request_that_is_refused_is_not_made_again() -> None:
    requests = requests_to_set_a_pool(422)
    assert next(requests) == f"POST {POOL}"
    with pytest.raises(HTTPError, match="422"):
        next(requests)


def test_a_server_that_keeps_failing_is_given_up_with_its_answer() -> None:
    with pytest.raises(NotReadyError, match=f"no answer to POST {POOL}: HTTP Error 500"):
        list(requests_to_set_a_pool(500, limit_s=-1))
