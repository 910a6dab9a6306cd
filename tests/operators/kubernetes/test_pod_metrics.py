"""What a task counts of its pods: those that were replaced, and waits for a quota."""

from __future__ import annotations

from typing import Any

import pytest
from support.pod_shards import Shards

from batchllm_operator.operators import metrics

POD_TAGS = {"stage": "run", "job": "job", "dag_id": "job"}


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of what was counted of pods, in order."""
    names: list[str] = []

    class Stats:
        @staticmethod
        def incr(stat: str, count: int, *, tags: dict[str, str]) -> None:
            if stat.startswith("batchllm.pods."):
                assert (count, tags) == (1, POD_TAGS)
                names.append(stat)

        @staticmethod
        def timing(stat: str, dt: Any, *, tags: dict[str, str]) -> None:
            """Not of pods."""

    monkeypatch.setattr(metrics, "Stats", Stats)
    return names


def test_a_replaced_pod_is_counted(shards: Shards, counted: list[str]) -> None:
    shards.plan(delay_s=0.05)
    run = shards.start()
    shards.wait_for_parts(1)
    shards.cluster.agent.evict(shards.pod())
    run.wait()
    assert counted == [metrics.PODS_REPLACED]
    shards.check_whole()


def test_a_wait_for_a_quota_is_counted_once(shards: Shards, counted: list[str]) -> None:
    shards.plan()
    shards.cluster.set_quota({"pods": "0"})
    run = shards.start(poll_interval=0.05)
    shards.wait(lambda: counted, "the wait to be counted")
    shards.cluster.api.delete_namespaced_resource_quota("quota", shards.cluster.namespace)
    run.wait()
    assert counted == [metrics.QUOTA_WAITS]
    shards.check_whole()
