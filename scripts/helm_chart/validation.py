"""Objects against the schemas of two Kubernetes versions, strictly: no unknown field."""

from collections.abc import Iterator, Mapping
from functools import cache
from typing import Any, Final

import jsonschema
import kubernetes_validate
import kubernetes_validate.utils

from helm_chart.rendering import Rendered

KUBERNETES_VERSIONS: Final = ("1.34", "1.37")
"""The first that Chart.yaml's kubeVersion allows, and the newest whose schemas there are."""


def _closed(properties: Mapping[str, Any], required: tuple[str, ...] = ()) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": dict(properties),
        "required": list(required),
        "additionalProperties": False,
    }


_STRING: Final = {"type": "string", "minLength": 1}
_STRINGS: Final = {"type": "object", "additionalProperties": _STRING}
_DURATION: Final = {"type": "string", "pattern": "^[1-9][0-9]*(ms|s|m|h)$"}
_METADATA: Final = _closed(
    {"name": _STRING, "namespace": _STRING, "labels": _STRINGS}, ("name", "namespace")
)


def _monitoring_object(kind: str, spec: Mapping[str, Any]) -> dict[str, Any]:
    return _closed(
        {
            "apiVersion": {"const": "monitoring.coreos.com/v1"},
            "kind": {"const": kind},
            "metadata": _METADATA,
            "spec": spec,
        },
        ("apiVersion", "kind", "metadata", "spec"),
    )


_RULE: Final = _closed(
    {
        "alert": {"type": "string", "pattern": "^BatchLLM[A-Za-z]+$"},
        "expr": _STRING,
        "for": _DURATION,
        "labels": _closed({"severity": {"enum": ["info", "warning", "critical"]}}, ("severity",)),
        "annotations": _closed(
            {
                "summary": _STRING,
                "description": _STRING,
                "runbook_url": {
                    "type": "string",
                    "pattern": r"^https?://.+/BatchLLM[A-Za-z]+\.md$",
                },
            },
            ("summary", "description", "runbook_url"),
        ),
    },
    ("alert", "expr", "labels", "annotations"),
)
_OBJECTS: Final = {"type": "array", "items": {"type": "object"}}
_COUNT: Final = {"type": "integer", "minimum": 1}
_SPARK_POD: Final = {
    "cores": _COUNT,
    "memory": _STRING,
    "memoryOverhead": _STRING,
    "serviceAccount": _STRING,
    "labels": _STRINGS,
    "annotations": _STRINGS,
    "priorityClassName": _STRING,
    "nodeSelector": _STRINGS,
    "tolerations": _OBJECTS,
    "env": _OBJECTS,
    "envFrom": _OBJECTS,
    "podSecurityContext": {"type": "object"},
    "securityContext": {"type": "object"},
    "volumeMounts": _OBJECTS,
}
CUSTOM_RESOURCES: Final = {
    "SparkApplication": _closed(
        {
            "apiVersion": {"const": "sparkoperator.k8s.io/v1beta2"},
            "kind": {"const": "SparkApplication"},
            "metadata": _METADATA,
            "spec": _closed(
                {
                    "type": {"const": "Python"},
                    "pythonVersion": {"const": "3"},
                    "sparkVersion": _STRING,
                    "mode": {"const": "cluster"},
                    "image": _STRING,
                    "imagePullPolicy": _STRING,
                    "imagePullSecrets": {"type": "array", "items": _STRING},
                    "mainApplicationFile": {"type": "string", "pattern": "^local:///"},
                    "arguments": {"type": "array", "items": _STRING},
                    "restartPolicy": _closed({"type": {"const": "Never"}}, ("type",)),
                    "timeToLiveSeconds": _COUNT,
                    "sparkConf": _STRINGS,
                    "volumes": _OBJECTS,
                    "driver": _closed(_SPARK_POD),
                    "executor": _closed(_SPARK_POD | {"instances": _COUNT}, ("instances",)),
                },
                ("type", "sparkVersion", "mode", "image", "mainApplicationFile", "driver"),
            ),
        },
        ("apiVersion", "kind", "metadata", "spec"),
    ),
    "PodMonitor": _monitoring_object(
        "PodMonitor",
        _closed(
            {
                "selector": _closed({"matchLabels": _STRINGS}, ("matchLabels",)),
                "namespaceSelector": _closed({"matchNames": {"type": "array", "items": _STRING}}),
                "podTargetLabels": {"type": "array", "items": _STRING},
                "podMetricsEndpoints": {
                    "type": "array",
                    "minItems": 1,
                    "items": _closed({"port": _STRING, "interval": _DURATION}, ("port",)),
                },
            },
            ("selector", "podMetricsEndpoints"),
        ),
    ),
    "PrometheusRule": _monitoring_object(
        "PrometheusRule",
        _closed(
            {
                "groups": {
                    "type": "array",
                    "minItems": 1,
                    "items": _closed(
                        {"name": _STRING, "rules": {"type": "array", "items": _RULE}},
                        ("name", "rules"),
                    ),
                }
            },
            ("groups",),
        ),
    ),
}
"""Schemas of the fields that the chart uses. Those of Prometheus's and Spark's CRDs aren't in
Kubernetes's, so that a wrong field is found here, but a change of theirs isn't."""


def errors_of(rendered: Rendered) -> Iterator[str]:
    """What is wrong with an object, a line each."""
    custom = CUSTOM_RESOURCES.get(rendered.kind)
    if custom is not None:
        for error in jsonschema.Draft202012Validator(custom).iter_errors(rendered.content):
            yield f"{rendered.kind} {rendered.name}: {error.json_path}: {error.message}"
        return
    _keep_schemas()
    for version in KUBERNETES_VERSIONS:
        try:
            kubernetes_validate.validate(rendered.content, version, strict=True)
        except kubernetes_validate.ValidationError as error:
            path = ".".join(map(str, error.path))
            yield f"{rendered.kind} {rendered.name} in {version}: {path}: {error.message}"
        except kubernetes_validate.SchemaNotFoundError as error:
            yield f"{rendered.kind} {rendered.name}: {error.message}"


@cache
def _keep_schemas() -> None:
    """Have each schema file parsed once: one holds all definitions of a version."""
    utils = kubernetes_validate.utils
    utils.schema_contents = cache(utils.schema_contents)
