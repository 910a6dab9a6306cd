"""What a pod looks like: defaults by GPU, and what a user's template and arguments change."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml
from airflow.sdk import DAG, TaskGroup
from kubernetes.client import ApiClient
from kubernetes.client import models as k8s
from support.task_runs import TaskInstance

from batchllm_operator import __version__
from batchllm_operator.operators import BatchLLMGenerateOperator, batchllm_task_group
from batchllm_operator.operators.pods.attempt import Attempt
from batchllm_operator.operators.pods.spec import num_gpus, with_secret

PLAN_URI = "s3://lake/out/_batchllm/snippets/2026-01-31/plan-0123abcd"


CONTEXT: Any = {"ti": TaskInstance()}


def operator(**arguments: Any) -> BatchLLMGenerateOperator:
    arguments = {"gpu": "nvidia", "in_cluster": False, **arguments}
    return BatchLLMGenerateOperator(
        task_id="generate",
        plan_uri=PLAN_URI,
        worker=3,
        num_workers=4,
        namespace="jobs",
        **arguments,
    )


def pod_of(task: BatchLLMGenerateOperator) -> dict[str, Any]:
    """The pod as the API gets it, valid for a real one."""
    pod = ApiClient().sanitize_for_serialization(task.build_pod_request_obj(dry_run=True))
    pod["metadata"]["name"] = "a-name"
    kubernetes_validate.validate(pod, "1.36", strict=True)
    return dict(json.loads(json.dumps(pod)))


def container_of(pod: dict[str, Any]) -> dict[str, Any]:
    return dict(pod["spec"]["containers"][0])


def env_of(pod: dict[str, Any]) -> dict[str, str]:
    return {each["name"]: each.get("value", "") for each in container_of(pod)["env"]}


@pytest.mark.parametrize(
    ("gpu", "resource", "label", "image"),
    [
        ("nvidia", "nvidia.com/gpu", "nvidia.com/gpu.present", "batchllm-cuda"),
        ("amd", "amd.com/gpu", "feature.node.kubernetes.io/amd-gpu", "batchllm-rocm"),
    ],
)
def test_gpu_presets(gpu: str, resource: str, label: str, image: str) -> None:
    pod = pod_of(operator(gpu=gpu, gpu_count=2))
    container = container_of(pod)
    assert container["resources"]["limits"][resource] == "2"
    assert container["image"] == f"{image}:{__version__}"
    assert pod["spec"]["nodeSelector"] == {label: "true"}
    assert pod["spec"]["tolerations"] == [
        {"key": resource, "operator": "Exists", "effect": "NoSchedule"}
    ]
    other = {"nvidia": "MIOPEN_USER_DB_PATH", "amd": "CUDA_CACHE_PATH"}[gpu]
    assert other not in env_of(pod)


def test_a_pod_without_a_gpu_asks_for_none() -> None:
    pod = pod_of(operator(gpu=None, runner="kubernetes", cpu="2", memory="4Gi"))
    assert container_of(pod)["resources"] == {
        "requests": {"cpu": "2", "memory": "4Gi"},
        "limits": {"memory": "4Gi"},
    }
    assert "nodeSelector" not in pod["spec"] or pod["spec"]["nodeSelector"] == {}
    assert container_of(pod)["image"] == f"batchllm-airflow:{__version__}"


def test_the_default_pod_may_do_as_little_as_it_needs() -> None:
    pod = pod_of(operator(active_deadline_seconds=7200, termination_grace_period=600))
    spec, container = pod["spec"], container_of(pod)
    assert spec["automountServiceAccountToken"] is False
    assert spec["restartPolicy"] == "Never"
    assert spec["activeDeadlineSeconds"] == 7200
    assert spec["terminationGracePeriodSeconds"] == 600
    assert spec["securityContext"]["runAsNonRoot"] is True
    assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    assert container["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }
    assert container["terminationMessagePolicy"] == "FallbackToLogsOnError"
    mounted = {mount["mountPath"]: mount["name"] for mount in container["volumeMounts"]}
    assert mounted == {"/tmp": "scratch", "/cache": "cache", "/dev/shm": "shm"}
    volumes = {volume["name"]: volume for volume in spec["volumes"]}
    assert volumes["shm"]["emptyDir"] == {"medium": "Memory", "sizeLimit": "8Gi"}
    writable = ("/tmp", "/cache")
    for name in ("HOME", "TRITON_CACHE_DIR", "VLLM_CACHE_ROOT", "TORCHINDUCTOR_CACHE_DIR"):
        assert env_of(pod)[name].startswith(writable)


def test_claims_and_secrets_are_references() -> None:
    task = operator(model_claim="models", cache_claim="caches", secret_names=["s3", "catalog"])
    pod = pod_of(task)
    volumes = {volume["name"]: volume for volume in pod["spec"]["volumes"]}
    assert volumes["models"]["persistentVolumeClaim"] == {"claimName": "models", "readOnly": True}
    assert volumes["cache"]["persistentVolumeClaim"]["claimName"] == "caches"
    assert container_of(pod)["envFrom"] == [
        {"secretRef": {"name": "s3"}},
        {"secretRef": {"name": "catalog"}},
    ]
    assert env_of(pod)["HF_HOME"] == "/models"


TEMPLATE = {
    "apiVersion": "v1",
    "kind": "Pod",
    "metadata": {"labels": {"team": "search"}},
    "spec": {
        "serviceAccountName": "batchllm-gpu",
        "nodeSelector": {"pool": "h100"},
        "priorityClassName": "batch",
        "containers": [
            {"name": "sidecar", "image": "sidecar:1"},
            {
                "name": "base",
                "image": "registry/ours:1.2",
                "env": [{"name": "HOME", "value": "/scratch"}],
                "volumeMounts": [{"name": "scratch", "mountPath": "/tmp"}],
            },
        ],
        "volumes": [
            {"name": "scratch", "emptyDir": {"sizeLimit": "50Gi"}},
            {"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": "64Gi"}},
        ],
    },
}


@pytest.mark.parametrize("kind", ["file", "dict", "full"])
def test_a_template_wins_over_defaults_and_arguments_over_it(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "pod.yaml"
    path.write_text(yaml.safe_dump(TEMPLATE))
    given: dict[str, Any] = {
        "file": dict[str, Any](pod_template_file=str(path)),
        "dict": {"pod_template_dict": TEMPLATE},
        "full": {"full_pod_spec": _deserialized(TEMPLATE)},
    }[kind]
    task = operator(
        **given, env={"LEVEL": "2"}, priority_class_name="urgent", image="registry/mine:3"
    )
    pod = pod_of(task)
    spec = pod["spec"]
    base, sidecar = spec["containers"]
    assert (base["name"], sidecar["name"]) == ("base", "sidecar")
    assert base["image"] == "registry/mine:3"
    assert spec["priorityClassName"] == "urgent"
    assert spec["serviceAccountName"] == "batchllm-gpu"
    assert spec["nodeSelector"] == {"pool": "h100"}
    assert pod["metadata"]["labels"]["team"] == "search"
    env = env_of(pod)
    assert (env["HOME"], env["LEVEL"]) == ("/scratch", "2")
    assert env["TRITON_CACHE_DIR"] == "/cache/triton"
    assert len(base["env"]) == len(env)
    mounts = {mount["mountPath"]: mount["name"] for mount in base["volumeMounts"]}
    assert mounts == {"/tmp": "scratch", "/cache": "cache", "/dev/shm": "shm"}
    volumes = {volume["name"]: volume for volume in spec["volumes"]}
    assert len(volumes) == len(spec["volumes"])
    assert volumes["shm"]["emptyDir"]["sizeLimit"] == "64Gi"
    assert base["resources"]["limits"]["nvidia.com/gpu"] == "1"
    assert pod_of(task) == pod  # building it again gives the same


def _deserialized(template: dict[str, Any]) -> k8s.V1Pod:
    from airflow.providers.cncf.kubernetes.pod_generator import PodGenerator

    return PodGenerator.deserialize_model_dict(template)


def test_resources_of_a_template_keep_the_gpus() -> None:
    base = {"name": "base", "resources": {"limits": {"memory": "1Ti"}, "requests": {"cpu": "64"}}}
    template = {"spec": {"containers": [base]}}
    resources = container_of(pod_of(operator(gpu_count=8, pod_template_dict=template)))["resources"]
    assert resources["limits"] == {"memory": "1Ti", "nvidia.com/gpu": "8"}
    assert resources["requests"]["cpu"] == "64"


def test_a_template_with_other_gpus_is_refused() -> None:
    base = {"name": "base", "resources": {"limits": {"nvidia.com/gpu": 4}}}
    task = operator(gpu_count=2, pod_template_dict={"spec": {"containers": [base]}})
    with pytest.raises(ValueError, match=r"4 x nvidia.com/gpu, the operator's gpu_count is 2"):
        task.build_pod_request_obj(dry_run=True)


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ({"gpu": "intel"}, "'nvidia' or 'amd'"),
        ({"gpu_count": 0}, "at least one"),
        ({"runner": "docker"}, "'local' or 'kubernetes'"),
        ({"secret_names": "s3"}, "list of names"),
        ({"termination_grace_period": 30}, "above 30 seconds"),
        ({"cmds": ["sh"]}, "cmds can't be set"),
        ({"memory": "1Gi", "container_resources": k8s.V1ResourceRequirements()}, "not both"),
        ({"on_kill_action": "keep_pod"}, "on_kill_action can't be set"),
        ({"callbacks": [object]}, "callbacks can't be set"),
        ({"startup_timeout_seconds": 600}, "see queue_timeout"),
    ],
)
def test_wrong_arguments_are_refused_when_the_dag_is_parsed(
    arguments: dict[str, Any], reason: str
) -> None:
    with pytest.raises(ValueError, match=reason):
        operator(**arguments)


def grace(seconds: Any) -> dict[str, Any]:
    return {"spec": {"terminationGracePeriodSeconds": seconds, "containers": [{"name": "base"}]}}


def short_graces(folder: Path) -> Iterator[dict[str, Any]]:
    """Arguments with a grace period that leaves no time to finish open parts."""
    (folder / "pod.yaml").write_text(yaml.safe_dump(grace(30)), encoding="utf-8")
    full = k8s.V1Pod(spec=k8s.V1PodSpec(containers=[], termination_grace_period_seconds=0))
    yield {"termination_grace_period": 30}
    yield {"termination_grace_period": -5}
    yield {"termination_grace_period": "29.5"}
    yield {"termination_grace_period": 0, "pod_template_dict": grace(330)}
    yield {"pod_template_file": str(folder / "pod.yaml")}
    yield {"pod_template_dict": grace(30)}
    yield {"pod_template_dict": grace("29")}
    yield {"full_pod_spec": full, "pod_template_dict": grace(330)}
    yield {"pod_template_file": str(folder / "pod.yaml"), "pod_template_dict": grace(330)}


def test_a_grace_period_without_time_for_open_parts_is_refused_when_the_dag_is_parsed(
    tmp_path: Path,
) -> None:
    """Also of a task that is mapped: Airflow would construct it only after planning."""
    refused = pytest.raises(ValueError, match="must be above 30 seconds")
    for arguments in short_graces(tmp_path):
        with refused:
            operator(**arguments)
        with DAG("job", schedule=None), refused:
            batchllm_task_group("job.yaml", gpu="nvidia", generate_args=arguments)
        with DAG("job", schedule=None, default_args=arguments), refused:
            batchllm_task_group("job.yaml", gpu="nvidia")
        with DAG("job", schedule=None), refused, TaskGroup("g", default_args=arguments):
            BatchLLMGenerateOperator.partial(task_id="generate", num_workers=1)


def test_a_grace_period_that_is_enough_or_not_known_yet_is_no_fault(tmp_path: Path) -> None:
    late = tmp_path / "late.yaml"
    enough: list[dict[str, Any]] = [
        {"pod_template_dict": grace(31)},
        {"pod_template_dict": grace(30), "termination_grace_period": 31},
        {"pod_template_dict": grace("{{ params.grace }}")},
        {"pod_template_dict": {"spec": None}},
        {"pod_template_file": "/templates/{{ params.template }}.yaml"},
        {"pod_template_file": str(late)},
    ]
    for arguments in enough:
        with DAG("job", schedule=None):
            task = operator(**arguments)
            batchllm_task_group("job.yaml", gpu="nvidia", generate_args=arguments)
    late.write_text(yaml.safe_dump(grace(30)), encoding="utf-8")  # on the worker's disk only
    pod = task.build_pod_request_obj(dry_run=True)
    with pytest.raises(ValueError, match="grace period is 30; it must be above 30"):
        task.pod_command(CONTEXT, pod.spec.termination_grace_period_seconds, 1)


def test_wrong_arguments_of_mapped_tasks_are_refused_when_the_dag_is_parsed() -> None:
    wrong = [{"runner": "docker"}, {"secret_names": "s3"}, {"cmds": ["sh"]}, {"gpu": "intel"}]
    for arguments in wrong:
        with pytest.raises(ValueError, match=r"must be|can't be set"):
            BatchLLMGenerateOperator.partial(task_id="generate", **arguments)


def test_a_gpu_means_a_pod_and_the_runner_can_be_named() -> None:
    assert operator().runner == "kubernetes"
    assert operator(gpu=None).runner == "local"
    assert operator(runner="local").runner == "local"
    assert operator(gpu=None, runner="kubernetes").runner == "kubernetes"


def test_worker_and_pod_get_the_same_command() -> None:
    task = operator(gpu_count=2, termination_grace_period=330)
    owner = Attempt.of(CONTEXT["ti"], task.table_uri(), task.work()).owner
    of_worker = ["--plan", PLAN_URI, "--worker", "3", "--num-workers", "4"]
    command = ["run", *of_worker, "--owner", owner, "--num-gpus", "2"]
    assert task.command(CONTEXT) == command
    assert task.pod_command(CONTEXT, 330, 2) == [*command, "--drain-s", "300"]


@pytest.mark.parametrize("resource", ["nvidia.com/gpu", "amd.com/gpu"])
def test_the_gpus_of_a_template_are_counted(resource: str) -> None:
    """With no `gpu` given: they set the tensor parallel size all the same."""
    given = template(resources={"limits": {resource: 4}})
    task = operator(gpu=None, runner="kubernetes", pod_template_dict=given)
    assert gpus_of(task) == 4
    assert "--num-gpus 4 --drain-s" in " ".join(task.pod_command(CONTEXT, 60, gpus_of(task)))


def gpus_of(task: BatchLLMGenerateOperator) -> int:
    return num_gpus(task.build_pod_request_obj(dry_run=True), task.settings)


@pytest.mark.parametrize(
    ("gpu", "device"),
    [
        ("nvidia", "nvidia.com/mig-3g.40gb"),
        ("nvidia", "nvidia.com/mig-1g.10gb.me"),
        ("nvidia", "nvidia.com/gpu.shared"),
        ("amd", "amd.com/cpx_nps1"),
    ],
)
@pytest.mark.parametrize("kind", ["template", "argument", "requests"])
def test_a_device_of_the_template_is_the_only_one(gpu: str, device: str, kind: str) -> None:
    """A slice and a whole GPU are on no node together."""
    given: dict[str, Any] = {
        "template": {"pod_template_dict": template(resources={"limits": {device: 2}})},
        "argument": {"container_resources": k8s.V1ResourceRequirements(limits={device: "2"})},
        "requests": {"pod_template_dict": template(resources={"requests": {device: "2"}})},
    }[kind]
    task = operator(gpu=gpu, gpu_count=2, **given)
    resources = container_of(pod_of(task))["resources"]
    assert resources["limits"] == {"memory": "32Gi", device: "2"}
    assert gpus_of(task) == 2
    assert gpus_of(operator(gpu=None, runner="kubernetes", **given)) == 2
    with pytest.raises(ValueError, match=rf"2 x {device}, the operator's gpu_count is 1"):
        gpus_of(operator(gpu=gpu, **given))


def test_a_resource_claim_is_the_only_device() -> None:
    pod = template(resources={"claims": [{"name": "gpu"}]})
    claim = {"name": "gpu", "resourceClaimTemplateName": "two-gpus"}
    pod["spec"]["resourceClaims"] = [claim]
    task = operator(gpu_count=2, pod_template_dict=pod)
    made = pod_of(task)
    assert made["spec"]["resourceClaims"] == [claim]
    assert container_of(made)["resources"]["claims"] == [{"name": "gpu"}]
    assert container_of(made)["resources"]["limits"] == {"memory": "32Gi"}
    assert gpus_of(task) == 2


def test_a_claim_beside_gpus_is_for_something_else() -> None:
    """Such as a network card; so is a share of a GPU's memory."""
    limits = {"nvidia.com/gpu": "1", "nvidia.com/gpumem": "3000"}
    given = template(resources={"claims": [{"name": "card"}], "limits": limits})
    given["spec"]["resourceClaims"] = [{"name": "card", "resourceClaimName": "card"}]
    task = operator(pod_template_dict=given)
    assert container_of(pod_of(task))["resources"]["limits"] == {"memory": "32Gi", **limits}
    assert gpus_of(task) == 1


