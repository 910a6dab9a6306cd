"""A cluster for one test: a namespace, a node agent, and a proxy that can fail.

The API server is the double, or that of a real control plane whose kubeconfig the tests were given.
"""

from __future__ import annotations

import base64
import contextlib
import os
import sys
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import pytest
from kubernetes import client as kube
from kubernetes import config as kube_config
from support.fork_server import ForkServer
from support.kubernetes.api_client import ApiClient
from support.kubernetes.api_server import ApiServer
from support.kubernetes.node_agent import NodeAgent
from support.kubernetes.pod_worker import Image
from support.kubernetes.proxy import Proxy
from support.kubernetes.real_nodes import RealNodes

T = TypeVar("T")
_VERBS = ("create", "get", "list", "watch", "patch", "delete")
_RESOURCES = ("jobs", "pods", "pods/log", "pods/status", "secrets", "events", "configmaps")


@dataclass(frozen=True)
class Backend:
    """Where tests find an API server: the double, or a real one, maybe with nodes of its own."""

    admin_kubeconfig: Path
    is_double: bool = False
    has_nodes: bool = False


@pytest.fixture(scope="session")
def kubernetes_backend(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Backend]:
    """The API server that all tests share: the double, or a real one named by `--kubeconfig`."""
    if given := request.config.getoption("--kubeconfig"):
        yield Backend(Path(given), has_nodes=request.config.getoption("--kube-nodes"))
        return
    server = ApiServer()
    path = tmp_path_factory.mktemp("api-server") / "kubeconfig"
    yield Backend(server.write_kubeconfig(path), is_double=True)
    server.close()


@contextlib.contextmanager
def opened_cluster(
    backend: Backend, folder: Path, commands: ForkServer | None = None
) -> Iterator[Cluster]:
    """A namespace with a node that knows the image `job:1`; see `python_image`."""
    cluster = Cluster(backend, folder)
    try:
        cluster.agent.add_image("job:1", python_image(commands))
        yield cluster
    finally:
        cluster.close()


@pytest.fixture
def cluster(kubernetes_backend: Backend, tmp_path: Path, commands: ForkServer) -> Iterator[Cluster]:
    """A cluster of the test's own."""
    with opened_cluster(kubernetes_backend, tmp_path, commands) as opened:
        yield opened


def python_image(commands: ForkServer | None = None, **environment: str) -> Image:
    """An image with this Python, and the packages that it can import here.

    `commands` saves its `batchllm` the imports.
    """
    known = {
        "PATH": f"{Path(sys.executable).parent}:/usr/local/bin:/usr/bin:/bin",
        "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
        "LANG": "C.UTF-8",
    }
    return Image({**known, **environment}, commands=commands)


