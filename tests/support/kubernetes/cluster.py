"""A cluster for one test: a namespace, a node agent, and a proxy that can fail.

The API server is the double, or a real one whose kubeconfig the tests were given.
"""

from __future__ import annotations

import base64
import contextlib
import os
import sys
import time
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import pytest
import yaml
from kubernetes import client as kube
from kubernetes import config as kube_config
from support.fork_server import ForkServer
from support.kubernetes.api_server import ApiServer
from support.kubernetes.controllers import Controllers
from support.kubernetes.flaky_proxy import FlakyProxy
from support.kubernetes.images import DEFAULT_PATH, Image
from support.kubernetes.node import NodeSettings
from support.kubernetes.node_agent import NodeAgent
from support.kubernetes.real_nodes import RealNodes

T = TypeVar("T")
_VERBS = ("create", "get", "list", "watch", "patch", "delete")
_RESOURCES = ("jobs", "pods", "pods/log", "pods/status", "secrets", "events", "configmaps")


@dataclass(frozen=True)
class Backend:
    """Where tests find an API server: `double` is None for a real one."""

    admin_kubeconfig: Path
    double: ApiServer | None = None
    has_controllers: bool = False
    has_nodes: bool = False


def python_image(commands: ForkServer | None = None, **environment: str) -> Image:
    """An image with this Python, and the packages that it can import here.

    `commands` saves its `batchllm` the imports.
    """
    known = {
        "PATH": f"{Path(sys.executable).parent}:{DEFAULT_PATH}",
        "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
        "LANG": "C.UTF-8",
    }
    return Image(environment={**known, **environment}, commands=commands)