def test_another_vendors_slice_is_refused() -> None:
    given = template(resources={"limits": {"nvidia.com/mig-3g.40gb": 1}})
    with pytest.raises(ValueError, match=r"asks for nvidia.com/mig-3g.40gb, the operator for amd"):
        gpus_of(operator(gpu="amd", pod_template_dict=given))


def test_a_pod_without_gpus_has_none() -> None:
    task = operator(gpu=None, runner="kubernetes")
    assert gpus_of(task) == 0
    assert "--num-gpus" not in task.pod_command(CONTEXT, 60, 0)


def pod_of_task(**arguments: Any) -> dict[str, Any]:
    return pod_of(operator(**arguments))


def template(**base: Any) -> dict[str, Any]:
    return {"spec": {"containers": [{"name": "base", **base}]}}


def test_a_template_that_is_not_there_is_refused() -> None:
    with pytest.raises(Exception, match=r"does not exist|not found|No such file"):
        pod_of_task(pod_template_file="/opt/batchllm/pods/typo.yaml")


def test_memory_given_to_the_operator_wins_over_the_template() -> None:
    """`OOMKilled: raise the operator's memory`, with the chart's template."""
    given = template(resources={"limits": {"memory": "64Gi"}, "requests": {"memory": "64Gi"}})
    pod = pod_of_task(memory="128Gi", pod_template_dict=given)
    assert pod["spec"]["containers"][0]["resources"]["limits"]["memory"] == "128Gi"


