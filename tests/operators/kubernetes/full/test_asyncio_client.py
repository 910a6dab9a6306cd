"""The API as kubernetes_asyncio sees it, which is what Airflow's triggerer uses."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from kubernetes_asyncio import client as kube
from kubernetes_asyncio import config as kube_config
from kubernetes_asyncio import watch
from support.kubernetes.cluster import Cluster


def test_a_pod_from_create_to_delete(cluster: Cluster) -> None:
    found = asyncio.run(_life_of_a_pod(cluster))
    assert found["log"] == b"one\ntwo\n"
    assert set(found["types"]) == {"MODIFIED"}
    assert found["phases"][-1] == "Succeeded"
    assert cluster.phase("job") == "Gone"


async def _life_of_a_pod(cluster: Cluster) -> dict[str, Any]:
    configuration = kube.Configuration()
    await kube_config.load_kube_config(str(cluster.kubeconfig), client_configuration=configuration)
    container = {"name": "base", "image": "job:1", "command": ["sh", "-c", "echo one; echo two"]}
    body = {
        "metadata": {"name": "job"},
        "spec": {"restartPolicy": "Never", "containers": [container]},
    }
    found: dict[str, Any] = {"types": [], "phases": []}
    async with kube.ApiClient(configuration) as connection:
        api = kube.CoreV1Api(connection)
        created = await api.create_namespaced_pod(cluster.namespace, body)
        with pytest.raises(kube.ApiException) as refused:
            await api.create_namespaced_pod(cluster.namespace, body)
        assert refused.value.status == 409
        async with watch.Watch() as changes:
            async for event in changes.stream(
                api.list_namespaced_pod,
                cluster.namespace,
                timeout_seconds=30,
                resource_version=created.metadata.resource_version,
            ):
                found["types"].append(event["type"])
                found["phases"].append(event["object"].status.phase)
                if found["phases"][-1] == "Succeeded":
                    break
        answer: Any = await api.read_namespaced_pod_log(
            "job", cluster.namespace, follow=True, _preload_content=False
        )
        found["log"] = await answer.content.read()
        answer.close()
        events = await api.list_namespaced_event(
            cluster.namespace, field_selector="involvedObject.name=job"
        )
        assert "Started" in {each.reason for each in events.items}
        await api.delete_namespaced_pod("job", cluster.namespace)
    await asyncio.sleep(0.05)  # aiohttp's connections end in the loop's next rounds
    return found
