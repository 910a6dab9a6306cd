"""Faults of real kubelets and API servers (`--kube-nodes`), which run on this machine."""

import os
import signal
import subprocess
from pathlib import Path
from typing import Any

import pytest
from kubernetes import client as kube
from support.pod_shards import Shards, in_triggerer
from urllib3.exceptions import HTTPError


@pytest.fixture(autouse=True)
def real_kubelet(shards: Shards) -> None:
    if not shards.cluster.backend.has_nodes:
        pytest.skip("needs a real kubelet")


@in_triggerer
def test_a_kubelet_that_stops_for_a_minute_leaves_the_job_as_it_is(shards: Shards) -> None:
    run, name = shards.at_work(delay_s=5.0)
    uid = shards.job().metadata.uid
    kubelets = [int(it) for it in subprocess.check_output(["pgrep", "-x", "kubelet"]).split()]

    def ready() -> set[Any]:
        nodes = shards.cluster.api.list_node().items
        return {it.status for node in nodes for it in node.status.conditions if it.type == "Ready"}

    try:
        for pid in kubelets:
            os.kill(pid, signal.SIGSTOP)
        shards.wait(lambda: ready() == {"Unknown"}, "the node to be lost")
    finally:
        for pid in kubelets:
            os.kill(pid, signal.SIGCONT)
    shards.wait(lambda: ready() == {"True"}, "the node to be back")
    assert (shards.job().metadata.uid, shards.pod()) == (uid, name)
    run.wait()
    shards.check_whole()


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_an_api_server_that_is_killed_and_starts_again_goes_unnoticed(shards: Shards) -> None:
    """Sockets whose TLS handshakes break off are left to the garbage by urllib3."""
    run, name = shards.at_work(delay_s=2.0)
    (pid,) = subprocess.check_output(["pgrep", "-x", "kube-apiserver"]).decode().split()
    process = Path("/proc", pid)
    words = (process / "cmdline").read_bytes().rstrip(b"\0").split(b"\0")
    folder, log = (process / "cwd").readlink(), (process / "fd/2").readlink()
    os.kill(int(pid), signal.SIGKILL)

    def is_ready() -> bool:
        try:
            return bool(shards.cluster.api.list_node().items)
        except (HTTPError, kube.ApiException):
            return False

    with log.open("ab") as file:
        options: dict[str, Any] = {"cwd": folder, "stdout": file, "stderr": file}
        subprocess.run([b"setsid", b"--fork", *words], check=True, **options)
    shards.wait(is_ready, "the API server to be back")
    assert shards.pod() == name
    run.wait()
    assert shards.report()["num_resumed_parts"] == 0  # one pod did it all
    shards.check_whole()
