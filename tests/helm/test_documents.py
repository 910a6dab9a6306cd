"""What docs/operate/kubernetes.md shows is so."""

import re

import yaml
from helm_chart.rendering import CHART, ROOT, render
from support.pages import MOUNTED_AT, PAGE, REGISTRY, shown_values

from batchllm_operator import __version__


def test_the_shown_values_render() -> None:
    ours, airflows, _ = shown_values()
    [config] = [each for each in render(ours) if each.kind == "ConfigMap"]
    workers = airflows["workers"]
    volumes = {volume["name"]: volume["configMap"]["name"] for volume in workers["extraVolumes"]}
    mounts = {mount["name"]: mount["mountPath"] for mount in workers["extraVolumeMounts"]}
    assert volumes["batchllm-pods"] == config.name
    assert mounts == {"batchllm-pods": MOUNTED_AT, "batchllm-specs": "/etc/batchllm"}
    assert config.content["metadata"]["namespace"] == ours["airflow"]["namespace"]
    assert airflows["images"]["airflow"]["tag"] == __version__
    assert airflows["images"]["airflow"]["repository"] == f"{REGISTRY}/batchllm-airflow"
    [source] = yaml.safe_load(airflows["extraEnvFrom"])
    assert source["secretRef"]["name"] == ours["secrets"]["s3"]


def test_the_example_dags_take_the_named_variables() -> None:
    text = PAGE.read_text(encoding="utf-8")
    named = set(re.findall(r"^\| `(BATCHLLM_[A-Z_]+)`", text, re.MULTILINE))
    dags = ["daily_snippets", "offline_ranking", "snippets_on_arrival"]
    for dag in dags:
        taken = re.findall(r"BATCHLLM_[A-Z_]+", (ROOT / "dags" / f"{dag}.py").read_text("utf-8"))
        assert set(taken) - {"BATCHLLM_FIRST_DAY"} == named
    _, airflows, example_dags = shown_values()
    env = {each["name"]: each["value"] for each in example_dags["env"]}
    assert env.keys() <= named
    mounts = {mount["mountPath"] for mount in airflows["workers"]["extraVolumeMounts"]}
    assert {env["BATCHLLM_POD_TEMPLATE_DIR"], env["BATCHLLM_SPEC_DIR"]} == mounts


def test_the_charts_readme_names_every_example() -> None:
    text = (CHART / "README.md").read_text(encoding="utf-8")
    assert all(f"`{path.stem}`" in text for path in (CHART / "examples").glob("*.yaml"))
