"""`scripts/airflow_ready.py` on an API server that fails now and then."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from threading import Thread
from typing import Any
from urllib.error import HTTPError

import pytest
from airflow_ready import Api, NotReadyError, Wait, set_pool

POOL = "/api/v2/pools"


@pytest.fixture
def server() -> Iterator[Callable[..., tuple[str, list[str]]]]:
    """Starts one with the statuses it answers, in turn: its URL, and the requests it gets."""
    ends: list[Callable[[], None]] = []

    def start(*statuses: int) -> tuple[str, list[str]]:
        left, requests = list(statuses), []

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                self.rfile.read(int(self.headers["Content-Length"]))
                requests.append(f"{self.command} {self.path}")
                self.send_response(left.pop(0))
                self.send_header("Content-Length", "2")
                self.end_headers()
                self.wfile.write(b"{}")

            def do_PATCH(self) -> None:
                self.do_POST()

            def log_message(self, *_: Any) -> None:
                """Keep quiet."""

        http = HTTPServer(("127.0.0.1", 0), Handler)
        thread = Thread(target=http.serve_forever, kwargs={"poll_interval": 0.05})
        thread.start()
        ends.extend([http.shutdown, thread.join, http.server_close])
        return f"http://127.0.0.1:{http.server_port}", requests

    yield start
    for end in ends:
        end()


def test_a_server_that_fails_is_asked_again(
    server: Callable[..., tuple[str, list[str]]],
) -> None:
    url, requests = server(500, 503, 409, 500, 200)
    set_pool(Api(url, Wait(os.getpid(), limit_s=60)), "gpu", 2)
    assert requests == [f"POST {POOL}"] * 3 + [f"PATCH {POOL}/gpu?update_mask=slots"] * 2


def test_a_request_that_is_refused_is_not_made_again(
    server: Callable[..., tuple[str, list[str]]],
) -> None:
    url, requests = server(422)
    with pytest.raises(HTTPError, match="422"):
        set_pool(Api(url, Wait(os.getpid(), limit_s=60)), "gpu", 2)
    assert requests == [f"POST {POOL}"]


def test_a_server_that_keeps_failing_is_given_up_with_its_answer(
    server: Callable[..., tuple[str, list[str]]],
) -> None:
    url, _ = server(500)
    with pytest.raises(NotReadyError, match=f"no answer to POST {POOL}: HTTP Error 500"):
        set_pool(Api(url, Wait(os.getpid(), limit_s=-1)), "gpu", 2)
