"""What the chart renders, as objects."""

import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from helm_chart.check import check
from helm_chart.rendering import (
    CHART,
    NAMESPACE,
    Rendered,
    Values,
    chart,
    examples,
    notes,
    of_kind,
    pod_specs,
    pod_templates,
    render,
    spark_applications,
)
from helm_chart.validation import errors_of
from helm_python import Chart, package

from batchllm_operator import __version__
from batchllm_operator.operators.jobs.pod import default_pod, with_gpus

EXAMPLES = sorted(examples())
MODEL = {"repo": "org/model", "revision": "0" * 40}


def one(objects: list[Rendered], kind: str) -> Any:
    """The content of the only object of a kind."""
    [found] = of_kind(objects, kind).values()
    return found


def pods_of(values: Values) -> dict[str, Any]:
    """Contents of the pod templates, by preset."""
    return {
        each.name.removeprefix("batchllm-"): each.content for each in pod_templates(render(values))
    }


def pre_pull(models: list[dict[str, Any]], **others: Any) -> dict[str, Any]:
    return {
        "modelCache": {"enabled": True, "prePull": {"enabled": True, "models": models}}
    } | others


def test_all_checks_hold() -> None:
    assert check().problems == ()


@pytest.mark.parametrize("example", EXAMPLES)
def test_every_pod_is_confined(example: str) -> None:
    for spec in pod_specs(render(examples()[example])):
        pod = spec["securityContext"]
        assert pod["runAsNonRoot"] is True
        assert pod["runAsUser"] > 0
        assert pod["seccompProfile"] == {"type": "RuntimeDefault"}
        assert pod["fsGroupChangePolicy"] == "OnRootMismatch"
        assert spec["restartPolicy"] == "Never"
        assert not spec.keys() & {"hostNetwork", "hostPID", "hostIPC", "initContainers"}
        assert all("hostPath" not in volume for volume in spec["volumes"])
        for container in spec["containers"]:
            assert container["securityContext"] == {
                "allowPrivilegeEscalation": False,
                "readOnlyRootFilesystem": True,
                "capabilities": {"drop": ["ALL"]},
            }
            assert container["resources"]["limits"]["memory"]


@pytest.mark.parametrize("example", EXAMPLES)
def test_every_image_is_pinned(example: str) -> None:
    specs = pod_specs(render(examples()[example]))
    images = [container["image"] for spec in specs for container in spec["containers"]]
    assert images
    for image in images:
        tag = image.partition("@")[0].rpartition("/")[2].partition(":")[2]
        assert tag == __version__
        assert ("@sha256:" in image) is (example == "hardened")


@pytest.mark.parametrize(
    ("preset", "resource", "image"),
    [("nvidia", "nvidia.com/gpu", "batchllm-cuda"), ("amd", "amd.com/gpu", "batchllm-rocm")],
)
def test_a_preset_asks_for_as_many_gpus(preset: str, resource: str, image: str) -> None:
    values = {"nvidia": {"enabled": False}, "amd": {"enabled": False}}
    pods = pods_of({"gpu": {**values, preset: {"enabled": True, "count": 4}}})
    assert set(pods) == {preset}
    spec = pods[preset]["spec"]
    [container] = spec["containers"]
    assert container["image"].startswith(f"{image}:")
    assert container["resources"]["limits"][resource] == "4"
    assert container["resources"]["requests"][resource] == "4"
    assert spec["serviceAccountName"] == "batchllm-gpu"
    assert spec["activeDeadlineSeconds"] == 86400
    assert spec["terminationGracePeriodSeconds"] == 330


@pytest.mark.parametrize(
    ("gpu", "device"), [("nvidia", "nvidia.com/mig-3g.40gb"), ("amd", "amd.com/cpx_nps1")]
)
def test_slices_of_gpus_come_without_whole_ones(gpu: str, device: str) -> None:
    resources = {"limits": {device: "1"}}
    pod = pods_of({"gpu": {gpu: {"enabled": True, "resources": resources}}})[gpu]
    assert pod["spec"]["containers"][0]["resources"]["limits"] == {"memory": "64Gi", device: "1"}
    assert f"{gpu}.com/gpu" not in pod["spec"]["containers"][0]["resources"]["requests"]


