"""What a Job and its pods look like: defaults, and what templates, arguments and hooks change."""

import inspect
import json
from pathlib import Path
from typing import Any
from unittest import mock

import kubernetes_validate
import pytest
import yaml
from airflow.providers.cncf.kubernetes.hooks.kubernetes import KubernetesHook
from airflow.providers.cncf.kubernetes.operators import pod as pod_module
from airflow.providers.cncf.kubernetes.operators.job import KubernetesJobOperator
from airflow.providers.cncf.kubernetes.operators.pod import KubernetesPodOperator
from airflow.providers.cncf.kubernetes.pod_generator import PodGenerator
from airflow.providers.common.compat.sdk import AirflowFailException
from airflow.sdk import DAG
from kubernetes.client import ApiClient
from kubernetes.client import models as k8s
from support.task_runs import TaskInstance

from batchllm_operator import __version__
from batchllm_operator.operators import BatchLLMGenerateOperator, batchllm_task_group
from batchllm_operator.operators.jobs import job_operator
from batchllm_operator.operators.jobs.pod import escaped
from batchllm_operator.operators.jobs.pod import pod_of as template_of

PLAN_URI = "s3://lake/out/_batchllm/snippets/2026-01-31/plan-0123abcd"


CONTEXT: Any = {"ti": TaskInstance(), "run_id": "r", "dag": None, "dag_run": mock.Mock(run_id="r")}


def operator(**arguments: Any) -> BatchLLMGenerateOperator:
    arguments = {"gpu": "nvidia", "in_cluster": False, "num_workers": 4, **arguments}
    return BatchLLMGenerateOperator(
        task_id="generate", plan_uri=PLAN_URI, namespace="jobs", **arguments
    )


def pod_of(task: BatchLLMGenerateOperator) -> dict[str, Any]:
    """The pod as the API gets it, valid for a real one."""
    pod = ApiClient().sanitize_for_serialization(task.build_pod_request_obj(dry_run=True))
    pod["metadata"]["name"] = "a-name"
    kubernetes_validate.validate(pod, "1.36", strict=True)
    return dict(json.loads(json.dumps(pod)))


def job_of(task: BatchLLMGenerateOperator, *keys: str, **ti: Any) -> dict[str, Any]:
    """The Job as the API gets it, valid for a real one."""
    with mock.patch.object(KubernetesHook, "is_in_cluster", False):
        job = task.request(CONTEXT, list(keys))
    kubernetes_validate.validate(job, "1.36", strict=True)
    return dict(json.loads(json.dumps(job)))


def container_of(pod: dict[str, Any]) -> dict[str, Any]:
    return dict(pod["spec"]["containers"][0])


def env_of(pod: dict[str, Any]) -> dict[str, str]:
    return {each["name"]: each.get("value", "") for each in container_of(pod)["env"]}


def template(spec: Any = None, **base: Any) -> dict[str, Any]:
    """A pod's template, with a main container of these fields."""
    return {
        "pod_template_dict": {"spec": {"containers": [{"name": "base", **base}], **(spec or {})}}
    }


def part(pod: dict[str, Any], path: str) -> Any:
    """A part of a pod's spec: fields, and items of lists by name or path, with `|` between them."""
    value: Any = pod["spec"]
    for key in path.replace("main", "containers|base").split("|"):
        if isinstance(value, list):
            named = [item for item in value if key in (item.get("name"), item.get("mountPath"))]
            value = named[-1] if named else None
        else:
            value = (value or {}).get(key)
    return value


CPU = {"gpu": None, "runner": "kubernetes"}
PODS: list[dict[str, Any]] = yaml.safe_load(
    Path(__file__).with_name("pods.yaml").read_text().replace("VERSION", __version__)
)


@pytest.mark.parametrize("case", PODS)
def test_a_pod_is_the_default_one_with_its_template_and_arguments(case: dict[str, Any]) -> None:
    parts, arguments = dict(case), dict(case["given"])
    del parts["given"]
    if arguments.keys() & {"main", "spec"}:
        arguments |= template(arguments.pop("spec", {}), **arguments.pop("main", {}))
    pod = pod_of(operator(**arguments))
    assert {path: part(pod, path) or None for path in parts} == {
        path: value or None for path, value in parts.items()
    }


