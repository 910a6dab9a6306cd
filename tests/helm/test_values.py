"""What may be given as values, and what the refusals say."""

import json
from collections.abc import Iterator
from typing import Any

import pytest
import yaml
from helm_chart.rendering import CHART, chart, render
from helm_python import Config, HelmError, HelmValuesError
from support.kubernetes.cluster import Cluster

SCHEMA = json.loads((CHART / "values.schema.json").read_text(encoding="utf-8"))


SECRETS = """
got object: {secrets: {s3: {AWS_ACCESS_KEY_ID: AKIA}}}
/secrets/s3: {secrets: {s3: AKIA/secret+value}}
"'password' not allowed": {secrets: {password: x}}
AWS_SECRET_ACCESS_KEY: {pods: {env: {AWS_SECRET_ACCESS_KEY: x}}}
db_password: {pods: {env: {db_password: x}}}
/pods/env/HF_HOME: {pods: {env: {HF_HOME: {valueFrom: x}}}}
"""
NONSENSE = """
/modelCache/prePull/models: {modelCache: {prePull: {enabled: true, models: []}}}
set modelCache.enabled: {modelCache: {prePull: &pull {enabled: true, models: [
  {repo: org/model, revision: "0000000000000000000000000000000000000000"}]}}}
missing property 'revision': {modelCache: {prePull: {models: [{repo: org/model}]}}}
runbookBaseUrl: {monitoring: {alerts: {enabled: true}}}
there is no alert BatchLLMTypo:
  {monitoring: {alerts: {enabled: true, runbookBaseUrl: "https://a.b", disabled: [BatchLLMTypo]}}}
gpu.serviceAccount: {gpu: {serviceAccount: {create: false}}}
would both make the account batch:
  {gpu: {serviceAccount: {name: batch}}, cpu: {enabled: true, serviceAccount: {name: batch}}}
would both make the account batchllm-cpu:
  {gpu: {serviceAccount: {name: batchllm-cpu}}, cpu: {enabled: true}}
offline with an empty volume: {modelCache: {enabled: true}}
modelCache.accessModes:
  {modelCache: {enabled: true, accessModes: [ReadOnlyMany], prePull: *pull}}
"modelCache.accessModes ":
  {modelCache: {enabled: true, existingClaim: m, accessModes: [ReadOnlyMany], prePull: *pull}}
"modelCache.accessModes  ":
  {modelCache: {enabled: true, readOnly: false, accessModes: [ReadOnlyMany]}}
/networkPolicy/dns/ports: {networkPolicy: {dns: {ports: []}}}
/pods/extraVolumes/0: {pods: {extraVolumes: [{name: a}]}}
"'configmap' not allowed": {pods: {extraVolumes: [{name: a, configmap: {}}]}}
extraVolumes/0/name: {pods: {extraVolumes: [{name: a.b, emptyDir: {}}]}}
cache is the name of another:
  {pods: {extraVolumes: [{name: cache, nfs: {server: files, path: /weights}}]}}
weights is the name of another: {pods: {extraVolumes: [&w
  {name: weights, nfs: {server: files, path: /weights}}, *w]}}
mountPath: {pods: {extraVolumeMounts: [{name: a, mountPath: b}]}}
a isn't in pods.extraVolumes: {pods: {extraVolumeMounts: [{name: a, mountPath: /b}]}}
another volume is mounted at /tmp:
  {pods: {extraVolumes: [*w], extraVolumeMounts: [{name: weights, mountPath: /tmp/}]}}
"""
"""Values by what their refusal says."""


@pytest.mark.parametrize(("message", "values"), yaml.safe_load(SECRETS).items())
def test_no_secret_can_be_given(message: str, values: dict[str, Any]) -> None:
    with pytest.raises(HelmValuesError) as refusal:
        render(values)
    assert message in str(refusal.value)


@pytest.mark.parametrize(("message", "values"), yaml.safe_load(NONSENSE).items())
def test_values_that_make_no_sense_are_refused(message: str, values: dict[str, Any]) -> None:
    with pytest.raises(HelmError) as refusal:
        render(values)
    assert message.strip() in str(refusal.value)


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