def test_both_presets_stand_side_by_side() -> None:
    pods = pods_of(examples()["both"])
    assert set(pods) == {"nvidia", "amd"}
    assert {pod["spec"]["priorityClassName"] for pod in pods.values()} == {
        one(render(examples()["both"]), "PriorityClass")["metadata"]["name"]
    }


def test_pods_need_no_writable_root() -> None:
    [container] = pods_of(pre_pull([MODEL]))["nvidia"]["spec"]["containers"]
    env = {each["name"]: each["value"] for each in container["env"]}
    mounts = {each["mountPath"]: each for each in container["volumeMounts"]}
    assert set(mounts) == {"/dev/shm", "/tmp", "/cache", "/models"}
    assert mounts["/models"]["readOnly"] is True
    assert env["HOME"] == "/tmp"
    assert env["HF_HOME"] == "/models"
    assert env["HF_HUB_OFFLINE"] == "1"


def test_own_variables_replace_the_charts() -> None:
    pod = pods_of({"pods": {"env": {"TMPDIR": "/cache/tmp", "NCCL_DEBUG": "WARN"}}})["nvidia"]
    env = [(each["name"], each["value"]) for each in pod["spec"]["containers"][0]["env"]]
    assert ("TMPDIR", "/cache/tmp") in env
    assert ("NCCL_DEBUG", "WARN") in env
    assert len(env) == len({name for name, _ in env})


def test_a_template_says_what_the_operators_do_without_one() -> None:
    """Values are the defaults of the package's pod.yaml, and the rest is read from it."""
    pods = pods_of({"cpu": {"enabled": True}, "gpu": {"amd": {"enabled": True}}})
    for gpu in ("nvidia", "amd", None):
        operators = default_pod(gpu, "base")
        with_gpus(operators, gpu, 1)
        chart, own = pods[gpu or "cpu"]["spec"], operators["spec"]
        for part in ("nodeSelector", "tolerations", "securityContext", "restartPolicy"):
            assert chart.get(part) == own.get(part), part
        assert sorted(chart["volumes"], key=str) == sorted(own["volumes"], key=str)
        [container], [default] = chart["containers"], own["containers"]
        assert container["securityContext"] == default["securityContext"]
        assert container["resources"]["limits"] == default["resources"]["limits"]
        given, known = ({e["name"]: e.get("value") for e in c["env"]} for c in (container, default))
        known = {**known, "HF_HOME": "/cache/huggingface"}
        del known["BATCHLLM_JOB_UID"]  # from the Job, which isn't there yet
        assert given == known


def test_further_fields_of_pods_are_in_every_template() -> None:
    fields: dict[str, Any] = {
        "runtimeClassName": "nvidia",
        "schedulerName": "volcano",
        "affinity": {"podAntiAffinity": {}},
        "topologySpreadConstraints": [
            {"maxSkew": 1, "topologyKey": "zone", "whenUnsatisfiable": "DoNotSchedule"}
        ],
        "initContainers": [{"name": "fetch", "image": "fetch:1"}],
    }
    node = {"name": "NODE", "valueFrom": {"fieldRef": {"fieldPath": "spec.nodeName"}}}
    values = {"cpu": {"enabled": True}, "pods": {**fields, "extraEnv": [node]}}
    for pod in pods_of(values).values():
        assert {name: pod["spec"][name] for name in fields} == fields
        assert node in pod["spec"]["containers"][0]["env"]


def test_labels_that_the_policies_select_by_stay() -> None:
    labels = {"app.kubernetes.io/name": "other", "azure.workload.identity/use": "true"}
    pod = pods_of({"pods": {"labels": labels}})["nvidia"]
    assert pod["metadata"]["labels"]["app.kubernetes.io/name"] == "batchllm"
    assert pod["metadata"]["labels"]["azure.workload.identity/use"] == "true"


def test_templates_lie_where_airflow_can_mount_them() -> None:
    objects = render(examples()["connections"])
    config = one(objects, "ConfigMap")
    assert config["metadata"]["namespace"] == "data-airflow"
    assert yaml.safe_load(config["data"]["nvidia.yaml"])["metadata"]["namespace"] == NAMESPACE


def test_the_model_cache_outlives_the_release() -> None:
    claim = one(render(pre_pull([MODEL])), "PersistentVolumeClaim")
    assert claim["metadata"]["annotations"] == {"helm.sh/resource-policy": "keep"}
    assert "storageClassName" not in claim["spec"]
    kinds = {each.kind for each in render(examples()["hardened"])}
    assert "PersistentVolumeClaim" not in kinds