def test_an_argument_may_be_a_model() -> None:
    resources = k8s.V1ResourceRequirements(limits={"memory": "16Gi"})
    groups = k8s.V1PodSecurityContext(supplemental_groups=[109])
    user = k8s.V1SecurityContext(run_as_user=1000)
    contexts = {"security_context": groups, "container_security_context": user}
    pod = pod_of(operator(container_resources=resources, **contexts))
    assert part(pod, "main|resources|limits") == {"memory": "16Gi", "nvidia.com/gpu": "1"}
    assert part(pod, "securityContext|supplementalGroups") == [109]
    assert part(pod, "securityContext|runAsNonRoot") is True
    assert part(pod, "main|securityContext|runAsUser") == 1000


@pytest.mark.parametrize(
    ("arguments", "num_gpus"),
    [
        (CPU, 0),
        ({**CPU, **template(resources={"limits": {"nvidia.com/gpu": 4}})}, 4),
        ({**CPU, **template(resources={"limits": {"amd.com/gpu": 4}})}, 4),
        ({**CPU, "resource_claims": {"gpus": "two-gpus"}, "gpu_count": 2}, 2),
        ({**template(resources={"claims": [{"name": "gpus"}]}), "gpu_count": 2}, 2),
    ],
)
def test_the_gpus_of_a_pod_are_shared_by_its_worker(
    arguments: dict[str, Any], num_gpus: int
) -> None:
    """With no `gpu` given, too: they set the tensor parallel size all the same."""
    task = operator(**arguments)
    assert template_of(task)[1] == num_gpus
    command = " ".join(task.pod_command(CONTEXT, 60, num_gpus))
    assert f"--num-gpus {num_gpus} --worker" in command if num_gpus else "--num-gpus" not in command


UNFIT: list[tuple[dict[str, Any], str]] = [
    (
        template(resources={"limits": {"nvidia.com/gpu": 4}}),
        "4 x nvidia.com/gpu, .* gpu_count is 1",
    ),
    (template(resources={"limits": {"amd.com/gpu": 1}}), "amd.com/gpu, the operator for nvidia"),
    (template(resources={"limits": {"nvidia.com/mig-3g.40gb": 1}}) | {"gpu": "amd"}, "for amd"),
    ({"pod_template_file": "/opt/batchllm/pods/typo.yaml"}, "does not exist"),
    (template({"containers": [{"name": "sidecar"}]}), "no container named 'base'.*only sidecar"),
    (template({"containers": [{"image": "a"}]}), "no container named 'base'"),
    (template({"volumes": [{"emptyDir": {}}]}), "each of its volumes needs a name"),
    (template(volumeMounts=[{"name": "a"}]), "each of its volumeMounts needs a mountPath"),
    (template(volumeMounts=[{"mountPath": "/a"}]), "Invalid value for `name`"),
]


@pytest.mark.parametrize(("arguments", "reason"), UNFIT)
def test_a_template_that_is_unfit_is_refused(arguments: dict[str, Any], reason: str) -> None:
    with pytest.raises(AirflowFailException, match=reason):
        job_of(operator(**arguments))


