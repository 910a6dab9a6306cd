"""Fixtures of clusters, for the conftest.py of folders whose tests need one."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from kubernetes import client as kube
from kubernetes import config as kube_config
from support.fork_server import ForkServer
from support.kubernetes.api_server import ApiServer
from support.kubernetes.cluster import Backend, Cluster, python_image


@pytest.fixture(scope="session")
def kubernetes_backend(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Backend]:
    """The API server that all tests share: the double, or a real one named by `--kubeconfig`."""
    if given := request.config.getoption("--kubeconfig"):
        with kube_config.new_client_from_config(given) as client:
            leases = kube.CoordinationV1Api(client).list_namespaced_lease("kube-system").items
        yield Backend(
            Path(given),
            has_controllers="kube-controller-manager" in {it.metadata.name for it in leases},
            has_nodes=request.config.getoption("--kube-nodes"),
        )
        return
    folder = tmp_path_factory.mktemp("api-server")
    server = ApiServer(folder)
    admin = server.write_kubeconfig(folder / "admin.kubeconfig", server.access.admin_token)
    yield Backend(admin, server)
    server.close()


@contextmanager
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
