"""Which node a pod gets, and what it waits for until then."""

from __future__ import annotations

import pytest
from kubernetes.client import ApiException
from support.kubernetes.cluster import Cluster
from support.kubernetes.node import NodeSettings

GPU = "nvidia.com/gpu"


def one_gpu() -> dict[str, object]:
    return {"resources": {"limits": {GPU: "1"}}}


def unschedulable(cluster: Cluster, name: str) -> str:
    """The scheduler's message about a pod; empty while it has said nothing."""
    conditions = cluster.pod(name).status.conditions or []
    return next((each.message or "" for each in conditions if each.type == "PodScheduled"), "")


def test_a_gpu_that_appears_later(cluster: Cluster) -> None:
    assert cluster.agent
    cluster.run_pod("job", ["true"], container=one_gpu())
    message = cluster.wait_for(lambda: unschedulable(cluster, "job"), "the condition")
    assert message == (
        f"0/1 nodes are available: 1 Insufficient {GPU}. preemption: 0/1 nodes are available: "
        "1 No preemption victims found for incoming pod."
    )
    told = cluster.wait_for(lambda: cluster.events("job", "FailedScheduling"), "the Event")
    assert told == [message]
    cluster.agent.set_capacity({GPU: "1"})
    cluster.wait_for_phase("job", "Succeeded")


def test_one_gpu_for_two_pods(cluster: Cluster) -> None:
    cluster.agent.set_capacity({GPU: "1"})
    cluster.run_pod("one", ["sleep", "60"], container=one_gpu())
    cluster.wait_for_phase("one", "Running")
    cluster.run_pod("two", ["true"], container=one_gpu())
    cluster.wait_for(lambda: unschedulable(cluster, "two"), "the second to wait")
    cluster.api.delete_namespaced_pod("one", cluster.namespace)
    cluster.wait_for_phase("two", "Succeeded")
    assert cluster.phase("one") == "Gone"


def test_selectors_taints_and_affinity(cluster: Cluster) -> None:
    taint = {"key": GPU, "value": "present", "effect": "NoSchedule"}
    name = f"gpu-{cluster.namespace}"
    cluster.agent.add_node(NodeSettings(name, labels={"gpu": "h100"}, taints=[taint]))
    cluster.run_pod("stuck", ["true"], nodeSelector={"gpu": "h100"})
    expression = {"key": "gpu", "operator": "In", "values": ["h100"]}
    terms = {"nodeSelectorTerms": [{"matchExpressions": [expression]}]}
    affinity = {"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": terms}}
    tolerations = [{"key": GPU, "operator": "Exists"}]
    cluster.run_pod("job", ["true"], affinity=affinity, tolerations=tolerations)
    cluster.wait_for_phase("job", "Succeeded")
    assert cluster.pod("job").spec.node_name == name
    message = cluster.wait_for(lambda: unschedulable(cluster, "stuck"), "the condition")
    assert message == (
        "0/2 nodes are available: 1 node(s) didn't match Pod's node affinity/selector, "
        f"1 node(s) had untolerated taint {{{GPU}: present}}. preemption: 0/2 nodes are available: "
        "2 Preemption is not helpful for scheduling."
    )


def test_quotas(cluster: Cluster) -> None:
    cluster.set_quota({f"requests.{GPU}": "1"})
    cluster.agent.set_capacity({GPU: "4"})
    cluster.run_pod("one", ["sleep", "60"], container=one_gpu())
    cluster.wait_for_phase("one", "Running")
    with pytest.raises(ApiException) as refused:
        cluster.run_pod("two", ["true"], container=one_gpu())
    assert refused.value.status == 403 and refused.value.reason == "Forbidden"
    name = f"requests.{GPU}"
    message = (
        'pods \\"two\\" is forbidden: exceeded quota: quota, '
        f"requested: {name}=1, used: {name}=1, limited: {name}=1"
    )
    assert message in str(refused.value.body)
    cluster.api.delete_namespaced_pod("one", cluster.namespace, grace_period_seconds=0)

    def fits() -> bool:
        try:
            cluster.run_pod("two", ["true"], container=one_gpu())
        except ApiException:
            return False
        return True

    cluster.wait_for(fits, "the quota to be free again")
    cluster.wait_for_phase("two", "Succeeded")
