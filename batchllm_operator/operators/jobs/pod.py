"""The pod of a stage: `pod.yaml`, and how a user's template and arguments are merged over it."""

import copy
import re
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Final, Literal

import yaml
from airflow.providers.cncf.kubernetes.operators.pod import KubernetesPodOperator
from airflow.providers.cncf.kubernetes.pod_generator import PodGenerator
from kubernetes.client import ApiClient
from kubernetes.client import models as k8s

from batchllm_operator import __version__

GpuVendor = Literal["nvidia", "amd"]

DRAIN_MARGIN_S: Final = 30  # the end of a pod's grace period, for closing the engine
JOB_UID: Final = "$(BATCHLLM_JOB_UID)"
INDEX: Final = "$(JOB_COMPLETION_INDEX)"
"""Kubernetes replaces these two by the Job's UID and the pod's index, in the pod's arguments."""

_FILE: Final[Mapping[str, Any]] = yaml.safe_load(
    Path(__file__).with_name("pod.yaml").read_text(encoding="utf-8")
)
JOB: Final[dict[str, Any]] = _FILE["job"]
KINDS: Final[Mapping[str, Any]] = _FILE["kinds"]
VENDORS: Final = [name for name, kind in KINDS.items() if "resource" in kind]
_UID: Final = {"fieldPath": "metadata.labels['batch.kubernetes.io/controller-uid']"}
_UID_ENV: Final = {"name": JOB_UID[2:-1], "valueFrom": {"fieldRef": _UID}}
_NAMED: Final = {
    **dict.fromkeys(("containers", "initContainers", "volumes", "env", "claims"), "name"),
    **dict.fromkeys(("resourceClaims", "imagePullSecrets"), "name"),
    "volumeMounts": "mountPath",
}
"""Lists of a pod whose items have a name, and the field that holds it."""


def default_pod(gpu: GpuVendor | None, container_name: str) -> dict[str, Any]:
    """A pod with the least privileges that a stage needs, without a name, a command or labels."""
    kind = KINDS[gpu or "cpu"]
    pod = merged(copy.deepcopy(_FILE["pod"]), {"spec": kind["spec"]})
    main = main_container(pod)
    main |= {"name": container_name, "image": f"{kind['image']}:{__version__}"}
    main["env"] = [*main["env"], _UID_ENV]
    return dict(pod)


def main_container(pod: Mapping[str, Any]) -> dict[str, Any]:
    main: dict[str, Any] = pod["spec"]["containers"][0]
    return main


def variables(values: Mapping[str, Any]) -> list[dict[str, str]]:
    return [{"name": name, "value": str(value)} for name, value in values.items()]


def plain(model: Any) -> Any:
    """An object of the API as JSON has it, from a model, a dictionary, or a list of either."""
    return ApiClient().sanitize_for_serialization(model)


def job_templates(task: Any) -> Iterator[dict[str, Any]]:
    """The user's templates of the Job; raises `ValueError` if a file is missing or isn't one."""
    if task.job_template_file:
        yield _read_template("job_template_file", task.job_template_file)
    if task.full_job_spec:
        yield plain(task.full_job_spec)


def _templates(task: Any) -> Iterator[dict[str, Any]]:
    """The user's templates of pods, later ones over earlier ones."""
    for template in job_templates(task):
        yield (template.get("spec") or {}).get("template") or {}
    if task.pod_template_file:
        yield _read_template("pod_template_file", task.pod_template_file)
    elif task.pod_template_dict:
        yield dict(task.pod_template_dict)
    if task.full_pod_spec:
        yield plain(task.full_pod_spec)


def _read_template(argument: str, file: str) -> dict[str, Any]:
    if not Path(file).is_file():
        raise ValueError(f"{argument} {file} does not exist")
    content = yaml.safe_load(Path(file).read_text(encoding="utf-8"))
    if not isinstance(content, dict):
        raise ValueError(f"{argument} {file} is no object of the API")
    return content


