"""Everything that must hold of the chart."""

import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

import yaml
from helm_python import HelmError, HelmValuesError, lint

from helm_chart.readme import README, with_table
from helm_chart.rendering import (
    ALERTS,
    CHART,
    NAMESPACE,
    ROOT,
    RUNBOOKS,
    Rendered,
    Values,
    chart,
    examples,
    pod_templates,
    render,
    spark_applications,
)
from helm_chart.validation import KUBERNETES_VERSIONS, errors_of

REFUSED: Final[tuple[tuple[str, Values], ...]] = (
    ("/gpu", {"gpu": {"count": 1}}),
    ("/gpu/nvidia/count", {"gpu": {"nvidia": {"count": "2"}}}),
    ("/images/cuda/tag", {"images": {"cuda": {"tag": "latest"}}}),
    ("/images/rocm/digest", {"images": {"rocm": {"digest": "sha256:12"}}}),
    (
        "/modelCache/prePull/models/0/revision",
        {"modelCache": {"prePull": {"models": [{"repo": "org/model", "revision": "main"}]}}},
    ),
    ("/quota/hard/requests.nvidia.com~1gpu", {"quota": {"hard": {"requests.nvidia.com/gpu": 8}}}),
    ("/pods/runAsUser", {"pods": {"runAsUser": 0}}),
    ("/spark/executor/memory", {"spark": {"executor": {"memory": "4Gi"}}}),
    (
        "'spark.hadoop.fs.s3a.secret.key'",
        {"spark": {"conf": {"spark.hadoop.fs.s3a.secret.key": "x"}}},
    ),
    ("'HF_TOKEN'", {"pods": {"env": {"HF_TOKEN": "hf_x"}}}),
)
"""Values that the schema must refuse, and what its message must name."""


@dataclass(frozen=True, slots=True)
class Summary:
    """What was checked, and what was wrong."""

    problems: tuple[str, ...]
    text: str


def check() -> Summary:
    """Check the chart, its examples, its README and its runbooks."""
    problems = [*_metadata_problems(), *_schema_problems(), *_readme_problems()]
    num_objects = num_pods = 0
    alerts: set[str] = set()
    cases = examples()
    for name, values in cases.items():
        problems += [f"{name}: {problem}" for problem in _lint_problems(values)]
        try:
            objects = render(values)
            pods = [*pod_templates(objects), *spark_applications(objects)]
        except (HelmError, yaml.YAMLError) as error:
            problems.append(f"{name}: {error}")
            continue
        problems += [f"{name}: {problem}" for problem in _object_problems([*objects, *pods])]
        num_objects += len(objects)
        num_pods += len(pods)
        alerts |= alert_names(objects)
    problems += _runbook_problems(alerts)
    return Summary(
        tuple(problems),
        f"{len(cases)} sets of values: {num_objects} objects and {num_pods} pod templates are valid"
        f" in Kubernetes {' and '.join(KUBERNETES_VERSIONS)}; {len(alerts)} alerts have runbooks",
    )


def alert_names(objects: list[Rendered]) -> set[str]:
    """Of the alerts in PrometheusRules."""
    return {
        rule["alert"]
        for each in objects
        if each.kind == "PrometheusRule"
        for group in each.content["spec"]["groups"]
        for rule in group["rules"]
    }


def _metadata_problems() -> Iterator[str]:
    metadata = chart().metadata
    package = (ROOT / "batchllm_operator" / "__init__.py").read_text(encoding="utf-8")
    version = re.search(r'^__version__ = "(.+)"$', package, re.MULTILINE)
    if version is None or metadata["appVersion"] != version[1]:
        yield f"Chart.yaml: appVersion {metadata['appVersion']} isn't the package's version"
    if metadata["kubeVersion"] != f">={KUBERNETES_VERSIONS[0]}.0-0":
        yield f"Chart.yaml: kubeVersion {metadata['kubeVersion']} isn't what is validated"


def _lint_problems(values: Values) -> Iterator[str]:
    report = lint(CHART, dict(values), strict=True, namespace=NAMESPACE)
    for message in report["messages"]:
        if message["severity"] > 1:  # 1 is information: "icon is recommended"
            yield f"lint: {message['path']}: {message['error']}"


def _object_problems(objects: list[Rendered]) -> Iterator[str]:
    for identity, count in Counter(each.identity for each in objects).items():
        if count > 1:
            yield f"{' '.join(identity)} is there {count} times"
    for each in objects:
        for error in errors_of(each):
            yield f"{each.source}: {error}"


def _schema_problems() -> Iterator[str]:
    for place, values in REFUSED:
        try:
            chart().validate_schema(dict(values))
        except HelmValuesError as error:
            if place not in str(error):
                yield f"values.schema.json: the message for {values} doesn't name {place}: {error}"
        else:
            yield f"values.schema.json takes {values}"


def _readme_problems() -> Iterator[str]:
    text = README.read_text(encoding="utf-8")
    try:
        if with_table(text) != text:
            yield "README.md isn't up to date: run `make helm-readme`"
    except ValueError as error:
        yield str(error)


def _runbook_problems(rendered: set[str]) -> Iterator[str]:
    files = {path.stem for path in ALERTS.glob("*.yaml")}
    runbooks = {path.stem for path in RUNBOOKS.glob("BatchLLM*.md")}
    for alert in sorted(files ^ runbooks):
        missing = "runbook" if alert in files else "alert"
        yield f"{alert} has no {missing}"
    for alert in sorted(files ^ rendered):
        yield f"{alert}: no example renders the alert of a file of this name"
    for alert in sorted(runbooks):
        if not (RUNBOOKS / f"{alert}.md").read_text(encoding="utf-8").startswith(f"# {alert}\n"):
            yield f"docs/operate/runbooks/{alert}.md has another title"
