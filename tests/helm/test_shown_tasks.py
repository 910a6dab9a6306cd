"""The tasks that docs/operate/kubernetes.md and airflow.md show have the pods that they should."""

from pathlib import Path

from helm_chart.rendering import NAMESPACE
from support.pages import AIRFLOW, PAGE, REGISTRY, START, blocks, image_of, pods_of, shown_values

from batchllm_operator import __version__


def test_the_shown_tasks_have_pods(tmp_path: Path) -> None:
    """As the page's values make them, with nothing else given."""
    ours, _, _ = shown_values()
    generating, amd = (*blocks(START, "python"), *blocks(PAGE, "python"))
    pods = pods_of(generating, ours, tmp_path)
    assert {name: image_of(pod) for name, pod in pods.items()} == {
        "generate": f"{REGISTRY}/batchllm-cuda:{__version__}"
    }
    pods = pods_of(amd, ours, tmp_path)
    spec = pods["generate"]["spec"]
    assert pods["generate"]["metadata"]["namespace"] == NAMESPACE
    assert image_of(pods["generate"]) == f"{REGISTRY}/batchllm-rocm:{__version__}"
    assert spec["securityContext"]["supplementalGroups"] == [44, 110]
    assert spec["securityContext"]["runAsNonRoot"] is True
    assert spec["tolerations"][0]["key"] == "amd.com/gpu"


def test_the_tasks_of_the_page_on_airflow_have_pods(tmp_path: Path) -> None:
    text = AIRFLOW.read_text(encoding="utf-8")
    ours, _, _ = shown_values()
    for value in ("gpu.nvidia.count: 2", "cpu.enabled: true", "connections.createSecrets: true"):
        assert f"`{value}`" in text
    values = {
        **ours,
        "gpu": {"nvidia": {"count": 2}},
        "cpu": {"enabled": True},
        "connections": {"createSecrets": True},
    }
    [code] = [block for block in blocks(AIRFLOW, "python") if "pod_template_file" in block]
    pods = pods_of(code, values, tmp_path)
    assert {name: image_of(pod) for name, pod in pods.items()} == {
        "generate": f"{REGISTRY}/batchllm-cuda:{__version__}",
        "plan": f"{REGISTRY}/batchllm-airflow:{__version__}",
    }
    assert {pod["metadata"]["namespace"] for pod in pods.values()} == {NAMESPACE}
    [container] = pods["generate"]["spec"]["containers"]
    assert container["resources"]["limits"] == {"memory": "96Gi", "nvidia.com/gpu": "2"}