def test_other_models_are_another_job() -> None:
    other = {**MODEL, "revision": "1" * 40}
    jobs = [one(render(pre_pull(models)), "Job") for models in ([MODEL], [other], [MODEL])]
    names = [job["metadata"]["name"] for job in jobs]
    assert names[0] == names[2] != names[1]
    assert all(len(name) <= 63 for name in names)


def test_the_job_downloads_what_is_listed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    import huggingface_hub

    models: list[dict[str, Any]] = [MODEL, {**MODEL, "repo": "org/other", "allow": ["*.json"]}]
    [container] = one(render(pre_pull(models)), "Job")["spec"]["template"]["spec"]["containers"]
    assert container["command"] == ["python", "-c"]
    script, argument = container["args"]
    calls: list[tuple[str, str, Any]] = []

    def download(repo: str, *, revision: str, allow_patterns: list[str] | None) -> str:
        calls.append((repo, revision, allow_patterns))
        return "/models"

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    monkeypatch.setattr("sys.argv", ["-c", argument])
    exec(compile(script, "pre_pull.py", "exec"), {})
    assert calls == [("org/model", "0" * 40, None), ("org/other", "0" * 40, ["*.json"])]
    assert "org/other" in capsys.readouterr().out


def test_quantities_of_the_quota_are_strings() -> None:
    quota = one(render(examples()["amd"]), "ResourceQuota")
    assert quota["spec"]["hard"] == {"pods": "40", "requests.amd.com/gpu": "8"}


def test_batch_preempts_nobody() -> None:
    priority = one(render(examples()["both"]), "PriorityClass")
    assert priority["value"] < 0
    assert priority["preemptionPolicy"] == "Never"
    assert priority["globalDefault"] is False


def test_the_packaged_chart_renders_the_same(tmp_path: Path) -> None:
    archive = package(CHART, destination=tmp_path)
    values = dict(examples()["monitoring"])
    with Chart.load(archive) as packaged:
        assert not any(file["name"].startswith("examples/") for file in packaged.files)
        assert packaged.render(values) == chart().render(values)


def test_names_fit_whatever_the_release_is_called() -> None:
    values = pre_pull([MODEL], priorityClass={"create": True})
    for each in render(values, name="a" * 53, namespace="b" * 63):
        in_namespace = each.kind not in ("ConfigMap", "PriorityClass")
        assert len(each.name) <= (63 if in_namespace else 253), each.name


EVERYTHING = pre_pull(
    [MODEL],
    cpu={"enabled": True},
    priorityClass={"create": True},
    quota={"enabled": True},
    monitoring=examples()["monitoring"]["monitoring"],
)


@pytest.mark.parametrize(
    ("one_release", "another"),
    [
        (("batchllm", "batch-gpu"), ("batchllm", "batch-gpu-2")),
        (("batchllm", "b-c"), ("batchllm-b", "c")),
        (("a" * 50 + "-eu", "batch-gpu"), ("a" * 50 + "-us", "batch-gpu")),
        (("a" * 30 + "." + "a" * 20, "batch-gpu"), ("a" * 30 + "." + "a" * 21, "batch-gpu")),
    ],
)
def test_releases_share_no_object(one_release: tuple[str, str], another: tuple[str, str]) -> None:
    """Two write into Airflow's namespace, and PriorityClasses are the cluster's."""
    objects = [
        {each.identity for each in render(EVERYTHING, name=name, namespace=namespace)}
        for name, namespace in (one_release, another)
    ]
    assert objects[0] and not objects[0] & objects[1]
    for _, _, name in objects[0] | objects[1]:
        assert re.fullmatch(
            r"[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*", name
        )


def test_the_default_release_has_short_names() -> None:
    names = {each.kind: each.name for each in render(EVERYTHING)}
    assert names["ConfigMap"] == "batchllm-pod-templates.batch-gpu"
    assert names["PriorityClass"] == "batchllm-batch.batch-gpu"
    assert names["ResourceQuota"] == "batchllm"
    assert "batchllm-pod-templates.batch-gpu" in notes({})