def test_a_template_is_a_file_a_dictionary_or_a_model_and_arguments_win(tmp_path: Path) -> None:
    volumes = [{"name": "scratch", "emptyDir": {"sizeLimit": "5Gi"}}]
    spec = {"serviceAccountName": "gpu", "priorityClassName": "batch", "volumes": volumes}
    env = [{"name": "HOME", "value": "/scratch"}]
    given = template(spec, image="registry/ours:1.2", env=env)["pod_template_dict"]
    given |= {"apiVersion": "v1", "kind": "Pod", "metadata": {"labels": {"team": "search"}}}
    given["spec"]["containers"].insert(0, {"name": "sidecar", "image": "sidecar:1"})
    path = tmp_path / "pod.yaml"
    path.write_text(yaml.safe_dump(given))
    own = {"env": {"LEVEL": "2"}, "priority_class_name": "urgent", "image": "registry/mine:3"}
    pod, *others = [
        pod_of(operator(**{kind: value}, **own))
        for kind, value in {
            "pod_template_file": str(path),
            "pod_template_dict": given,
            "full_pod_spec": PodGenerator.deserialize_model_dict(given),
        }.items()
    ]
    assert others == [pod, pod]
    assert pod["metadata"]["labels"]["team"] == "search"
    assert [container["name"] for container in pod["spec"]["containers"]] == ["base", "sidecar"]
    for where, value in {
        "main|image": "registry/mine:3",
        "priorityClassName": "urgent",
        "serviceAccountName": "gpu",
        "main|env|HOME|value": "/scratch",
        "main|env|LEVEL|value": "2",
        "main|env|TRITON_CACHE_DIR|value": "/cache/triton",
        "volumes|scratch|emptyDir|sizeLimit": "5Gi",
        "main|resources|limits|nvidia.com/gpu": "1",
    }.items():
        assert part(pod, where) == value, where
    for named in (part(pod, "main|env"), part(pod, "main|volumeMounts"), pod["spec"]["volumes"]):
        assert len({item["name"] for item in named}) == len(named)


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ({"gpu": "intel"}, "'nvidia' or 'amd'"),
        ({"gpu_count": 0}, "at least one"),
        ({"runner": "docker"}, "'local' or 'kubernetes'"),
        ({"secret_names": "s3"}, "list of names"),
        ({"termination_grace_period": 30}, "above 30 seconds"),
        ({"memory": "1Gi", "container_resources": k8s.V1ResourceRequirements()}, "not both"),
        ({"startup_timeout_seconds": 600}, "see queue_timeout"),
    ],
)
def test_wrong_arguments_are_refused_when_the_dag_is_parsed(
    arguments: dict[str, Any], reason: str
) -> None:
    with pytest.raises(ValueError, match=reason):
        operator(**arguments)


def grace(seconds: Any) -> dict[str, Any]:
    return template({"terminationGracePeriodSeconds": seconds})


def test_a_grace_period_without_time_for_open_parts_is_refused_when_the_dag_is_parsed(
    tmp_path: Path,
) -> None:
    path = tmp_path / "pod.yaml"
    path.write_text(yaml.safe_dump(grace(30)["pod_template_dict"]), encoding="utf-8")
    file = {"pod_template_file": str(path)}
    full = k8s.V1Pod(spec=k8s.V1PodSpec(containers=[], termination_grace_period_seconds=0))
    refused = pytest.raises(ValueError, match="must be above 30 seconds")
    argument = "termination_grace_period"
    arguments: Any
    for arguments in (
        *({argument: seconds} for seconds in (30, -5, "29.5")),
        *({argument: 0, **grace(330)}, file, grace(30), grace("29")),
        *({"full_pod_spec": full, **grace(330)}, {**file, **grace(330)}),
    ):
        with refused:
            operator(**arguments)
        with DAG("job", schedule=None, default_args=arguments), refused:
            batchllm_task_group("job.yaml", gpu="nvidia")


def test_a_grace_period_that_is_enough_or_not_known_yet_is_no_fault(tmp_path: Path) -> None:
    late = tmp_path / "late.yaml"
    arguments: Any
    for arguments in (
        *(grace(31), {**grace(30), "termination_grace_period": 31}),
        *(grace("{{ params.grace }}"), {"pod_template_dict": {"spec": None}}),
        {"pod_template_file": "/templates/{{ params.template }}.yaml"},
        {"pod_template_file": str(late)},
    ):
        task = operator(**arguments)
    late.write_text(yaml.safe_dump(grace(30)["pod_template_dict"]), encoding="utf-8")
    with pytest.raises(AirflowFailException, match="grace period is 30; it must be above 30"):
        job_of(task)  # on the worker, whose disk has it


def test_a_gpu_means_a_pod_and_the_runner_can_be_named() -> None:
    assert operator().runner == "kubernetes"
    assert operator(gpu=None).runner == "local"
    assert operator(runner="local").runner == "local"
    assert operator(gpu=None, runner="kubernetes").runner == "kubernetes"