def pod_of(task: Any) -> tuple[dict[str, Any], int]:
    """A task's pod, before the provider merges its arguments in, and the number of its GPUs.

    Raises `ValueError` if a template is missing, has no main container, or asks for other GPUs.
    """
    name = task.base_container_name
    pod = default_pod(task.gpu, name)
    for template in _templates(task):
        containers = (template.get("spec") or {}).get("containers") or ()
        names = [str(container.get("name")) for container in containers]
        if names and name not in names:
            raise ValueError(
                f"the pod template has no container named {name!r} (base_container_name), only"
                f" {', '.join(names)}"
            )
        pod = merged(pod, template)
    pod = merged(pod, {"spec": _arguments(task)})
    num_gpus = with_gpus(pod, task.gpu, task.gpu_count, task.gpu_resource)
    return pod, num_gpus or (task.gpu_count if task.resource_claims else 0)


def _arguments(task: Any) -> dict[str, Any]:
    """A pod's spec of arguments: our own, and over them the provider's, as far as the provider
    wouldn't merge those field by field, or would add them a second time.
    """
    volumes: list[dict[str, Any]] = []
    mounts: list[dict[str, Any]] = []

    def mount(name: str, path: str, *, read_only: bool | None = None, **volume: Any) -> None:
        volumes.append({"name": name, **volume})
        mounts.append({"name": name, "mountPath": path, "readOnly": read_only})

    if task.shm_size is not None:
        mount("shm", "/dev/shm", emptyDir={"medium": "Memory", "sizeLimit": task.shm_size})
    if task.cache_claim is not None:
        mount("cache", "/cache", persistentVolumeClaim={"claimName": task.cache_claim})
    env: dict[str, Any] = {}
    if task.model_claim is not None:
        claim = {"claimName": task.model_claim, "readOnly": True}
        mount("models", "/models", read_only=True, persistentVolumeClaim=claim)
        env = {"HF_HOME": "/models", "HF_HUB_OFFLINE": "1"}
    given = task.env_vars if isinstance(task.env_vars, list) else variables(task.env_vars)
    claims = task.resource_claims.items()
    resources = {
        "requests": {"cpu": task.cpu, "memory": task.memory},
        "limits": {"memory": task.memory},
        "claims": [{"name": name} for name, _ in claims],
    }
    main = {
        "name": task.base_container_name,
        "env": [*variables(env | dict(task.env or {})), *plain(given)],
        "envFrom": [{"secretRef": {"name": name}} for name in task.secret_names],
        "volumeMounts": [*mounts, *plain(task.volume_mounts)],
        "resources": merged(resources, plain(task.container_resources) or {}, "resources"),
        "securityContext": plain(task.container_security_context),
    }
    return {
        "containers": [main],
        "nodeSelector": task.node_selector if task.has_node_selector else None,
        "resourceClaims": [{"name": name, "resourceClaimTemplateName": of} for name, of in claims],
        "securityContext": plain(task.security_context or None),
        "terminationGracePeriodSeconds": task.termination_grace_period,
        "volumes": [*volumes, *plain(task.volumes)],
    }


def built_pod(
    task: Any, pod: Mapping[str, Any], context: Any, *, dry_run: bool = False, **changed: Any
) -> k8s.V1Pod:
    """`pod` with the provider's other arguments, and what `pod_mutation_hook` changes."""
    copied = copy.copy(task)
    vars(copied).update(
        full_pod_spec=PodGenerator.deserialize_model_dict(dict(pod)),
        **dict.fromkeys(("pod_template_file", "pod_template_dict", "container_resources")),
        **dict.fromkeys(("container_security_context", "active_deadline_seconds")),
        **{"env_vars": [], "volumes": [], "volume_mounts": [], "security_context": {}},
        do_xcom_push=False,  # no sidecar
        **changed,
    )
    return KubernetesPodOperator.build_pod_request_obj(copied, context, dry_run=dry_run)


def grace_of(task: Any) -> Any:
    """The grace period of a task's pods; None if it takes a file that this machine can't read."""
    with suppress(ValueError, OSError, yaml.YAMLError, AttributeError, TypeError):
        return pod_of(task)[0]["spec"]["terminationGracePeriodSeconds"]
    return None


