"""An API server in memory, for tests: the part of the Kubernetes API that running pods takes.

It has no scheduler, no kubelets and no controllers: those are in `node_agent` and `controllers`,
and reach it through the API only.
"""

from __future__ import annotations

import json
import re
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import yaml
from aiohttp import web
from support.kubernetes import discovery
from support.kubernetes.access import AccessRules, Failure
from support.kubernetes.certificates import make_identity
from support.kubernetes.https_server import HttpsServer
from support.kubernetes.listing import Target, listed, matcher
from support.kubernetes.loop_thread import LoopThread
from support.kubernetes.operations import Operations, check_dry_run
from support.kubernetes.patches import JSON
from support.kubernetes.pod_log import answer_log
from support.kubernetes.status import (
    ApiError,
    Object,
    bad_request,
    method_not_allowed,
    no_such_path,
    success,
    too_large_version,
)
from support.kubernetes.store import RESOURCES, Store
from support.kubernetes.watching import WatchRequest, watch

_PATH = re.compile(
    r"^/(?:api/v1|apis/(?P<group>[^/]+)/v1)(?:/namespaces/(?P<namespace>[^/]+)(?=/[^/]+))?"
    r"/(?P<plural>[a-z]+)(?:/(?P<name>[^/]+)(?:/(?P<subresource>[a-z]+))?)?/?$"
)
_SUBRESOURCES = {
    "pods": {"status", "log", "binding"},
    "namespaces": {"status", "finalize"},
    "nodes": {"status"},
    "resourcequotas": {"status"},
}
MAX_BODY = 3 * 2**20
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class ApiServer:
    """The server, in a thread of its own from construction until `close`.

    `folder` receives its certificates. What tests change from outside (`access`) is read at the
    next request.
    """

    def __init__(self, folder: Path) -> None:
        self.store = Store()
        self.access = AccessRules()
        self.identity = make_identity(folder, "kube-apiserver")
        self._operations = Operations(self.store)
        self._closing = False
        self._thread = LoopThread("kube-apiserver")
        self.url = self._thread.run(self._serve())
        admin = Target(RESOURCES["namespaces"])
        for name in ("default", "kube-system"):
            body: Object = {"metadata": {"name": name}}
            self._thread.loop.call_soon_threadsafe(
                self._operations.create, admin, body, False, False
            )

    async def _serve(self) -> str:
        app = web.Application(middlewares=[self._answer_errors], client_max_size=MAX_BODY)
        app.router.add_route("*", "/{path:.*}", self._dispatch)
        self._server = HttpsServer(app)
        await self._server.start(self.identity.server_context())
        return f"https://127.0.0.1:{self._server.port}"

    def close(self) -> None:
        """End all requests and the thread."""
        self._closing = True
        self._thread.run(self._server.close())
        self._thread.close()

    def write_kubeconfig(
        self, path: Path, token: str, server: str = "", ca: Path | None = None
    ) -> Path:
        """Write a kubeconfig for `token`; `server` and `ca` stand in for the server's own."""
        cluster = {
            "server": server or self.url,
            "certificate-authority": str(ca or self.identity.authority),
        }
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

    def fail_next(self, method: str, resource: str, error: ApiError, times: int = 1) -> None:
        """Answer the next requests of the user's token with an error."""
        self.access.failures.append(Failure(method, resource, error, times))

    def forget_history(self) -> None:
        """Make every resourceVersion from before too old for a watch."""
        self._thread.loop.call_soon_threadsafe(self.store.forget_history)

    @web.middleware
    async def _answer_errors(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        try:
            return await handler(request)
        except ApiError as error:
            headers = {"Retry-After": "1"} if error.code in (429, 504) else {}
            return web.json_response(error.body(), status=error.code, headers=headers)

    async def _dispatch(self, request: web.Request) -> web.StreamResponse:
        if request.path in ("/livez", "/readyz", "/healthz"):
            return web.Response(text="ok")
        admin = self.access.is_admin(request.headers.get("Authorization", ""))
        found = discovery.answer(request.path)
        if found is not None:
            return web.json_response(found)
        if request.path == "/apis/authorization.k8s.io/v1/selfsubjectaccessreviews":
            return web.json_response(self.access.review(await _json_body(request)), status=201)
        target = _target(request.path)
        if not admin:
            verb = _verb(request, target)
            self.access.authorize(verb, target)
            self.access.check_failures(request.method, target.resource.plural)
        return await self._perform(request, target)

    async def _perform(self, request: web.Request, target: Target) -> web.StreamResponse:
        method, query = request.method, request.query
        if target.subresource == "log":
            if method != "GET":
                raise method_not_allowed()
            return await answer_log(self.store, self._operations.get(target), query, request)
        if method == "GET":
            return await self._read(request, target)
        body, strict = await _json_body(request), query.get("fieldValidation") == "Strict"
        if target.subresource == "binding" and method == "POST":
            return web.json_response(self._operations.bind(target, body), status=201)
        option = {"POST": "Create", "PUT": "Update"}.get(method, method.capitalize())
        dry_run = check_dry_run(option, query.get("dryRun", ""))
        if method == "POST" and not target.name:
            created = self._operations.create(target, body, strict, dry_run)
            return web.json_response(created, status=201)
        if method == "PUT" and target.name:
            return web.json_response(self._operations.replace(target, body, strict, dry_run))
        if method == "PATCH" and target.name:
            kind = request.content_type
            return web.json_response(self._operations.patch(target, body, kind, strict, dry_run))
        if method == "DELETE":
            return self._delete(request, target, body)
        raise method_not_allowed()

    def _delete(self, request: web.Request, target: Target, options: Object) -> web.Response:
        query = request.query
        if "gracePeriodSeconds" in query:
            options.setdefault("gracePeriodSeconds", int(query["gracePeriodSeconds"]))
        if "propagationPolicy" in query:
            options.setdefault("propagationPolicy", query["propagationPolicy"])
        if query.get("dryRun"):
            options["dryRun"] = [query["dryRun"]]
        if not target.name:
            match = _match(request, target)
            return web.json_response(self._operations.delete_all(target, match, options))
        body, gone = self._operations.delete(target, options)
        if gone and target.resource.kind not in ("Pod", "Namespace"):
            uid = body["metadata"]["uid"]
            body = success(target.name, target.resource.plural, uid)
        return web.json_response(body)

    async def _read(self, request: web.Request, target: Target) -> web.StreamResponse:
        query = request.query
        if query.get("watch") in ("true", "True", "1"):
            return await self._watch(request, target)
        version = _version(query.get("resourceVersion") or "0", "invalid resource version: ")
        if version > self.store.revision:
            raise too_large_version(version, self.store.revision)
        if target.name:
            return web.json_response(self._operations.get(target))
        limit, token = _number(query.get("limit", "0")), query.get("continue", "")
        found = listed(self.store, target, _match(request, target), limit, token)
        return web.json_response(found)

    async def _watch(self, request: web.Request, target: Target) -> web.StreamResponse:
        query = request.query
        asked = WatchRequest(
            target,
            _match(request, target),
            _version(query.get("resourceVersion") or "0", ""),
            _number(query.get("timeoutSeconds") or "1800"),
            query.get("allowWatchBookmarks") in ("true", "True", "1"),
        )
        response = web.StreamResponse(headers={"Content-Type": "application/json"})
        await response.prepare(request)

        def is_over() -> bool:
            transport = request.transport
            return self._closing or transport is None or transport.is_closing()

        try:
            async for each in watch(self.store, asked, is_over):
                await response.write(each)
            await response.write_eof()
        except ConnectionError:  # the client went away
            return response
        return response


def _target(path: str) -> Target:
    found = _PATH.match(path)
    resource = RESOURCES.get(found["plural"]) if found else None
    if found is None or resource is None or (found["group"] or "") != resource.group:
        raise no_such_path()
    namespace, name = found["namespace"] or "", found["name"] or ""
    subresource = found["subresource"] or ""
    known = _SUBRESOURCES.get(resource.plural, set())
    if (subresource and subresource not in known) or (namespace and not resource.namespaced):
        raise no_such_path()
    return Target(resource, namespace, name, subresource)


def _verb(request: web.Request, target: Target) -> str:
    if request.method == "GET":
        if request.query.get("watch") in ("true", "True", "1"):
            return "watch"
        return "get" if target.name else "list"
    if request.method == "DELETE" and not target.name:
        return "deletecollection"
    verbs = {"POST": "create", "PUT": "update", "PATCH": "patch", "DELETE": "delete"}
    return verbs.get(request.method, "")


def _match(request: web.Request, target: Target) -> Callable[[Object], bool]:
    labels = request.query.get("labelSelector", "")
    return matcher(target.resource, labels, request.query.get("fieldSelector", ""))


def _number(text: str) -> int:
    try:
        return int(text)
    except ValueError as error:
        raise bad_request(f'strconv.ParseUint: parsing "{text}": invalid syntax') from error


def _version(text: str, prefix: str) -> int:
    """A resourceVersion; `prefix` begins the message of a list, which also has another code."""
    if text.isdecimal():
        return int(text)
    message = (
        f'{prefix}resourceVersion: Invalid value: "{text}": strconv.ParseUint: parsing "{text}": '
        "invalid syntax"
    )
    raise bad_request(message) if prefix else ApiError(500, "", message)


async def _json_body(request: web.Request) -> Any:
    try:
        text = await request.read()
    except web.HTTPRequestEntityTooLarge as error:
        message = f"Request entity too large: limit is {MAX_BODY}"
        raise ApiError(413, "RequestEntityTooLarge", message) from error
    if not text:
        return {}
    try:
        body = json.loads(text)
    except ValueError as error:
        if request.method == "PATCH":
            raise bad_request(f"error decoding patch: {error}") from error
        why = f"couldn't get version/kind; json parse error: {error}"
        raise bad_request(f"the object provided is unrecognized: {why}") from error
    if not isinstance(body, dict) and request.content_type != JSON:
        raise bad_request("the object provided is unrecognized (must be of type JSON object)")
    return body