def test_the_deadline_of_a_template_counts() -> None:
    given = {"spec": {"activeDeadlineSeconds": 3600, "containers": [{"name": "base"}]}}
    assert pod_of_task(pod_template_dict=given)["spec"]["activeDeadlineSeconds"] == 3600


def test_groups_for_amd_do_not_take_the_hardening_away() -> None:
    given = {
        "spec": {
            "securityContext": {"supplementalGroups": [44, 109]},
            "containers": [{"name": "base", "securityContext": {"runAsUser": 1000}}],
        }
    }
    spec = pod_of_task(gpu="amd", pod_template_dict=given)["spec"]
    assert spec["securityContext"].get("runAsNonRoot") is True
    assert spec["containers"][0]["securityContext"].get("readOnlyRootFilesystem") is True


@pytest.mark.parametrize("as_dict", [True, False])
def test_airflows_own_arguments_do_not_take_the_hardening_away(as_dict: bool) -> None:
    groups: Any = {"supplementalGroups": [109]}
    writable: Any = {"runAsUser": 1000}
    if not as_dict:
        groups = k8s.V1PodSecurityContext(supplemental_groups=[109])
        writable = k8s.V1SecurityContext(run_as_user=1000)
    pod = pod_of_task(gpu="amd", security_context=groups, container_security_context=writable)
    assert pod["spec"]["securityContext"]["supplementalGroups"] == [109]
    assert pod["spec"]["securityContext"]["runAsNonRoot"] is True
    context = container_of(pod)["securityContext"]
    assert (context["runAsUser"], context["readOnlyRootFilesystem"]) == (1000, True)