def test_an_overridden_name_is_cut_with_a_digest_too() -> None:
    quotas = [
        one(render({"quota": {"enabled": True}, "fullnameOverride": name}), "ResourceQuota")
        for name in ("a" * 60 + "-eu", "a" * 60 + "-us", "a" * 40)
    ]
    names = [quota["metadata"]["name"] for quota in quotas]
    assert len(set(names)) == 3
    assert {len(name) for name in names} == {40}


def test_pods_share_an_account_that_one_of_them_makes() -> None:
    shared = {"name": "batch"}
    objects = render(
        {
            "gpu": {"serviceAccount": shared},
            "cpu": {"enabled": True, "serviceAccount": {**shared, "create": False}},
        }
    )
    assert list(of_kind(objects, "ServiceAccount")) == ["batch"]
    assert {each.content["spec"]["serviceAccountName"] for each in pod_templates(objects)} == {
        "batch"
    }


def test_null_takes_a_default_away() -> None:
    selector = {"nvidia.com/gpu.present": None, "cloud.google.com/gke-accelerator": "nvidia-l4"}
    spec = pods_of({"gpu": {"nvidia": {"nodeSelector": selector}}})["nvidia"]["spec"]
    assert spec["nodeSelector"] == {"cloud.google.com/gke-accelerator": "nvidia-l4"}


@pytest.mark.parametrize(
    ("preset", "label"),
    [("nvidia", "nvidia.com/gpu.present"), ("amd", "feature.node.kubernetes.io/amd-gpu")],
)
def test_a_template_can_be_without_a_node_selector(preset: str, label: str) -> None:
    """The operator takes it as it is, where nodes have no labels of their GPUs."""
    added = pods_of({"gpu": {preset: {"enabled": True, "nodeSelector": {"pool": "gpus"}}}})
    assert added[preset]["spec"]["nodeSelector"] == {label: "true", "pool": "gpus"}
    none = pods_of({"gpu": {preset: {"enabled": True, "nodeSelector": {label: None}}}})
    assert "nodeSelector" not in none[preset]["spec"]


def test_a_volume_that_pods_may_write_needs_no_job() -> None:
    pod = pods_of({"modelCache": {"enabled": True, "readOnly": False}})["nvidia"]["spec"]
    env = {each["name"] for each in pod["containers"][0]["env"]}
    assert "HF_HUB_OFFLINE" not in env


def test_a_claim_that_is_filled_may_be_read_only() -> None:
    cache = {"enabled": True, "existingClaim": "models", "accessModes": ["ReadOnlyMany"]}
    kinds = {each.kind for each in render({"modelCache": cache})}
    assert not kinds & {"PersistentVolumeClaim", "Job"}


def test_a_wrong_field_is_found() -> None:
    objects = render(examples()["monitoring"])
    for each in objects:
        part = "data" if each.kind == "ConfigMap" else "metadata"
        broken = {**each.content, part: {**each.content[part], "bogus": {"a": 1}}}
        assert any("bogus" in error for error in errors_of(Rendered("x", broken))), each.kind


def test_further_volumes_are_in_every_pod() -> None:
    volumes = [
        {"name": "weights", "persistentVolumeClaim": {"claimName": "weights", "readOnly": True}},
        {"name": "company", "projected": {"sources": [{"configMap": {"name": "company-ca"}}]}},
    ]
    mounts = [
        {"name": "weights", "mountPath": "/weights", "readOnly": True},
        {"name": "company", "mountPath": "/etc/ca.crt", "subPath": "ca.crt"},
    ]
    values = pre_pull(
        [MODEL],
        **{kind: {"enabled": True} for kind in ("cpu", "spark")},
        gpu={"amd": {"enabled": True}},
        pods={"extraVolumes": volumes, "extraVolumeMounts": mounts},
    )
    objects = render(values)
    pods = [*pod_templates(objects), *spark_applications(objects)]
    assert [error for each in [*objects, *pods] for error in errors_of(each)] == []
    specs = pod_specs(objects)
    assert len(specs) == 4
    for spec in specs:
        assert spec["volumes"][-2:] == volumes
        assert spec["containers"][0]["volumeMounts"][-2:] == mounts
    [application] = spark_applications(objects)
    spark = application.content["spec"]
    assert [each for each in spark["volumes"] if each in volumes] == volumes
    for part in ("driver", "executor"):
        assert [each for each in spark[part]["volumeMounts"] if each in mounts] == mounts
