"""A cluster for each test: the double, or a real API server named by `--kubeconfig`; see README."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from support.kubernetes.api_server import ApiServer
from support.kubernetes.cluster import Backend, Cluster, python_image
from support.kubernetes.wire import Wire
from support.pod_shards import MODES, Shards


@pytest.fixture(scope="session")
def kubernetes_backend(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Backend]:
    """The API server that all tests share."""
    if given := request.config.getoption("--kubeconfig"):
        yield Backend(Path(given), has_nodes=request.config.getoption("--kube-nodes"))
        return
    folder = tmp_path_factory.mktemp("api-server")
    server = ApiServer(folder)
    admin = server.write_kubeconfig(folder / "admin.kubeconfig", server.access.admin_token)
    yield Backend(admin, server)
    server.close()


@pytest.fixture
def cluster(kubernetes_backend: Backend, tmp_path: Path) -> Iterator[Cluster]:
    """A namespace with a node that knows the image `job:1`, which has this Python."""
    cluster = Cluster(kubernetes_backend, tmp_path)
    try:
        if not kubernetes_backend.has_nodes:
            cluster.agent.add_image("job:1", python_image())
        yield cluster
    finally:
        cluster.close()


@pytest.fixture(params=MODES)
def shards(request: pytest.FixtureRequest, cluster: Cluster, tmp_path: Path) -> Iterator[Shards]:
    """Tasks that wait in the worker, and tasks that wait in the triggerer."""
    made = Shards(cluster, tmp_path / "lake", request.param)
    yield made
    made.close()


@pytest.fixture
def api(cluster: Cluster) -> Iterator[Wire]:
    """Plain requests; nothing happens to the pods but what they ask for."""
    cluster.agent.hold_scheduling()
    yield Wire(cluster)
    cluster.agent.release_scheduling()
