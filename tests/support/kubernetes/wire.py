"""Requests as they go over the wire, and the answers without a client's interpretation."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from support.kubernetes.cluster import Cluster


@dataclass(frozen=True)
class Wire:
    """Requests as they go over the wire; paths are below the test's namespace."""

    cluster: Cluster

    @property
    def namespace(self) -> str:
        return self.cluster.namespace

    def ask(
        self, method: str, path: str, body: Any = None, kind: str = "application/json"
    ) -> tuple[int, Any]:
        """The answer's code, and its object (or text)."""
        client = self.cluster.client
        headers = {"Content-Type": kind, "Accept": "application/json"}
        client.update_params_for_auth(headers, [], ["BearerToken"])
        data = body if body is None or isinstance(body, str) else json.dumps(body)
        url = f"{client.configuration.host}/api/v1/namespaces/{self.namespace}/{path}"
        answer = client.rest_client.pool_manager.request(method, url, body=data, headers=headers)
        text = answer.data.decode()
        is_json = text and "json" in answer.headers.get("Content-Type", "")
        return answer.status, json.loads(text) if is_json else text

    def refused(self, code: int, *request: Any) -> dict[str, Any]:
        """The Status of a request that fails with this code, without what all of them have."""
        status, body = self.ask(*request)
        assert (status, body["code"], body["status"]) == (code, code, "Failure")
        assert (body["kind"], body["apiVersion"], body["metadata"]) == ("Status", "v1", {})
        return {key: body[key] for key in ("reason", "message", "details") if key in body}

    def make(self, name: str, **changes: Any) -> dict[str, Any]:
        """Create a pod."""
        code, made = self.ask("POST", "pods", pod(name, **changes))
        assert code == 201, made
        return dict(made)


def pod(name: str = "job", metadata: Any = None, container: Any = None, **spec: Any) -> Any:
    """A minimal pod's body."""
    containers = [{"name": "base", "image": "job", **(container or {})}]
    spec = {"restartPolicy": "Never", "containers": containers, **spec}
    return {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": name, **(metadata or {})}} | {
        "spec": spec
    }


def amounts(**which: Any) -> dict[str, Any]:
    """A container with these requests or limits."""
    return {"container": {"resources": which}}