def num_gpus_of(task: BatchLLMGenerateOperator) -> int:
    return template_of(task)[1]


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
        "template": template(resources={"limits": {device: 2}}),
        "argument": {"container_resources": k8s.V1ResourceRequirements(limits={device: "2"})},
        "requests": template(resources={"requests": {device: "2"}}),
    }[kind]
    task = operator(gpu=gpu, gpu_count=2, **given)
    resources = container_of(pod_of(task))["resources"]
    assert resources["limits"] == {"memory": "64Gi", device: "2"}
    assert num_gpus_of(task) == 2
    assert num_gpus_of(operator(gpu=None, runner="kubernetes", **given)) == 2
    with pytest.raises(ValueError, match=rf"2 x {device}, the operator's gpu_count is 1"):
        num_gpus_of(operator(gpu=gpu, **given))


def test_a_job_has_a_pod_for_each_worker_and_says_which_failures_count() -> None:
    """Its own controller answers them, and nothing else does."""
    job = job_of(operator(gpu_count=2, max_restarts=3, ttl_seconds_after_finished=60))
    spec, labels = job["spec"], job["metadata"]["labels"]
    owner = labels["batchllm.io/attempt"]
    assert job["metadata"]["name"] == f"batchllm-job-generate-{owner}"
    assert labels["batchllm.io/try-id"] == str(CONTEXT["ti"].id)
    assert (spec["completions"], spec["parallelism"], spec["completionMode"]) == (4, 4, "Indexed")
    assert (spec["backoffLimitPerIndex"], spec["podReplacementPolicy"]) == (3, "Failed")
    assert (spec["activeDeadlineSeconds"], spec["ttlSecondsAfterFinished"]) == (86400, 60)
    final, disrupted = spec["podFailurePolicy"]["rules"]
    assert (final["action"], final["onExitCodes"]["values"]) == ("FailJob", [2, 4, 6, 7])
    assert (disrupted["action"], disrupted["onPodConditions"][0]["type"]) == (
        *("Ignore", "DisruptionTarget"),
    )
    pod = spec["template"]
    of_plan = ["--plan", PLAN_URI, "--owner", f"{owner}/$(JOB_COMPLETION_INDEX)"]
    of_worker = ["--worker", "$(JOB_COMPLETION_INDEX)", "--num-workers", "4"]
    assert container_of(pod)["command"] == ["batchllm"]
    assert container_of(pod)["args"] == (
        ["run", *of_plan, "--num-gpus", "2", *of_worker, "--drain-s", "300"]
    )
    assert "batchllm.io/try-id" not in pod["metadata"]["labels"]
    assert pod["metadata"]["labels"]["batchllm.io/plan"] == "plan-0123abcd"


def test_labels_that_selectors_rely_on_are_the_operators_own() -> None:
    own = {"app.kubernetes.io/name": "batchllm", "app.kubernetes.io/component": "run"}
    theirs = dict.fromkeys(own, "search")
    given = template()["pod_template_dict"] | {"metadata": {"labels": theirs}}
    job = job_of(operator(labels=theirs, pod_template_dict=given))
    for labels in (job["metadata"]["labels"], job["spec"]["template"]["metadata"]["labels"]):
        assert own.items() <= labels.items()


def test_dollars_in_arguments_stay() -> None:
    assert escaped("$(HOME) $5") == "$$(HOME) $$5"
    assert escaped('{"text": "$(JOB_COMPLETION_INDEX)"}') == '{"text": "$$(JOB_COMPLETION_INDEX)"}'


def test_a_jobs_template_and_a_pods_are_merged(tmp_path: Path) -> None:
    pod: Any = template(env=[{"name": "LEVEL", "value": "job"}])["pod_template_dict"]
    pod["spec"]["activeDeadlineSeconds"] = 3600
    whole: dict[str, Any] = {"metadata": {"annotations": {"team": "search"}}}
    whole["spec"] = {"template": pod, "backoffLimitPerIndex": 9, "maxFailedIndexes": 2}
    path = tmp_path / "job.yaml"
    path.write_text(yaml.safe_dump(whole))
    job = job_of(operator(job_template_file=str(path), labels={"cost": "42"}))
    spec = job["spec"]
    assert (spec["backoffLimitPerIndex"], spec["maxFailedIndexes"]) == (9, 2)
    assert spec["activeDeadlineSeconds"] == 3600
    assert job["metadata"]["annotations"]["team"] == "search"
    assert job["metadata"]["labels"]["cost"] == spec["template"]["metadata"]["labels"]["cost"]
    assert env_of(spec["template"])["LEVEL"] == "job"
    given = operator(job_template_file=str(path), **template(image="ours:1"))
    assert container_of(job_of(given)["spec"]["template"])["image"] == "ours:1"


