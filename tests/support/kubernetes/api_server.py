"""An API server in memory, for tests: the part of the Kubernetes API that running pods takes.

It has no scheduler, no kubelets and no controllers: those are in `node_agent` and `controllers`,
and reach it through the API only.
"""

from __future__ import annotations

import json
import re
from collections.abc import Awaitable, Callable
from pathlib import Path

import yaml
from aiohttp import web
from support.kubernetes.access import AccessRules
from support.kubernetes.certificates import make_identity
from support.kubernetes.https_server import HttpsServer
from support.kubernetes.loop_thread import LoopThread
from support.kubernetes.operations import Operations
from support.kubernetes.pod_log import answer_log
from support.kubernetes.selectors import Match, matcher
from support.kubernetes.status import ApiError, Object, method_not_allowed, no_such_path
from support.kubernetes.store import RESOURCES, Store, Target
from support.kubernetes.watching import WatchRequest, watch

_PATH = re.compile(
    r"^/(?:api/v1|apis/batch/v1)(?:/namespaces/(?P<namespace>[^/]+)(?=/[^/]+))?"
    r"/(?P<plural>[a-z]+)(?:/(?P<name>[^/]+)(?:/(?P<subresource>binding|log|status))?)?$"
)
_MERGES = ("application/merge-patch+json", "application/strategic-merge-patch+json")
_MAX_BODY = 3 * 2**20
_TRUE = ("true", "True", "1")
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class ApiServer:
    """The server, in a thread of its own from construction until `close`.

    `folder` receives its certificates. What tests change from outside (`access`) is read at the
    next request.
    """

    def __init__(self, folder: Path) -> None:
        self._store = Store()
        self.access = AccessRules()
        self._identity = make_identity(folder, "kube-apiserver")
        self._operations = Operations(self._store)
        self._closing = False
        self._thread = LoopThread("kube-apiserver")
        self.url = self._thread.run(self._serve())

    async def _serve(self) -> str:
        app = web.Application(middlewares=[self._answer_errors], client_max_size=_MAX_BODY)
        app.router.add_route("*", "/{path:.*}", self._dispatch)
        self._server = HttpsServer(app)
        await self._server.start(self._identity.server_context())
        return f"https://127.0.0.1:{self._server.port}"

    def close(self) -> None:
        """End all requests and the thread."""
        self._closing = True
        self._thread.run(self._server.close())
        self._thread.close()

    def write_kubeconfig(self, path: Path, token: str) -> Path:
        """Write a kubeconfig for `token`."""
        cluster = {"server": self.url, "certificate-authority": str(self._identity.authority)}
        config = {
            "apiVersion": "v1",
            "kind": "Config",
            "clusters": [{"name": "double", "cluster": cluster}],
            "users": [{"name": "user", "user": {"token": token}}],
            "contexts": [{"name": "double", "context": {"cluster": "double", "user": "user"}}],
            "current-context": "double",
        }
        path.write_text(yaml.safe_dump(config), encoding="utf-8")
        return path

    def deny(self, verb: str, resource: str) -> None:
        """Forbid the user's token a verb (`*`: all) on a resource such as `pods` or `pods/log`."""
        self.access.denied.add((verb, resource))

    def allow_all(self) -> None:
        """Take back what was denied or made to fail."""
        self.access.denied.clear()
        self.access.failures.clear()

    def fail_next(self, method: str, resource: str, error: ApiError) -> None:
        """Answer the next such request of the user's token with an error."""
        self.access.failures.append((method, resource, error))

    def forget_history(self) -> None:
        """Make every resourceVersion from before too old for a watch."""
        self._thread.loop.call_soon_threadsafe(self._store.forget_history)

    @web.middleware
    async def _answer_errors(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        try:
            return await handler(request)
        except ApiError as error:
            headers = {"Retry-After": "1"} if error.code == 429 else {}
            return web.json_response(error.body(), status=error.code, headers=headers)

    async def _dispatch(self, request: web.Request) -> web.StreamResponse:
        if request.path in ("/api/v1", "/apis/batch/v1"):
            return web.json_response(_discovery(request.path.partition("/api")[2].lstrip("s/")))
        is_admin = self.access.is_admin(request.headers.get("Authorization", ""))
        target = _target(request.path)
        if not is_admin:
            self.access.authorize(_verb(request, target), target)
            self.access.check_failures(request.method, target.resource.plural)
        if target.subresource == "log":
            return await answer_log(self._store, self._operations.get(target), request)
        if _verb(request, target) == "watch":
            return await self._watch(request, target)
        text = await request.read()
        code, answer = self._perform(request, target, json.loads(text) if text else {})
        return web.json_response(answer, status=code)

    def _perform(self, request: web.Request, target: Target, body: Object) -> tuple[int, Object]:
        """Do what a request asks for; return the code and the object of its answer."""
        match request.method:
            case "GET" if target.name:
                return 200, self._operations.get(target)
            case "GET":
                limit = int(request.query.get("limit") or 0)
                return 200, self._operations.list(target, _match(request), limit)
            case "POST" if not target.name:
                return 201, self._operations.create(target, body)
            case "POST" if target.subresource == "binding":
                self._operations.bind(target, body["target"]["name"])
                return 201, {"kind": "Status", "apiVersion": "v1", "status": "Success"}
            case "PATCH" if target.name:
                if request.content_type not in _MERGES:
                    raise ApiError(415, "UnsupportedMediaType", "415: Unsupported Media Type", {})
                return 200, self._operations.patch(target, body)
            case "DELETE" if target.name:
                if seconds := request.query.get("gracePeriodSeconds"):
                    body.setdefault("gracePeriodSeconds", int(seconds))
                if policy := request.query.get("propagationPolicy"):
                    body.setdefault("propagationPolicy", policy)
                return 200, self._operations.delete(target, body)
        raise method_not_allowed()

    async def _watch(self, request: web.Request, target: Target) -> web.StreamResponse:
        query = request.query
        revision = int(query.get("resourceVersion") or 0)
        timeout_s = int(query.get("timeoutSeconds") or 1800)
        asked = WatchRequest(target, _match(request), revision, timeout_s)
        response = web.StreamResponse(headers={"Content-Type": "application/json"})
        await response.prepare(request)

        def is_over() -> bool:
            transport = request.transport
            return self._closing or transport is None or transport.is_closing()

        try:
            async for each in watch(self._store, asked, is_over):
                await response.write(each)
            await response.write_eof()
        except ConnectionError:  # the client went away
            return response
        return response


def _discovery(version: str) -> Object:
    """The types of objects, for clients that ask, such as Helm's."""
    types = [
        {"name": each.plural, "kind": each.kind, "namespaced": each.namespaced, "verbs": ["list"]}
        for each in RESOURCES.values()
        if each.version == version
    ]
    return {"kind": "APIResourceList", "groupVersion": version, "resources": types}


def _target(path: str) -> Target:
    found = _PATH.match(path)
    resource = RESOURCES.get(found["plural"]) if found else None
    if found is None or resource is None:
        raise no_such_path()
    return Target(resource, *(found[part] or "" for part in ("namespace", "name", "subresource")))


def _verb(request: web.Request, target: Target) -> str:
    if request.method == "GET":
        watches = not target.name and request.query.get("watch") in _TRUE
        return "watch" if watches else "get" if target.name else "list"
    verbs = {"POST": "create", "PATCH": "patch", "DELETE": "delete"}
    return verbs.get(request.method, "")


def _match(request: web.Request) -> Match:
    return matcher(request.query.get("labelSelector", ""), request.query.get("fieldSelector", ""))
