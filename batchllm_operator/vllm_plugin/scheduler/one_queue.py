"""vLLM's scheduler with one queue for all requests that wait."""

from __future__ import annotations

from typing import Any

from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.request import Request, RequestStatus


class OneQueueScheduler(AsyncScheduler):
    """Requests whose grammar isn't compiled yet wait in `waiting`, in their place.

    Some versions of vLLM (0.27) have another queue for them, `skipped_waiting`, from which they
    would be admitted as if memory were free.
    """

    def _enqueue_waiting_request(self, request: Request) -> None:
        if hasattr(self, "skipped_waiting") and _waits_for_grammar(request):
            self.waiting.add_request(request)
        else:
            super()._enqueue_waiting_request(request)

    def schedule(self, *args: Any, **kwargs: Any) -> SchedulerOutput:
        output = super().schedule(*args, **kwargs)
        skipped: Any = getattr(self, "skipped_waiting", ())
        if waiting := [request for request in skipped if _waits_for_grammar(request)]:
            skipped.remove_requests(waiting)
            self.waiting.prepend_requests(reversed(waiting))  # as a deque's `extendleft`
        return output


def _waits_for_grammar(request: Request) -> bool:
    return bool(request.status == RequestStatus.WAITING_FOR_STRUCTURED_OUTPUT_GRAMMAR)