def test_the_device_files_of_amd_belong_to_groups() -> None:
    assert pod_of_task(gpu="amd")["spec"]["securityContext"]["supplementalGroups"] == [44, 109]
    assert "supplementalGroups" not in pod_of_task()["spec"]["securityContext"]


@pytest.mark.parametrize(
    ("resources", "requests", "limits"),
    [
        ({"limits": {"memory": "16Gi"}}, {"cpu": "4"}, {"memory": "16Gi"}),
        ({"limits": {"cpu": "2"}}, {"memory": "32Gi"}, {"memory": "32Gi", "cpu": "2"}),
        ({"requests": {"memory": "64Gi"}}, {"cpu": "4", "memory": "64Gi"}, {"memory": "64Gi"}),
    ],
)
def test_no_request_is_above_its_limit(
    resources: dict[str, Any], requests: dict[str, str], limits: dict[str, str]
) -> None:
    """What is only limited, Kubernetes requests by itself."""
    whole = {"requests": requests, "limits": {**limits, "nvidia.com/gpu": "1"}}
    assert (
        container_of(pod_of_task(pod_template_dict=template(resources=resources)))["resources"]
        == whole
    )
    given = k8s.V1ResourceRequirements(**resources)
    assert container_of(pod_of_task(container_resources=given))["resources"] == whole


