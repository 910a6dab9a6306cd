"""The chart's files, and what it renders."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Final

import yaml
from helm_python import Chart

ROOT: Final = Path(__file__).resolve().parents[2]
CHART: Final = ROOT / "helm" / "batchllm"
EXAMPLES: Final = CHART / "examples"
ALERTS: Final = CHART / "alerts"
RUNBOOKS: Final = ROOT / "docs" / "operate" / "runbooks"
RELEASE: Final = "batchllm"
NAMESPACE: Final = "batch-gpu"
"""Where the checks install the release; Airflow is in another namespace."""

Values = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Rendered:
    """An object of the rendered chart."""

    source: str
    """The template, or for a pod template `template: key`."""
    content: Mapping[str, Any]

    @property
    def kind(self) -> str:
        """Such as `Role`."""
        return str(self.content["kind"])

    @property
    def name(self) -> str:
        """`metadata.name`."""
        return str(self.content["metadata"]["name"])

    @property
    def identity(self) -> tuple[str, str, str]:
        """What no two objects of a release may share."""
        return self.kind, str(self.content["metadata"].get("namespace")), self.name


class _UniqueKeyLoader(yaml.SafeLoader):
    """YAML as the API server takes it: a key twice in one map is an error, not the last one's."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        keys = [self.construct_object(key, deep=True) for key, _ in node.value]
        twice = {key for key in keys if keys.count(key) > 1}
        if twice:
            raise yaml.constructor.ConstructorError(
                None,
                None,
                f"keys given twice: {', '.join(map(str, sorted(twice)))}",
                node.start_mark,
            )
        return super().construct_mapping(node, deep)


@cache
def chart() -> Chart:
    """The chart, loaded once."""
    return Chart.load(CHART)


def examples() -> dict[str, Values]:
    """Values by the name of their file, and the defaults as `defaults`."""
    found: dict[str, Values] = {"defaults": {}}
    for path in sorted(EXAMPLES.glob("*.yaml")):
        found[path.stem] = yaml.load(path.read_text(encoding="utf-8"), _UniqueKeyLoader)  # noqa: S506 - a SafeLoader
    return found


def render(values: Values, *, name: str = RELEASE, namespace: str = NAMESPACE) -> list[Rendered]:
    """All objects that the chart makes of the values.

    Raises:
        HelmError: a template failed, or the values aren't what values.schema.json asks for.
        yaml.YAMLError: a template's output isn't YAML, or has a key twice.
    """
    texts = chart().render(dict(values), name=name, namespace=namespace)
    return [
        Rendered(Path(path).name, content)
        for path, text in sorted(texts.items())
        if path.endswith(".yaml")
        for content in yaml.load_all(text, _UniqueKeyLoader)
        if content
    ]


def notes(values: Values, *, namespace: str = NAMESPACE) -> str:
    """What `helm upgrade --install` prints.

    Raises:
        HelmError: as `render`.
    """
    texts = chart().render(dict(values), name=RELEASE, namespace=namespace)
    return str(texts[f"{RELEASE}/templates/NOTES.txt"])


def of_kind(objects: list[Rendered], kind: str) -> dict[str, Any]:
    """Contents by name."""
    return {each.name: each.content for each in objects if each.kind == kind}


def pod_specs(objects: list[Rendered]) -> list[Any]:
    """Of all pods: those of templates and those of Jobs."""
    specs = [each.content["spec"] for each in pod_templates(objects)]
    return specs + [each["spec"]["template"]["spec"] for each in of_kind(objects, "Job").values()]


def pod_templates(objects: list[Rendered]) -> Iterator[Rendered]:
    """The pods in ConfigMaps, as the operator makes them of the templates."""
    for each in _templates(objects, "Pod"):
        pod = each.content
        pod["metadata"]["labels"] |= {
            "app.kubernetes.io/component": "plan" if each.name == "batchllm-cpu" else "run",
            "batchllm.io/job": "example",
            "batchllm.io/plan": "0123456789abcdef",
            "batch.kubernetes.io/job-completion-index": "0",
            "batchllm.io/attempt": "0123456789abcdef",
        }
        pod["spec"]["containers"][0]["command"] = ["batchllm"]
        yield each


def spark_applications(objects: list[Rendered]) -> Iterator[Rendered]:
    """The SparkApplications in ConfigMaps, as the operator makes them of the template."""
    for each in _templates(objects, "SparkApplication"):
        each.content["spec"]["arguments"] = ["plan", "--on", "spark"]
        yield each


def _templates(objects: list[Rendered], kind: str) -> Iterator[Rendered]:
    for each in objects:
        if each.kind != "ConfigMap":
            continue
        for key, text in each.content["data"].items():
            template = yaml.load(text, _UniqueKeyLoader)  # noqa: S506 - a SafeLoader
            if template["kind"] == kind:
                template["metadata"]["name"] = f"batchllm-{Path(key).stem}"
                yield Rendered(f"{each.source}: {key}", template)
