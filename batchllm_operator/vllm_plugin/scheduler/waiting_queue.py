"""vLLM's queue of waiting requests, with a gate in front of it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

from vllm.v1.core.sched.request_queue import FCFSRequestQueue
from vllm.v1.request import Request


class Gate(Protocol):
    """Decides which requests leave the queue, and is notified when they do."""

    def is_closed_for(self, request: Request) -> bool:
        """Whether the request must stay in the queue for now. Called often."""

    def taken_out(self, request: Request) -> None:
        """Note that the request left the queue, to run (see its status) or to be put back."""

    def put_back(self, request: Request) -> None:
        """Note that the request is in the queue, maybe again."""


class GatedQueue(FCFSRequestQueue):
    """First come, first served, as long as the gate is open for the first request.

    vLLM admits requests while the queue is true, so it is false while the gate is closed. Its
    length is always that of the queue.
    """

    def __init__(self, gate: Gate) -> None:
        super().__init__()
        self._gate = gate

    def __bool__(self) -> bool:
        return len(self) > 0 and not self._gate.is_closed_for(self[0])

    def peek_request(self) -> Request:
        if len(self) == 0:  # also with the gate closed
            raise IndexError("peek from an empty queue")
        return self[0]

    def pop_request(self) -> Request:
        request = super().pop_request()
        self._gate.taken_out(request)
        return request

    def add_request(self, request: Request) -> None:
        super().add_request(request)
        self._gate.put_back(request)

    def prepend_request(self, request: Request) -> None:
        super().prepend_request(request)
        self._gate.put_back(request)

    def prepend_requests(self, requests: Iterable[Request]) -> None:
        listed = list(requests)
        super().prepend_requests(listed)
        for request in listed:
            self._gate.put_back(request)
