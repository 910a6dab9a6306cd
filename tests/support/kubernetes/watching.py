"""Watches: the changes of a resource, as they happen, one JSON object on a line each."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass

from support.kubernetes.selectors import Match
from support.kubernetes.status import Object, expired
from support.kubernetes.store import Change, Store, Target


@dataclass(frozen=True, slots=True)
class WatchRequest:
    """A watch: from `revision` on, or from what there is when it is 0."""

    target: Target
    match: Match
    revision: int
    timeout_s: float


def line(kind: str, body: Object) -> bytes:
    return json.dumps({"type": kind, "object": body}).encode() + b"\n"


async def watch(
    store: Store, request: WatchRequest, is_over: Callable[[], bool]
) -> AsyncIterator[bytes]:
    """Lines of a watch, until its time is up or `is_over`."""
    target, seen = request.target, request.revision
    if seen and seen < store.oldest_revision:
        message = f"too old resource version: {seen} ({store.oldest_revision})"
        yield line("ERROR", expired(message).body())
        return
    if not seen:
        seen = store.revision
        for each in store.items(target.resource, target.namespace):
            if request.match(each):
                yield line("ADDED", each)
    ends = asyncio.get_running_loop().time() + request.timeout_s
    changed = store.subscribe()
    try:
        while not is_over():
            changed.clear()
            for change in store.changes_since(seen):
                seen = change.revision
                if kind := _type_seen(change, request):
                    yield line(kind, change.after)
            left = ends - asyncio.get_running_loop().time()
            if left <= 0:
                break
            if not changed.is_set():
                await _wait(changed, min(left, 0.5))
    finally:
        store.unsubscribe(changed)


async def _wait(event: asyncio.Event, seconds: float) -> None:
    try:
        await asyncio.wait_for(event.wait(), seconds)
    except TimeoutError:
        return


def _type_seen(change: Change, request: WatchRequest) -> str:
    """The change as this watch sees it: what stops matching is gone, what begins to is new."""
    target = request.target
    if change.resource != target.resource.plural:
        return ""
    namespace = change.after["metadata"].get("namespace", "")
    if target.namespace and namespace != target.namespace:
        return ""
    was = change.before is not None and request.match(change.before)
    if change.type == "DELETED":
        return "DELETED" if was else ""
    now = request.match(change.after)
    if now:
        return "MODIFIED" if was else "ADDED"
    return "DELETED" if was else ""
