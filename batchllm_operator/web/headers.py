"""Security headers on each response, including errors."""

from __future__ import annotations

from typing import Any, Final

from starlette.types import ASGIApp, Message, Receive, Scope, Send

_POLICY: Final = (
    "default-src 'none'; style-src 'unsafe-inline'; img-src data:; base-uri 'none';"
    " form-action 'none'; frame-ancestors 'self'"
)
CSP: Final = "content-security-policy"

_ALWAYS: Final = {
    "x-content-type-options": "nosniff",
    "referrer-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "cache-control": "no-store",
}


def live_policy(nonce: str) -> str:
    """The content security policy of a live page, whose only script polls this server."""
    return f"{_POLICY}; script-src 'nonce-{nonce}'; connect-src 'self'"


class SecurityHeaders:
    """Wraps an ASGI application and adds the headers to each response."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                message = {**message, "headers": _completed(message.get("headers", ()))}
            await send(message)

        await self._app(scope, receive, send_with_headers)


def _completed(given: Any) -> list[tuple[bytes, bytes]]:
    """The headers, overridden by ours; only a given content security policy stays."""
    kept = [(name, value) for name, value in given if name.lower().decode() not in _ALWAYS]
    ours = dict(_ALWAYS)
    if not any(name.lower() == CSP.encode() for name, _ in kept):
        ours[CSP] = _POLICY
    return kept + [(name.encode(), value.encode()) for name, value in ours.items()]
