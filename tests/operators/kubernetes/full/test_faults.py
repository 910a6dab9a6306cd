"""What goes wrong on clusters, as a client of the API sees it."""

from __future__ import annotations

import pytest
from kubernetes import client as kube
from kubernetes import config as kube_config
from support.kubernetes.cluster import Cluster
from support.kubernetes.images import Image
from support.kubernetes.status import ApiError
from urllib3.exceptions import HTTPError


def conditions(cluster: Cluster, name: str) -> dict[str, tuple[str, str]]:
    """A pod's conditions: status and reason by type."""
    found = cluster.pod(name).status.conditions or []
    return {each.type: (each.status, each.reason) for each in found}


def start(cluster: Cluster, name: str) -> None:
    cluster.run_pod(name, ["sleep", "60"])
    cluster.wait_for_phase(name, "Running")


def user_api(cluster: Cluster) -> kube.CoreV1Api:
    """The API as a user has it, through the proxy, without retries."""
    configuration = kube.Configuration()
    kube_config.load_kube_config(str(cluster.kubeconfig), client_configuration=configuration)
    configuration.retries = False
    return kube.CoreV1Api(kube.ApiClient(configuration))


def test_eviction(cluster: Cluster) -> None:
    start(cluster, "job")
    cluster.agent.evict("job")
    status = cluster.pod("job").status
    assert (status.phase, status.reason) == ("Failed", "Evicted")
    assert status.message.startswith("The node was low on resource: memory.")
    assert conditions(cluster, "job")["DisruptionTarget"] == ("True", "TerminationByKubelet")
    assert status.container_statuses[0].state.terminated.exit_code == 137
    cluster.api.delete_namespaced_pod("job", cluster.namespace)
    assert cluster.phase("job") == "Gone"


def test_eviction_before_the_start(cluster: Cluster) -> None:
    cluster.agent.hold_images("job:1")
    cluster.run_pod("job", ["true"])
    cluster.wait_for(lambda: cluster.waiting_reason("job"), "the pod to wait")
    cluster.agent.evict("job")
    assert cluster.pod("job").status.reason == "Evicted"


def test_preemption(cluster: Cluster) -> None:
    trap = "trap 'exit 0' TERM; echo up; while [ ! -e /hold/go ]; do sleep 0.02; done"
    volumes = [{"name": "hold", "emptyDir": {}}]
    mounts = {"volumeMounts": [{"name": "hold", "mountPath": "/hold"}]}
    cluster.run_pod("job", ["sh", "-c", trap], container=mounts, volumes=volumes)
    cluster.wait_for(lambda: cluster.phase("job") == "Running" and cluster.log("job"), "its start")
    seen: list[tuple[str, str]] = []
    cluster.agent.preempt("job")
    pod = cluster.pod("job")
    if pod is not None:
        seen = [(each.type, each.reason) for each in pod.status.conditions]
        assert ("DisruptionTarget", "PreemptionByScheduler") in seen
    cluster.wait_for_phase("job", "Gone")
    assert cluster.events("job", "Preempted")


def test_preemption_before_the_start(cluster: Cluster) -> None:
    cluster.agent.hold_scheduling()
    cluster.run_pod("job", ["true"])
    cluster.wait_for(lambda: cluster.phase("job") == "Pending", "the pod")
    cluster.agent.preempt("job")
    assert cluster.phase("job") == "Gone"
    cluster.agent.release_scheduling()
    cluster.run_pod("next", ["true"])
    cluster.wait_for_phase("next", "Succeeded")


def test_out_of_memory(cluster: Cluster) -> None:
    start(cluster, "job")
    cluster.agent.oom_kill("job")
    pod = cluster.wait_for_phase("job", "Failed")
    ended = pod.status.container_statuses[0].state.terminated
    assert (ended.exit_code, ended.reason) == (137, "OOMKilled")
    with pytest.raises(LookupError):
        cluster.agent.oom_kill("job")


