"""What may be given as values, and what the refusals say."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from helm_chart.check import REFUSED
from helm_chart.readme import read_values
from helm_chart.rendering import CHART, chart, render
from helm_python import Config, HelmError, HelmValuesError
from support.kubernetes.cluster import Cluster

SCHEMA = json.loads((CHART / "values.schema.json").read_text(encoding="utf-8"))
PRE_PULL = {"enabled": True, "models": [{"repo": "org/model", "revision": "0" * 40}]}

EXTRA = {"name": "weights", "nfs": {"server": "files", "path": "/weights"}}


@pytest.mark.parametrize(("place", "values"), REFUSED)
def test_wrong_values_are_refused_by_name(place: str, values: dict[str, Any]) -> None:
    with pytest.raises(HelmValuesError) as refusal:
        render(values)
    assert place in str(refusal.value)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"secrets": {"s3": {"AWS_ACCESS_KEY_ID": "AKIA"}}}, "got object"),
        ({"secrets": {"s3": "AKIA/secret+value"}}, "/secrets/s3"),
        ({"secrets": {"password": "x"}}, "'password' not allowed"),
        ({"pods": {"env": {"AWS_SECRET_ACCESS_KEY": "x"}}}, "AWS_SECRET_ACCESS_KEY"),
        ({"pods": {"env": {"db_password": "x"}}}, "db_password"),
        ({"pods": {"env": {"HF_HOME": {"valueFrom": "x"}}}}, "/pods/env/HF_HOME"),
    ],
)
def test_no_secret_can_be_given(values: dict[str, Any], message: str) -> None:
    with pytest.raises(HelmValuesError) as refusal:
        render(values)
    assert message in str(refusal.value)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (
            {"modelCache": {"prePull": {"enabled": True, "models": []}}},
            "/modelCache/prePull/models",
        ),
        (
            {"modelCache": {"prePull": PRE_PULL}},
            "set modelCache.enabled",
        ),
        (
            {"modelCache": {"prePull": {"models": [{"repo": "org/model"}]}}},
            "missing property 'revision'",
        ),
        ({"monitoring": {"alerts": {"enabled": True}}}, "runbookBaseUrl"),
        (
            {
                "monitoring": {
                    "alerts": {
                        "enabled": True,
                        "runbookBaseUrl": "https://example.com",
                        "disabled": ["BatchLLMTypo"],
                    }
                }
            },
            "there is no alert BatchLLMTypo",
        ),
        ({"gpu": {"serviceAccount": {"create": False}}}, "gpu.serviceAccount"),
        (
            {
                "gpu": {"serviceAccount": {"name": "batch"}},
                "cpu": {"enabled": True, "serviceAccount": {"name": "batch"}},
            },
            "would both make the account batch",
        ),
        (
            {"gpu": {"serviceAccount": {"name": "batchllm-cpu"}}, "cpu": {"enabled": True}},
            "would both make the account batchllm-cpu",
        ),
        ({"modelCache": {"enabled": True}}, "offline with an empty volume"),
        (
            {"modelCache": {"enabled": True, "accessModes": ["ReadOnlyMany"], "prePull": PRE_PULL}},
            "modelCache.accessModes",
        ),
        (
            {
                "modelCache": {
                    "enabled": True,
                    "existingClaim": "models",
                    "accessModes": ["ReadOnlyMany"],
                    "prePull": PRE_PULL,
                }
            },
            "modelCache.accessModes",
        ),
        (
            {
                "modelCache": {
                    "enabled": True,
                    "readOnly": False,
                    "accessModes": ["ReadOnlyMany"],
                }
            },
            "modelCache.accessModes",
        ),
        ({"networkPolicy": {"dns": {"ports": []}}}, "/networkPolicy/dns/ports"),
        ({"pods": {"extraVolumes": [{"name": "a"}]}}, "/pods/extraVolumes/0"),
        ({"pods": {"extraVolumes": [{"name": "a", "configmap": {}}]}}, "'configmap' not allowed"),
        ({"pods": {"extraVolumes": [{"name": "a.b", "emptyDir": {}}]}}, "extraVolumes/0/name"),
        ({"pods": {"extraVolumes": [EXTRA | {"name": "cache"}]}}, "cache is the name of another"),
        ({"pods": {"extraVolumes": [EXTRA, EXTRA]}}, "weights is the name of another"),
        ({"pods": {"extraVolumeMounts": [{"name": "a", "mountPath": "b"}]}}, "mountPath"),
        (
            {"pods": {"extraVolumeMounts": [{"name": "a", "mountPath": "/b"}]}},
            "a isn't in pods.extraVolumes",
        ),
        (
            {
                "pods": {
                    "extraVolumes": [EXTRA],
                    "extraVolumeMounts": [{"name": "weights", "mountPath": "/tmp/"}],
                }
            },
            "another volume is mounted at /tmp",
        ),
    ],
)
def test_values_that_make_no_sense_are_refused(values: dict[str, Any], message: str) -> None:
    with pytest.raises(HelmError) as refusal:
        render(values)
    assert message in str(refusal.value)


def test_an_absent_namespace_of_airflow_is_refused_before_anything_is_made(
    cluster: Cluster,
) -> None:
    """The ConfigMap of pod templates would fail after half of the objects."""

    def render_there(namespace: str, **values: Any) -> dict[str, str]:
        values = {"airflow": {"namespace": namespace}, **values}
        return config.render(chart(), values, name="batchllm", namespace="batch-gpu")

    with Config(kubeconfig_path=cluster.kubeconfig) as config:
        assert render_there(cluster.namespace)
        assert render_there("batch-gpu")  # the release's, which --create-namespace makes
        assert render_there("absent", podTemplates={"create": False})  # nothing goes there
        with pytest.raises(HelmError, match=r"no namespace absent; .*kubectl create namespace"):
            render_there("absent")


def objects_in(schema: Any) -> Iterator[dict[str, Any]]:
    """Every schema of an object within a schema."""
    if isinstance(schema, dict):
        if schema.get("type") == "object":
            yield schema
        for part in schema.values():
            yield from objects_in(part)
    elif isinstance(schema, list):
        for part in schema:
            yield from objects_in(part)


def test_the_schema_leaves_nothing_open() -> None:
    parts = [part for part in objects_in(SCHEMA) if part is not SCHEMA["properties"]["global"]]
    assert len(parts) > 30
    for part in parts:
        extra = part["additionalProperties"]
        assert extra is False or "$ref" in extra or extra == {"type": "string"}


def test_every_value_is_in_the_table() -> None:
    paths = [value.path for value in read_values()]
    assert len(paths) == len(set(paths)) > 80
    assert "gpu.nvidia.resources" in paths
    assert "monitoring.alerts.runbookBaseUrl" in paths
