"""A double of the Kubernetes API server, with its controllers and its scheduler.

Kubelets are in `node_agent`, and reach it through the API only.
"""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import urllib3
import yaml
from support.kubernetes.controllers import Controllers
from support.kubernetes.http_server import HttpServer, Request
from support.kubernetes.objects import RESOURCES, ApiError, Object, Target, selects
from support.kubernetes.store import Store


class ApiServer:
    """Serves from construction until `close`."""

    def __init__(self) -> None:
        self._store = Store()
        self._controllers = Controllers(self._store)
        self._server = HttpServer(self._answer)

    def close(self) -> None:
        """End everything; raise what went wrong in a controller."""
        self._server.close()
        self._store.close()
        self._controllers.close()

    def write_kubeconfig(self, path: Path) -> Path:
        return write_kubeconfig(path, self._server.url)

    def _answer(self, request: Request) -> None:
        path = request.path.partition("?")[0]
        if path in ("/api/v1", "/apis/batch/v1"):
            request.send_object(200, _discovery(path.split("/", 2)[2]))
            return
        target = Target.of(request.command, request.path)
        if target is None or target.plural not in RESOURCES:
            raise ApiError(404, "NotFound", "the server could not find the requested resource")
        if target.verb == "watch":
            request.send_stream(self._events(target, request.query))
        elif target.subresource == "log":
            self._send_log(request, target)
        else:
            body = json.loads(request.body) if request.body else {}
            code = 201 if target.verb == "create" else 200
            request.send_object(code, self._perform(target, request.query, body))

    def _perform(self, target: Target, query: Mapping[str, str], body: Object) -> Object:
        """Do what a request asks for; returns the object of its answer."""
        store, where = self._store, (target.plural, target.namespace, target.name)
        match target.verb:
            case "get":
                return store.get(*where)
            case "list":
                return self._list(target, query)
            case "create" if target.subresource == "binding":
                store.bind(target.namespace, target.name, body["target"]["name"])
                return {"kind": "Status", "apiVersion": "v1", "status": "Success"}
            case "create" if not target.name:
                return store.create(target.plural, target.namespace, body)
            case "patch":
                return store.patch(*where, body, target.subresource)
            case "delete":
                if grace_s := query.get("gracePeriodSeconds"):
                    body.setdefault("gracePeriodSeconds", int(grace_s))
                if policy := query.get("propagationPolicy"):
                    body.setdefault("propagationPolicy", policy)
                if target.name:
                    return store.delete(*where, body)
                with store.changed:
                    for name in self._names(target):
                        store.delete(*where[:2], name, body)
                return {"kind": "Status", "status": "Success"}
        raise ApiError(405, "MethodNotAllowed", "the server does not allow this method")

    def _names(self, target: Target) -> list[str]:
        bodies = self._store.items(target.plural, target.namespace)
        return [body["metadata"]["name"] for body in bodies]

    def _list(self, target: Target, query: Mapping[str, str]) -> Object:
        resource = RESOURCES[target.plural]
        is_selected = selects(query.get("labelSelector", ""), query.get("fieldSelector", ""))
        with self._store.changed:
            items = [
                body
                for body in self._store.items(target.plural, target.namespace)
                if is_selected(body)
            ]
            revision = str(self._store.revision)
        return {
            "kind": f"{resource.kind}List",
            "apiVersion": resource.version,
            "metadata": {"resourceVersion": revision},
            "items": items[: int(query.get("limit", 0)) or None],
        }

    def _send_log(self, request: Request, target: Target) -> None:
        """Pass a log on from the kubelet of the pod's node."""
        pod = self._store.get("pods", target.namespace, target.name)
        node = self._store.get("nodes", "", pod["spec"].get("nodeName", ""))
        port = node["status"]["daemonEndpoints"]["kubeletEndpoint"]["Port"]
        path, query = f"{target.namespace}/{target.name}/base", urlsplit(request.path).query
        url = f"http://127.0.0.1:{port}/containerLogs/{path}?{query}"
        answer = urllib3.request("GET", url)
        request.send_bytes(answer.status, answer.data, answer.headers["Content-Type"])

    def _events(self, target: Target, query: Mapping[str, str]) -> Iterator[bytes]:
        """The lines of a watch."""
        revision = int(query.get("resourceVersion") or self._store.revision)
        limit_s = float(query.get("timeoutSeconds") or 1800)
        for change in self._store.changes(target.plural, target.namespace, revision, limit_s):
            event: Any = {"type": "ERROR", "object": ApiError(410, "Expired", "too old").body()}
            if change is not None:
                event = {"type": change.type, "object": change.body}
            yield json.dumps(event).encode() + b"\n"


def write_kubeconfig(path: Path, url: str, token: str = "") -> Path:
    """Write a kubeconfig for a server on this machine."""
    parts = {
        "clusters": [{"name": "it", "cluster": {"server": url}}],
        "users": [{"name": "it", "user": {"token": token} if token else {}}],
        "contexts": [{"name": "it", "context": {"cluster": "it", "user": "it"}}],
    }
    config = {"apiVersion": "v1", "kind": "Config", **parts, "current-context": "it"}
    path.write_text(yaml.safe_dump(config), encoding="utf-8")
    return path


def _discovery(version: str) -> Object:
    """The types of objects, for clients that ask, such as Helm's."""
    types = [
        {"name": each.plural, "kind": each.kind, "namespaced": each.namespaced, "verbs": ["list"]}
        for each in RESOURCES.values()
        if each.version == version
    ]
    return {"kind": "APIResourceList", "groupVersion": version, "resources": types}
