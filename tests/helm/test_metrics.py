"""Pods that serve metrics, who may read them, and what tells Prometheus of them."""

import json
import re
from typing import Any

import pytest
from helm.test_chart import pods_of
from helm_chart.rendering import Values, of_kind, render
from helm_python import HelmError
from site_pages import reference
from support.shard_progress import shard_progress

from batchllm_operator.metrics import ADDRESS_VARIABLE, MetricsAddress, ShardCollector

ENABLED: Values = {"monitoring": {"metrics": {"enabled": True, "port": 9401}}}


def with_metrics(**metrics: Any) -> dict[str, Any]:
    return {"monitoring": {"metrics": {"enabled": True, **metrics}}, "cpu": {"enabled": True}}


def main(pod: dict[str, Any]) -> dict[str, Any]:
    [container] = pod["spec"]["containers"]
    return dict(container)


def variable(pod: dict[str, Any]) -> list[str]:
    return [each["value"] for each in main(pod)["env"] if each["name"] == ADDRESS_VARIABLE]


def test_by_default_nothing_is_served() -> None:
    for pod in pods_of({"cpu": {"enabled": True}}).values():
        assert variable(pod) == []
        assert "ports" not in main(pod)
        assert "annotations" not in pod["metadata"]


def test_gpu_pods_listen_on_the_named_port() -> None:
    found = pods_of(with_metrics(port=9401) | {"gpu": {"amd": {"enabled": True}}})
    for name in ("nvidia", "amd"):
        [address] = variable(found[name])
        assert MetricsAddress.parse(address) == MetricsAddress("0.0.0.0", 9401)
        assert main(found[name])["ports"] == [{"name": "metrics", "containerPort": 9401}]
    assert variable(found["cpu"]) == []
    assert "ports" not in main(found["cpu"])


def test_the_users_address_wins() -> None:
    env = {ADDRESS_VARIABLE: "[::]:9400"}
    assert variable(pods_of({**with_metrics(), "pods": {"env": env}})["nvidia"]) == ["[::]:9400"]


def test_annotations_are_added_where_they_are_wanted() -> None:
    values = with_metrics(annotations=True) | {
        "pods": {"annotations": {"team": "data", "prometheus.io/path": "/other"}}
    }
    found = pods_of(values)
    assert found["nvidia"]["metadata"]["annotations"] == {
        "team": "data",
        "prometheus.io/scrape": "true",
        "prometheus.io/port": "9400",
        "prometheus.io/path": "/other",
    }
    assert found["cpu"]["metadata"]["annotations"] == values["pods"]["annotations"]


def test_only_the_named_port_is_open() -> None:
    [policy] = of_kind(render(ENABLED), "NetworkPolicy").values()
    [rule] = policy["spec"]["ingress"]
    assert rule["ports"] == [{"protocol": "TCP", "port": 9401}]


def test_a_pod_monitor_needs_metrics() -> None:
    with pytest.raises(HelmError, match=r"monitoring\.metrics\.enabled"):
        render({"monitoring": {"podMonitor": {"enabled": True}}})
    monitoring = {**ENABLED["monitoring"], "podMonitor": {"enabled": True}}
    [monitor] = of_kind(render({"monitoring": monitoring}), "PodMonitor").values()
    [place] = monitor["spec"]["podMetricsEndpoints"]
    assert place == {"port": "metrics", "interval": "30s"}


def stalled(values: Values) -> list[dict[str, Any]]:
    [rules] = of_kind(render(values), "PrometheusRule").values()
    [group] = rules["spec"]["groups"]
    return [rule for rule in group["rules"] if rule["alert"] == "BatchLLMShardStalled"]


def test_the_alert_of_a_stalled_shard_needs_metrics_and_names_real_ones() -> None:
    alerts = {"enabled": True, "runbookBaseUrl": "https://example.com", "stalledMinutes": 45}
    assert stalled({"monitoring": {"alerts": alerts}}) == []
    [rule] = stalled({"monitoring": {**ENABLED["monitoring"], "alerts": alerts}})
    assert rule["expr"].count("45m") == 2
    collector = ShardCollector(job="j", ds="d", worker=5)
    with collector.watching(shard_progress):
        found = [sample for family in collector.collect() for sample in family.samples]
    assert set(re.findall(r"batchllm_\w+", rule["expr"])) <= {sample.name for sample in found}
    labels = {key for sample in found for key in sample.labels}
    in_texts = re.findall(r"\$labels\.(\w+)", str(rule["annotations"]))
    assert set(in_texts) <= {*labels, "pod"}


def test_the_dashboard_asks_for_metrics_that_there_are() -> None:
    values: Values = {"monitoring": {"dashboard": {"enabled": True}}}
    [config] = [each.content for each in render(values) if each.name.endswith("-dashboard")]
    assert config["metadata"]["labels"]["grafana_dashboard"] == "1"
    dashboard = json.loads(config["data"]["batchllm-jobs.json"])
    texts = [target["expr"] for panel in dashboard["panels"] for target in panel["targets"]]
    named = set(re.findall(r"batchllm_\w+", " ".join(texts)))
    listed = reference.metrics()
    assert len(named) > 5 and all(f"| `{name}` |" in listed for name in named)
    assert all('namespace="$namespace"' in text for text in texts)