def merged(below: Any, above: Any, key: str = "") -> Any:
    """Parts of an object of the API, `above` over `below`, field by field; None says nothing.

    A container is merged with the one of its name. A volume, variable or mount replaces the one of
    its name or path, and a node selector the whole one; other lists of objects are joined, and
    those of texts and numbers replaced.
    """
    if isinstance(above, Mapping):
        below = below if isinstance(below, Mapping) and key != "nodeSelector" else {}
        given = {name: value for name, value in above.items() if value is not None}
        over = {name: merged(below.get(name), value, name) for name, value in given.items()}
        united = {**below, **over}
        return _fitted(united, given) if key == "resources" else united
    if not isinstance(below, list) or not isinstance(above, list):
        return above
    if (by := _NAMED.get(key)) is None:
        is_joined = all(isinstance(item, Mapping) for item in above)
        return [*(item for item in below if item not in above), *above] if is_joined else above
    items: dict[Any, Any] = {}
    for item in (*below, *above):
        if not isinstance(item, Mapping) or by not in item:
            raise ValueError(f"the pod template: each of its {key} needs a {by}, not {item}")
        is_container = key in ("containers", "initContainers") and item[by] in items
        items[item[by]] = merged(items[item[by]], item) if is_container else item
    return list(items.values())


def _fitted(united: Any, above: Any) -> dict[str, Any]:
    """Resources that `above` only limits lose the request of below, others are limited, too."""
    requests, limits = (merged({}, above.get(part) or {}) for part in ("requests", "limits"))
    for name in limits.keys() - requests.keys():
        united.get("requests", {}).pop(name, None)
    for name in (requests.keys() - limits.keys()) & united.get("limits", {}).keys():
        united["limits"][name] = requests[name]
    return dict(united)


def with_gpus(
    pod: dict[str, Any], gpu: GpuVendor | None, count: int, resource: str | None = None
) -> int:
    """Give the main container its GPUs, unless the template names its devices; mutates `pod`.

    Returns how many GPUs, or slices of GPUs, the pod has, of any vendor; resource claims don't tell
    it. Raises `ValueError` if the template asks for another number, or for another vendor's.
    """
    resources = main_container(pod).setdefault("resources", {})
    asked = {**(resources.get("requests") or {}), **(resources.get("limits") or {})}
    patterns = [kind["device"] for kind in KINDS.values() if "device" in kind]
    patterns += [re.escape(resource)] if resource else []
    is_gpu = re.compile("|".join(f"(?:{pattern})" for pattern in patterns)).fullmatch
    devices = {name: int(number) for name, number in asked.items() if is_gpu(name)}
    if gpu is None and resource is None:
        return sum(devices.values())
    if resources.get("claims") and not devices:
        return count
    kind = KINDS[gpu or "cpu"]
    wanted = str(resource or kind["resource"])
    for name in devices:
        if name != resource and not re.fullmatch(kind.get("device", ""), name):
            raise ValueError(f"the pod template asks for {name}, the operator for {wanted}")
    devices = devices or {wanted: count}
    if sum(devices.values()) != count:
        named = " and ".join(f"{number} x {name}" for name, number in devices.items())
        raise ValueError(
            f"the pod template asks for {named}, the operator's gpu_count is {count}; they must be"
            " the same"
        )
    limits = {name: str(number) for name, number in devices.items()}
    resources["limits"] = {**(resources.get("limits") or {}), **limits}
    return count


def check_grace(seconds: Any) -> None:
    """Raise `ValueError` if a pod has no time to finish open parts; a template is no number yet."""
    try:
        is_enough = float(seconds) > DRAIN_MARGIN_S
    except (TypeError, ValueError):
        return
    if not is_enough:
        raise ValueError(
            f"a pod's grace period is {seconds}; it must be above {DRAIN_MARGIN_S} seconds, which"
            " closing the engine takes: what is above is for finishing open parts"
        )


def escaped(argument: str) -> str:
    """Escape `$`: in arguments, Kubernetes expands $(NAME) and turns $$ into $."""
    is_place = re.fullmatch(r"[0-9a-f/]*\$\((BATCHLLM_JOB_UID|JOB_COMPLETION_INDEX)\)", argument)
    return argument if is_place else argument.replace("$", "$$")
