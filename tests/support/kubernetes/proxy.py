"""A door in front of any API server, which can be shut, slow, or refuse what a test names."""

from __future__ import annotations

import json
import secrets
import threading
from collections.abc import Callable
from pathlib import Path

from support.kubernetes.api_client import ApiClient
from support.kubernetes.api_server import write_kubeconfig
from support.kubernetes.http_server import HttpServer, Request
from support.kubernetes.objects import ApiError, Object, Target, forbidden


class Proxy:
    """Passes requests on with an administrator's credentials, until `close`.

    Its own user has one token, `token`, which tests may change, and every right that isn't denied.
    `on_job` may change a Job that is being created.
    """

    def __init__(self, kubeconfig: Path) -> None:
        self._api = ApiClient(kubeconfig)
        self.token = secrets.token_urlsafe(16)
        self.on_job: Callable[[Object], None] | None = None
        self._is_down = False
        self._delay_s = 0.0
        self._denied: set[tuple[str, str]] = set()
        self._failures: list[tuple[str, str, ApiError]] = []
        self._losses: list[tuple[str, str]] = []
        self._closed = threading.Event()
        self._server = HttpServer(self._answer)

    def close(self) -> None:
        self._closed.set()
        self._server.close()
        self._api.close()

    def write_kubeconfig(self, path: Path) -> Path:
        return write_kubeconfig(path, self._server.url, self.token)

    def act_as(self, token: str) -> None:
        """Pass requests on with this token in place of an administrator's credentials."""
        self._api.act_as(token)

    def down(self) -> None:
        """Cut connections instead of answering."""
        self._is_down = True

    def up(self) -> None:
        self._is_down = False

    def slow(self, seconds: float) -> None:
        """Hold each answer back so long."""
        self._delay_s = seconds

    def lose_next_response(self, verb: str, resource: str) -> None:
        """Pass the next such request on, and cut the connection instead of answering it."""
        self._losses.append((verb, resource))

    def fail_next(self, verb: str, resource: str, error: ApiError) -> None:
        """Answer the next such request with an error."""
        self._failures.append((verb, resource, error))

    def deny(self, verb: str, resource: str) -> None:
        """Forbid a verb on a resource such as `pods` or `pods/log`; `*` is any."""
        self._denied.add((verb, resource))

    def allow_all(self) -> None:
        self._denied.clear()

    def _answer(self, request: Request) -> None:
        if self._is_down:
            request.close_connection = True
            return
        own = f"Bearer {self.token}"  # Helm sends no token without TLS
        if request.headers.get("Authorization", own) != own:
            raise ApiError(401, "Unauthorized", "Unauthorized")
        target = Target.of(request.command, request.path)
        if target is not None:
            self._check(target)
        if self.on_job and target and (target.verb, target.resource) == ("create", "jobs"):
            self.on_job(job := json.loads(request.body))
            request.body = json.dumps(job).encode()
        kind = request.headers.get("Content-Type", "")
        answer = self._api.send(request.command, request.path, request.body or None, kind)
        if target is not None and (target.verb, target.resource) in self._losses:
            self._losses.remove((target.verb, target.resource))
            request.close_connection = True
            return
        self._closed.wait(self._delay_s)
        request.send_bytes(answer.status, answer.data, answer.headers.get("Content-Type", ""))

    def _check(self, target: Target) -> None:
        """Raise `ApiError` for a request that is denied, or is to fail."""
        verbs, resources = {target.verb, "*"}, {target.resource, "*"}
        if any(verb in verbs and resource in resources for verb, resource in self._denied):
            group = f'in API group "{target.group}" in the namespace "{target.namespace}"'
            why = f'User "user" cannot {target.verb} resource "{target.resource}" {group}'
            raise forbidden(target.plural, target.name, why)
        for failure in self._failures:
            if failure[:2] == (target.verb, target.resource):
                self._failures.remove(failure)
                raise failure[2]