class Cluster:
    """What a test has of the cluster.

    `kubeconfig` is for what is tested: it goes through `proxy`, with the rights of a user. `api`,
    `batch` and `plain` go past the proxy, with an administrator's. `agent` plays the nodes; with
    `has_nodes` the cluster's own run pods, and `agent` does to these what it can.
    """

    def __init__(self, backend: Backend, folder: Path) -> None:
        self.backend = backend
        self.namespace = f"batchllm-{uuid.uuid4().hex[:8]}"
        self.client = kube_config.new_client_from_config(str(backend.admin_kubeconfig))
        self.api = kube.CoreV1Api(self.client)
        self.batch = kube.BatchV1Api(self.client)
        self.plain = ApiClient(backend.admin_kubeconfig)
        with contextlib.ExitStack() as stack:
            stack.callback(self.client.close)
            stack.callback(self.plain.close)
            self.api.create_namespace({"metadata": {"name": self.namespace}})
            stack.callback(self.api.delete_namespace, self.namespace)
            if backend.is_double:  # a real cluster puts this, and an account, into each namespace
                authority = {"metadata": {"name": "kube-root-ca.crt"}, "data": {"ca.crt": ""}}
                self.api.create_namespaced_config_map(self.namespace, authority)
            else:
                self.wait_for(self._has_account, "the account of its pods")
            self.proxy = Proxy(backend.admin_kubeconfig)
            stack.callback(self.proxy.close)
            self.kubeconfig = self.proxy.write_kubeconfig(folder / "kubeconfig")
            self.agent: Any = self._node_agent()
            stack.callback(self.agent.close)
            stack.callback(self._delete_all)
            self._stack = stack.pop_all()

    def close(self) -> None:
        """Remove everything; raise what went wrong in the background."""
        self._stack.close()

    def _node_agent(self) -> NodeAgent | RealNodes:
        if self.backend.has_nodes:
            return RealNodes(self.api, self.namespace, self.proxy)
        admin, serves_logs = self.backend.admin_kubeconfig, not self.backend.is_double
        return NodeAgent(admin, self.namespace, serves_logs=serves_logs)

    def allow_only(self, rules: list[dict[str, Any]]) -> None:
        """Give `kubeconfig` these rights, as a Role has them, and no others in the namespace.

        A real API server applies them itself, to a service account.
        """
        if self.backend.is_double:
            granted = {
                (verb, resource)
                for rule in rules
                for resource in rule["resources"]
                for verb in rule["verbs"]
            }
            for verb, resource in {(v, r) for v in _VERBS for r in _RESOURCES} - granted:
                self.proxy.deny(verb, resource)
            return
        roles = kube.RbacAuthorizationV1Api(self.client)
        name = {"metadata": {"name": "only"}}
        roles.create_namespaced_role(self.namespace, {**name, "rules": rules})
        account = {"kind": "ServiceAccount", "name": "default", "namespace": self.namespace}
        role = {"apiGroup": "rbac.authorization.k8s.io", "kind": "Role", "name": "only"}
        binding = {**name, "roleRef": role, "subjects": [account]}
        roles.create_namespaced_role_binding(self.namespace, binding)
        wanted = {"spec": {"expirationSeconds": 3600}}
        make_token = self.api.create_namespaced_service_account_token
        self.proxy.act_as(make_token("default", self.namespace, wanted).status.token)

    def _has_account(self) -> bool:
        return bool(self.api.list_namespaced_service_account(self.namespace).items)

    def _delete_all(self) -> None:
        """Remove Jobs and pods while there is a node agent to end them."""
        policy = {"propagation_policy": "Background"}
        self.batch.delete_collection_namespaced_job(self.namespace, **policy)
        self.api.delete_collection_namespaced_pod(self.namespace, grace_period_seconds=0)

    def pods(self, selector: str = "") -> list[Any]:
        """The namespace's pods, as the client's V1Pod."""
        listed = self.api.list_namespaced_pod(self.namespace, label_selector=selector)
        return list(listed.items)

    def pod(self, name: str) -> Any:
        """A pod, or None if there is none of this name."""
        return next((pod for pod in self.pods() if pod.metadata.name == name), None)

    def phase(self, name: str) -> str:
        """A pod's phase; "Gone" if there is no such pod."""
        pod = self.pod(name)
        return str(pod.status.phase) if pod else "Gone"

    def wait_for(self, predicate: Callable[[], T], what: str, pause_s: float = 0.05) -> T:
        """Poll until the predicate is true, and return what it did; else fail, saying `what`."""
        deadline = time.monotonic() + 90
        while not (found := predicate()):
            if time.monotonic() > deadline:
                pods = {pod.metadata.name: pod.status.phase for pod in self.pods()}
                pytest.fail(f"gave up waiting for {what}; pods: {pods}")
            time.sleep(pause_s)
        return found

    def wait_for_phase(self, name: str, phase: str) -> Any:
        """Wait until a pod is in a phase ("Gone": not there), and return it."""
        self.wait_for(lambda: self.phase(name) == phase, f"pod {name} to be {phase}")
        return self.pod(name)

    def waiting_reason(self, name: str) -> str:
        """Why the pod's first container waits; empty if it doesn't."""
        pod = self.pod(name)
        states = (pod.status.container_statuses or []) if pod else []
        waiting = states[0].state.waiting if states else None
        return str(waiting.reason) if waiting else ""

    def run_pod(self, name: str, command: list[str], **changes: Any) -> Any:
        """Create a plain pod of one container `base`; `changes` go into its spec."""
        container = {"name": "base", "image": "job:1", "command": command}
        container |= changes.pop("container", {})
        spec = {"restartPolicy": "Never", "containers": [container], **changes}
        body = {"metadata": {"name": name, "labels": spec.pop("labels", {})}, "spec": spec}
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
