"""Plain requests to any Kubernetes API server."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from kubernetes import client as kube_client
from kubernetes import config as kube_config
from support.kubernetes.objects import Object

MERGE_PATCH = "application/merge-patch+json"


class ApiClient:
    """Requests with the credentials of a kubeconfig, from any thread."""

    def __init__(self, kubeconfig: Path) -> None:
        self._client = kube_config.new_client_from_config(str(kubeconfig))

    def close(self) -> None:
        self._client.close()
        self._client.rest_client.pool_manager.clear()

    def act_as(self, token: str) -> None:
        """Use this token from now on, and no certificate."""
        old = self._client.configuration
        new = kube_client.Configuration(host=old.host)
        new.ssl_ca_cert, new.verify_ssl = old.ssl_ca_cert, old.verify_ssl
        new.api_key = {"BearerToken": f"Bearer {token}"}
        self._client = kube_client.ApiClient(new)

    def send(self, method: str, path: str, body: Any = None, kind: str = "", **options: Any) -> Any:
        """urllib3's answer to a request; `body` is an object, or bytes to pass on."""
        headers = {"Content-Type": kind or "application/json", "Accept": "application/json"}
        self._client.update_params_for_auth(headers, [], ["BearerToken"])
        data = body if body is None or isinstance(body, bytes) else json.dumps(body).encode()
        url = f"{self._client.configuration.host}{path}"
        pool = self._client.rest_client.pool_manager
        return pool.request(method, url, body=data, headers=headers, retries=False, **options)

    def ask(self, method: str, path: str, body: Any = None, kind: str = "") -> tuple[int, Any]:
        """The answer's code, and its object (or text)."""
        answer = self.send(method, path, body, kind)
        text = answer.data.decode()
        is_object = text and "json" in answer.headers.get("Content-Type", "")
        return answer.status, json.loads(text) if is_object else text

    def must(self, method: str, path: str, body: Any = None, kind: str = "") -> Any:
        """The object of an answer that has to be a success."""
        code, answer = self.ask(method, path, body, kind)
        assert code < 300, f"{method} {path}: {answer}"
        return answer

    def patch(self, path: str, body: Object) -> None:
        """Merge into an object that is there."""
        self.must("PATCH", path, body, MERGE_PATCH)

    def watch(self, path: str, revision: str, limit_s: int) -> Iterator[tuple[str, Object]]:
        """(type, object) of the changes since a revision, until the time is up."""
        query = f"watch=true&resourceVersion={revision}&timeoutSeconds={limit_s}"
        answer = self.send("GET", f"{path}?{query}", preload_content=False)
        try:
            for line in answer:
                event = json.loads(line)
                yield event["type"], event["object"]
        finally:
            answer.close()