def test_a_job_for_a_queue_is_suspended_until_it_is_admitted() -> None:
    job = job_of(operator(queue_name="gpus", min_workers=2))
    metadata = job["metadata"]
    assert job["spec"]["suspend"] is True
    assert metadata["labels"]["kueue.x-k8s.io/queue-name"] == "gpus"
    assert metadata["annotations"]["kueue.x-k8s.io/job-min-parallelism"] == "2"
    few = job_of(operator(queue_name="gpus", min_workers=2, num_workers=2))
    assert few["metadata"]["annotations"] == {}  # Kueue refuses as many as there are
    assert "suspend" not in job_of(operator())["spec"]
    with pytest.raises(ValueError, match="min_workers needs queue_name"):
        operator(min_workers=2)


def test_what_a_mutation_hook_sets_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    def hook(pod: k8s.V1Pod) -> None:
        pod.spec.security_context.run_as_user = 4242
        pod.spec.containers[0].resources.limits["memory"] = "7Gi"
        pod.spec.containers[0].env.append(k8s.V1EnvVar(name="HOOKED", value="1"))

    monkeypatch.setattr(pod_module, "pod_mutation_hook", hook)
    given = operator(container_security_context={"runAsUser": 1000})
    pod = job_of(given)["spec"]["template"]
    assert pod["spec"]["securityContext"]["runAsUser"] == 4242
    assert container_of(pod)["resources"]["limits"]["memory"] == "7Gi"
    assert env_of(pod)["HOOKED"] == "1"


def test_a_connections_variables_win_over_all_others() -> None:
    """As in the worker: `env` of a container wins over `envFrom`, and of equal names the last."""
    task = operator(
        env={"AWS_DEFAULT_REGION": "us-east-1"},
        **template(envFrom=[{"secretRef": {"name": "chart-s3"}}]),
    )
    keys = ["AWS_DEFAULT_REGION", "AWS_SECRET_ACCESS_KEY"]
    job = job_of(task, *keys)
    container = container_of(job["spec"]["template"])
    by_name = {each["name"]: each for each in container["env"]}
    assert len(by_name) == len(container["env"])
    for key in keys:
        reference = {"name": job["metadata"]["name"], "key": key}
        assert by_name[key] == {"name": key, "valueFrom": {"secretKeyRef": reference}}


def test_arguments_without_effect_are_refused_by_name() -> None:
    for name in job_operator._REFUSED:
        with pytest.raises(ValueError, match=f"{name} can't be set"):
            operator(**{name: None})


def test_every_argument_of_the_provider_holds_or_is_refused() -> None:
    """One that a later release adds has to be looked at: it would be taken and perhaps ignored."""
    known = {*job_operator._REFUSED, *HELD}
    for base in (KubernetesJobOperator, KubernetesPodOperator):
        arguments = inspect.signature(base.__init__).parameters.keys() - {"self", "kwargs"}
        assert arguments <= known, arguments - known


HELD = {
    *("active_deadline_seconds", "affinity", "annotations", "automount_service_account_token"),
    *("backoff_limit", "base_container_name", "cluster_context", "config_file", "configmaps"),
    *("container_resources", "container_security_context", "deferrable", "dns_config"),
    *("dnspolicy", "do_xcom_push", "env_from", "env_vars", "full_job_spec", "full_pod_spec"),
    *("host_aliases", "hostname", "hostnetwork", "image", "image_pull_policy"),
    *("image_pull_secrets", "in_cluster", "init_containers", "job_template_file"),
    *("kubernetes_conn_id", "labels", "namespace", "node_selector", "on_finish_action"),
    *("pod_runtime_info_envs", "pod_template_dict", "pod_template_file", "poll_interval"),
    *("ports", "priority_class_name", "runtime_class_name", "schedulername", "secrets"),
    *("security_context", "service_account_name", "subdomain", "suspend"),
    *("termination_grace_period", "termination_message_policy", "tolerations"),
    *("ttl_seconds_after_finished", "volume_mounts", "volumes"),
}