def test_a_node_selector_takes_the_place_of_the_default() -> None:
    assert pod_of_task()["spec"]["nodeSelector"] == {"nvidia.com/gpu.present": "true"}
    given = template()
    given["spec"]["nodeSelector"] = {}
    assert not pod_of_task(pod_template_dict=given)["spec"].get("nodeSelector")
    assert not pod_of_task(node_selector={})["spec"].get("nodeSelector")
    given["spec"]["nodeSelector"] = {"pool": "h100"}
    spec = pod_of_task(pod_template_dict=given, node_selector={"zone": "a"})["spec"]
    assert spec["nodeSelector"] == {"zone": "a"}
    assert pod_of_task(pod_template_dict=template())["spec"]["nodeSelector"] == {
        "nvidia.com/gpu.present": "true"
    }


def test_a_given_claim_of_models_is_where_they_are_looked_for() -> None:
    given = template(env=[{"name": "HF_HOME", "value": "/cache/huggingface"}])
    env = env_of(pod_of_task(pod_template_dict=given, model_claim="models"))
    assert (env["HF_HOME"], env["HF_HUB_OFFLINE"]) == ("/models", "1")


def test_given_secrets_win_over_the_templates() -> None:
    """Of sources with the same key the last one counts."""
    listed = [{"secretRef": {"name": name}} for name in ("own-s3", "chart-s3")]
    pod = pod_of_task(pod_template_dict=template(envFrom=listed), secret_names=["own-s3"])
    names = [each["secretRef"]["name"] for each in container_of(pod)["envFrom"]]
    assert names == ["chart-s3", "own-s3"]


