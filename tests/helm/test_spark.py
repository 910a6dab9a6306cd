"""The SparkApplication of plan, and what the chart makes for it."""

from typing import Any

import yaml
from helm_chart.rendering import NAMESPACE, ROOT, examples, of_kind, render, spark_applications
from helm_chart.validation import errors_of

from batchllm_operator import __version__

VALUES = examples()["spark"]
LOCK = (ROOT / "requirements" / "cpu-py311-linux-x86_64.lock").read_text(encoding="utf-8")


def application(**spark: Any) -> dict[str, Any]:
    values = {**VALUES, "spark": {**VALUES["spark"], **spark}}
    [found] = spark_applications(render(values))
    assert list(errors_of(found)) == []
    return dict(found.content)


def test_it_is_there_only_if_asked_for() -> None:
    assert list(spark_applications(render({}))) == []
    names = {each.name for each in render({}) if "spark" in each.name}
    assert names == set()


def test_driver_and_executors_are_confined_and_see_the_lake() -> None:
    found = application()
    assert found["metadata"]["namespace"] == NAMESPACE
    spec = found["spec"]
    assert spec["image"] == f"registry.example.com/batchllm/batchllm-spark:{__version__}"
    assert f"\npyspark=={spec['sparkVersion']} " in LOCK
    assert spec["executor"]["instances"] == 30
    for part in (spec["driver"], spec["executor"]):
        assert part["podSecurityContext"]["runAsNonRoot"] is True
        assert part["podSecurityContext"]["runAsUser"] == 10001
        assert part["securityContext"] == {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        }
        assert [each["secretRef"]["name"] for each in part["envFrom"]] == [
            "lake-credentials",
            "table-catalog",
        ]
        mounted = {each["name"] for each in part["volumeMounts"]}
        assert mounted == {each["name"] for each in spec["volumes"]}
        assert part["nodeSelector"] == {"disk": "nvme"}
        assert part["serviceAccount"] == "batchllm-spark"


def test_own_settings_win() -> None:
    conf = application(conf={"spark.log.level": "INFO"})["spec"]["sparkConf"]
    assert conf["spark.log.level"] == "INFO"
    assert conf["spark.stage.maxConsecutiveAttempts"] == "16"


def test_driver_and_executors_reach_each_other_and_no_others_reach_them() -> None:
    policies = of_kind(render(VALUES), "NetworkPolicy")
    spec = policies["batchllm-spark"]["spec"]
    ours = {"app.kubernetes.io/name": "batchllm", "app.kubernetes.io/component": "spark"}
    assert spec["podSelector"]["matchLabels"] == ours
    assert spec["ingress"] == [{"from": [{"podSelector": {"matchLabels": ours}}]}]
    assert spec["egress"][0] == {"to": [{"podSelector": {"matchLabels": ours}}]}
    [others] = policies["batchllm-tasks"]["spec"]["podSelector"]["matchExpressions"]
    assert "spark" in others["values"]
    labels = application()["spec"]["executor"]["labels"]
    assert labels.items() >= ours.items()


def test_the_image_runs_the_driver_of_this_package() -> None:
    text = (ROOT / "docker" / "spark.Dockerfile").read_text(encoding="utf-8")
    assert 'batchllm_operator/spark_driver.py" /opt/batchllm/plan.py' in text
    assert application()["spec"]["mainApplicationFile"] == "local:///opt/batchllm/plan.py"
    assert (ROOT / "batchllm_operator" / "spark_driver.py").is_file()
    values = yaml.safe_load((ROOT / "helm/batchllm/values.yaml").read_text(encoding="utf-8"))
    spark = values["spark"]
    assert f"USER {spark['runAsUser']}:{spark['runAsGroup']}" in text