class Cluster:
    """What a test has of the cluster.

    `kubeconfig` is for what is tested: it goes through `proxy`, with the rights of a user. `api`
    goes past the proxy, with an administrator's. `agent` plays the nodes; with `has_nodes` the
    cluster's own run pods, and `agent` does to these what it can.
    """

    def __init__(self, backend: Backend, folder: Path) -> None:
        self.backend = backend
        self.namespace = f"batchllm-{uuid.uuid4().hex[:8]}"
        self.client = kube_config.new_client_from_config(str(backend.admin_kubeconfig))
        self.api = kube.CoreV1Api(self.client)
        self.batch = kube.BatchV1Api(self.client)
        with contextlib.ExitStack() as stack:
            stack.callback(self.client.close)
            self._create_namespace()
            stack.callback(self._delete_namespace)
            self.proxy = FlakyProxy(backend.admin_kubeconfig, folder)
            stack.callback(self.proxy.close)
            token = backend.double.access.user_token if backend.double else ""
            self.kubeconfig = self.proxy.write_kubeconfig(folder / "kubeconfig", token)
            if not backend.has_controllers:
                controllers = Controllers(backend.admin_kubeconfig, self.namespace)
                stack.callback(controllers.close)
            node = NodeSettings(f"node-{self.namespace}")
            self.agent: Any = (
                RealNodes(self.api, self.namespace)
                if backend.has_nodes
                else NodeAgent(backend.admin_kubeconfig, self.namespace, node)
            )
            stack.callback(self.agent.close)
            if backend.double:
                stack.callback(backend.double.allow_all)
            self._stack = stack.pop_all()

    def close(self) -> None:
        """Remove everything; raise what went wrong in the background."""
        self._stack.close()

    @property
    def double(self) -> ApiServer:
        """The API server itself; skips the test if it is a real one."""
        if self.backend.double is None:
            pytest.skip("needs the test double of the API server")
        return self.backend.double

    def allow_only(self, rules: list[dict[str, Any]]) -> None:
        """Give `kubeconfig` these rights, as a Role has them, and no others in the namespace.

        With a real API server it then leads past the proxy, whose own rights are too many.
        """
        if self.backend.double is not None:
            granted = {
                (verb, each)
                for rule in rules
                for each in rule["resources"]
                for verb in rule["verbs"]
            }
            for verb, each in {(v, r) for v in _VERBS for r in _RESOURCES} - granted:
                self.backend.double.deny(verb, each)
            return
        roles = kube.RbacAuthorizationV1Api(self.client)
        name = {"metadata": {"name": "only"}}
        group = "rbac.authorization.k8s.io"
        roles.create_namespaced_role(self.namespace, {**name, "rules": rules})
        account = {"kind": "ServiceAccount", "name": "default", "namespace": self.namespace}
        role = {"apiGroup": group, "kind": "Role", "name": "only"}
        binding = {**name, "roleRef": role, "subjects": [account]}
        roles.create_namespaced_role_binding(self.namespace, binding)
        config = yaml.safe_load(self.kubeconfig.read_text("utf-8"))
        server = self.client.configuration
        for each in config["clusters"]:
            where = {"server": server.host, "certificate-authority": server.ssl_ca_cert}
            each["cluster"] = {key: value for key, value in where.items() if value}
            each["cluster"]["insecure-skip-tls-verify"] = not server.verify_ssl
        for each in config["users"]:
            each["user"] = {"token": self.service_account_token()}
        self.kubeconfig.write_text(yaml.safe_dump(config), encoding="utf-8")

    def service_account_token(self) -> str:
        """A token of the namespace's service account, which a real API server gives."""
        wanted = {"spec": {"expirationSeconds": 3600}}
        made = self.api.create_namespaced_service_account_token("default", self.namespace, wanted)
        return str(made.status.token)

    def _create_namespace(self) -> None:
        self.api.create_namespace({"metadata": {"name": self.namespace}})
        # A cluster's controllers make these two; a bare API server has no controllers, and the
        # double has no service accounts.
        with contextlib.suppress(kube.ApiException):
            account = {"metadata": {"name": "default"}}
            self.api.create_namespaced_service_account(self.namespace, account)
        with contextlib.suppress(kube.ApiException):
            authority = {"metadata": {"name": "kube-root-ca.crt"}, "data": {"ca.crt": ""}}
            self.api.create_namespaced_config_map(self.namespace, authority)

    def _delete_namespace(self) -> None:
        for job in self.batch.list_namespaced_job(self.namespace).items:
            with contextlib.suppress(kube.ApiException):  # it is gone already
                self.batch.delete_namespaced_job(
                    job.metadata.name, self.namespace, propagation_policy="Background"
                )
        for pod in self.pods():
            with contextlib.suppress(kube.ApiException):  # it is gone already
                self.api.delete_namespaced_pod(
                    pod.metadata.name, self.namespace, grace_period_seconds=0
                )
        self.api.delete_namespace(self.namespace)
        if self.backend.double or self.backend.has_controllers:
            return
        with contextlib.suppress(kube.ApiException):  # it is gone already
            left = self.api.read_namespace(self.namespace)
            left.spec.finalizers = []
            self.api.replace_namespace_finalize(self.namespace, left)

    def pods(self, selector: str = "") -> list[Any]:
        """The namespace's pods, as the client's V1Pod."""
        listed = self.api.list_namespaced_pod(self.namespace, label_selector=selector)
        return list(listed.items)

    def pod(self, name: str) -> Any | None:
        """A pod, or None if there is none of this name."""
        try:
            return self.api.read_namespaced_pod(name, self.namespace)
        except kube.ApiException as error:
            if error.status == 404:
                return None
            raise

    def phase(self, name: str) -> str:
        """A pod's phase; "Gone" if there is no such pod."""
        pod = self.pod(name)
        return str(pod.status.phase) if pod else "Gone"

    def wait_for(self, predicate: Callable[[], T], what: str, pause_s: float = 0.05) -> T:
        """Poll until the predicate is true, and return what it did; else fail, saying `what`."""
        deadline = time.monotonic() + 90
        while not (found := predicate()):
            if time.monotonic() > deadline:
                pods = {each.metadata.name: each.status.phase for each in self.pods()}
                pytest.fail(f"gave up waiting for {what}; pods: {pods}")
            time.sleep(pause_s)
        return found

    def wait_for_phase(self, name: str, phase: str) -> Any | None:
        """Wait until a pod is in a phase ("Gone": not there), and return it."""
        self.wait_for(lambda: self.phase(name) == phase, f"pod {name} to be {phase}")
        return self.pod(name)

    def waiting_reason(self, name: str) -> str:
        """Why the pod's first container waits; empty if it doesn't."""
        pod = self.pod(name)
        states = (pod.status.container_statuses or []) if pod else []
        waiting = states[0].state.waiting if states else None
        return str(waiting.reason) if waiting else ""

    def events(self, name: str, reason: str = "") -> list[str]:
        """Messages of a pod's Events, those with this reason only if one is named."""
        selector = f"involvedObject.name={name}"
        listed = self.api.list_namespaced_event(self.namespace, field_selector=selector)
        return [each.message for each in listed.items if reason in ("", each.reason)]

    def log(self, name: str, **options: Any) -> str:
        """What a pod's container has written."""
        options["_preload_content"] = False  # else the client gives the text of a bytes object
        answer = self.api.read_namespaced_pod_log(name, self.namespace, **options)
        return bytes(answer.data).decode()

    def run_pod(self, name: str, command: list[str], **changes: Any) -> Any:
        """Create a plain pod of one container `base`; `changes` go into its spec."""
        container = {"name": "base", "image": "job:1", "command": command}
        container |= changes.pop("container", {})
        spec = {"restartPolicy": "Never", "containers": [container], **changes}
        labels = spec.pop("labels", {})
        body = {"metadata": {"name": name, "labels": labels}, "spec": spec}
        return self.api.create_namespaced_pod(self.namespace, body)

    def create_secret(self, name: str, data: Mapping[str, str]) -> None:
        encoded = {key: base64.b64encode(value.encode()).decode() for key, value in data.items()}
        body = {"metadata": {"name": name}, "data": encoded}
        self.api.create_namespaced_secret(self.namespace, body)

    def set_quota(self, hard: Mapping[str, str], name: str = "quota") -> None:
        """Create a quota, and wait until the API server applies it."""
        body = {"metadata": {"name": name}, "spec": {"hard": dict(hard)}}
        self.api.create_namespaced_resource_quota(self.namespace, body)

        def is_known() -> bool:
            found = self.api.read_namespaced_resource_quota(name, self.namespace)
            return bool(found.status and found.status.used)

        self.wait_for(is_known, "the quota's status")
