"""Faults of real kubelets and API servers (`--kube-nodes`), which run on this machine."""

from __future__ import annotations

import os
import signal
import subprocess
from typing import Any

import pytest
from support.pod_shards import Shards, in_triggerer


@in_triggerer
def test_a_kubelet_that_stops_for_a_minute_leaves_the_job_as_it_is(shards: Shards) -> None:
    if not shards.cluster.backend.has_nodes:
        pytest.skip("needs a real kubelet")
    shards.plan(delay_s=5.0)
    run = shards.start()
    name = shards.working_pod(run)
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