def test_a_lost_node(cluster: Cluster) -> None:
    start(cluster, "job")
    processes = cluster.agent.processes("job")
    cluster.agent.lose_node()
    assert processes and cluster.phase("job") == "Running"
    with pytest.raises(kube.ApiException) as refused:
        cluster.log("job")
    assert refused.value.status >= 500 and "connection refused" in str(refused.value.body)
    cluster.agent.mark_node_unreachable()
    assert conditions(cluster, "job")["Ready"][0] == "False"
    node = cluster.api.read_node(cluster.agent.default_node)
    assert {each.key for each in node.spec.taints} == {"node.kubernetes.io/unreachable"}
    cluster.agent.delete_pods_of_lost_node()
    pod = cluster.pod("job")
    assert pod.metadata.deletion_timestamp is not None and pod.status.phase == "Running"
    assert conditions(cluster, "job")["DisruptionTarget"] == ("True", "DeletionByTaintManager")
    cluster.agent.collect_lost_pods()
    assert cluster.phase("job") == "Gone"


def test_a_pod_that_vanishes_when_it_has_finished(cluster: Cluster) -> None:
    cluster.agent.vanish_after_finish()
    cluster.run_pod("job", ["sh", "-c", "echo done"])
    cluster.wait_for_phase("job", "Gone")
    cluster.run_pod("next", ["true"])
    cluster.wait_for_phase("next", "Succeeded")


def test_a_command_that_is_not_run(cluster: Cluster) -> None:
    cluster.agent.add_image("idle:1", Image(replaced_command=["true"]))
    cluster.run_pod("job", ["sh", "-c", "exit 9"], container={"image": "idle:1"})
    cluster.wait_for_phase("job", "Succeeded")


def test_an_api_server_that_is_away(cluster: Cluster) -> None:
    api = user_api(cluster)
    start(cluster, "job")
    follower = api.read_namespaced_pod_log(
        "job", cluster.namespace, follow=True, _preload_content=False
    )
    cluster.proxy.down()
    with pytest.raises((HTTPError, OSError)):
        api.list_namespaced_pod(cluster.namespace)
    with pytest.raises(HTTPError):
        list(follower)
    follower.close()
    assert cluster.phase("job") == "Running"
    cluster.proxy.up()
    assert len(api.list_namespaced_pod(cluster.namespace).items) == 1
    cluster.proxy.slow(0.01)
    assert len(api.list_namespaced_pod(cluster.namespace).items) == 1
    api.api_client.close()


def test_an_answer_that_is_lost(cluster: Cluster) -> None:
    api = user_api(cluster)
    container = {"name": "base", "image": "job:1", "command": ["true"]}
    body = {
        "metadata": {"name": "job"},
        "spec": {"restartPolicy": "Never", "containers": [container]},
    }
    cluster.proxy.lose_next_response("POST", "/pods")
    with pytest.raises((HTTPError, OSError)):
        api.create_namespaced_pod(cluster.namespace, body)
    assert cluster.proxy.lost == 1
    cluster.wait_for(lambda: cluster.pod("job"), "the pod that was made all the same")
    with pytest.raises(kube.ApiException) as refused:
        api.create_namespaced_pod(cluster.namespace, body)
    assert refused.value.status == 409
    api.api_client.close()


def test_rights_and_failures_of_the_server(cluster: Cluster) -> None:
    api = user_api(cluster)
    cluster.double.deny("list", "pods")
    with pytest.raises(kube.ApiException) as refused:
        api.list_namespaced_pod(cluster.namespace)
    assert refused.value.status == 403
    assert 'cannot list resource \\"pods\\" in API group \\"\\" in' in str(refused.value.body)
    cluster.double.allow_all()
    cluster.double.fail_next("GET", "pods", ApiError(429, "TooManyRequests", "slow down"))
    with pytest.raises(kube.ApiException) as refused:
        api.list_namespaced_pod(cluster.namespace)
    assert refused.value.status == 429
    assert api.list_namespaced_pod(cluster.namespace).items == []
    old, cluster.double.access.user_token = cluster.double.access.user_token, "rotated"
    try:
        with pytest.raises(kube.ApiException) as refused:
            api.list_namespaced_pod(cluster.namespace)
        assert refused.value.status == 401 and '"reason": "Unauthorized"' in str(refused.value.body)
    finally:
        cluster.double.access.user_token = old
        api.api_client.close()
