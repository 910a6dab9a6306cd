"""What docs/kubernetes.md shows is so."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml
from helm_chart.rendering import CHART, ROOT, RUNBOOKS, render

from batchllm_operator import __version__

PAGE = ROOT / "docs" / "kubernetes.md"
PAGES = [PAGE, CHART / "README.md", ROOT / "helm" / "README.md", *sorted(RUNBOOKS.glob("*.md"))]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: f"{page.parent.name}/{page.stem}")
def test_links_lead_somewhere(page: Path) -> None:
    targets = re.findall(r"\]\(([^)#]+)\)", page.read_text(encoding="utf-8"))
    for target in targets:
        assert (page.parent / target).exists(), target


def test_the_shown_values_render() -> None:
    blocks = PAGE.read_text(encoding="utf-8").split("```yaml\n")[1:]
    ours, airflows = (yaml.safe_load(block.partition("```")[0]) for block in blocks)
    [config] = [each for each in render(ours) if each.kind == "ConfigMap"]
    [volume] = airflows["workers"]["extraVolumes"]
    assert volume["configMap"]["name"] == config.name
    assert config.content["metadata"]["namespace"] == ours["airflow"]["namespace"]
    assert airflows["images"]["airflow"]["tag"] == __version__


def test_the_charts_readme_names_every_example() -> None:
    text = (CHART / "README.md").read_text(encoding="utf-8")
    assert all(f"`{path.stem}`" in text for path in (CHART / "examples").glob("*.yaml"))