def test_a_template_for_another_vendors_gpus_is_refused() -> None:
    given = template(resources={"limits": {"amd.com/gpu": 1}})
    with pytest.raises(ValueError, match=r"asks for amd.com/gpu, the operator for nvidia"):
        pod_of_task(pod_template_dict=given)


def test_a_template_without_the_main_container_is_refused() -> None:
    given = {"spec": {"containers": [{"name": "sidecar", "image": "sidecar:1"}]}}
    with pytest.raises(ValueError, match=r"no container named 'base'.*only sidecar"):
        pod_of_task(pod_template_dict=given)


def test_resources_of_a_template_do_not_take_the_memory_limit_away() -> None:
    given = template(resources={"requests": {"ephemeral-storage": "50Gi"}})
    pod = pod_of_task(pod_template_dict=given)
    assert "memory" in pod["spec"]["containers"][0]["resources"]["limits"]


def test_given_sizes_and_claims_win_over_the_templates() -> None:
    given = template(volumeMounts=[{"name": "models", "mountPath": "/models"}])
    given["spec"]["volumes"] = [
        {"name": "models", "persistentVolumeClaim": {"claimName": "theirs"}},
        {"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": "1Gi"}},
    ]
    pod = pod_of_task(pod_template_dict=given, model_claim="ours", shm_size="64Gi", cpu="16")
    volumes = {volume["name"]: volume for volume in pod["spec"]["volumes"]}
    assert volumes["models"]["persistentVolumeClaim"]["claimName"] == "ours"
    assert volumes["shm"]["emptyDir"]["sizeLimit"] == "64Gi"
    assert container_of(pod)["resources"]["requests"]["cpu"] == "16"
    pod = pod_of_task(pod_template_dict=given)
    volumes = {volume["name"]: volume for volume in pod["spec"]["volumes"]}
    assert volumes["models"]["persistentVolumeClaim"]["claimName"] == "theirs"
    assert volumes["shm"]["emptyDir"]["sizeLimit"] == "1Gi"


def test_a_connections_variables_win_over_all_others() -> None:
    """As in the worker: `env` of a container wins over `envFrom`, and of equal names the last."""
    task = operator(
        env={"AWS_DEFAULT_REGION": "us-east-1"},
        pod_template_dict=template(envFrom=[{"secretRef": {"name": "chart-s3"}}]),
    )
    keys = ["AWS_DEFAULT_REGION", "AWS_SECRET_ACCESS_KEY"]
    pod = with_secret(task.build_pod_request_obj(dry_run=True), "own", keys)
    container = ApiClient().sanitize_for_serialization(pod)["spec"]["containers"][0]
    found = {each["name"]: each for each in container["env"]}
    assert len(found) == len(container["env"])
    for key in keys:
        reference = {"name": "own", "key": key}
        assert found[key] == {"name": key, "valueFrom": {"secretKeyRef": reference}}


def test_a_wrong_gpu_in_a_task_group_is_refused_when_the_dag_is_parsed() -> None:
    with pytest.raises(ValueError, match="'nvidia' or 'amd'"), DAG("d", schedule=None):
        batchllm_task_group("/etc/job.yaml", gpu="nvidea")
