"""What docs/kubernetes.md and the other pages show is so."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml
from helm_chart.rendering import CHART, ROOT, render
from support.pages import MOUNTED_AT, PAGE, REGISTRY, shown_values

from batchllm_operator import __version__

FAULTS = ROOT / "docs" / "faults.md"
PAGES = [
    *(
        ROOT / "README.md",
        ROOT / "ARCHITECTURE.md",
        CHART / "README.md",
        ROOT / "helm" / "README.md",
    ),
    *sorted((ROOT / "docs").rglob("*.md")),
]


def anchors(page: Path) -> set[str]:
    """What a link to a part of the page may end with."""
    headings = re.findall(r"^#+ (.+)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^a-z0-9 -]", "", each.lower()).replace(" ", "-") for each in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: f"{page.parent.name}/{page.stem}")
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)]+)\)", page.read_text(encoding="utf-8")):
        path, _, anchor = target.partition("#")
        if path.startswith("https://"):
            continue
        leads_to = page.parent / path if path else page
        assert leads_to.exists(), target
        assert not anchor or anchor in anchors(leads_to), target


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
