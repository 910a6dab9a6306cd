"""A cluster for each test: the double, or a real API server named by `--kubeconfig`; see README."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from support.fork_server import ForkServer
from support.forked_children import fork_children
from support.kubernetes.cluster import Cluster, cluster, kubernetes_backend
from support.pod_shards import MODES, Shards

from batchllm_operator.operators.jobs import watch

__all__ = ["cluster", "kubernetes_backend", "shards"]


@pytest.fixture(params=MODES)
def shards(
    request: pytest.FixtureRequest,
    cluster: Cluster,
    commands: ForkServer,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> Iterator[Shards]:
    """Tasks that wait in the worker, and tasks that wait in the triggerer."""
    fork_children(commands, monkeypatch)
    monkeypatch.setattr(watch, "_LOOK_S", 0.3)
    made = Shards(cluster, tmp_path / "lake", request.param)
    yield made
    made.close()
