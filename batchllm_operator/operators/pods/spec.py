"""A pod's specification: our defaults, overridden by the user's template and arguments."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final, TypeVar

from airflow.providers.cncf.kubernetes.pod_generator import PodGenerator
from kubernetes.client import models as k8s

from batchllm_operator.operators.pods.settings import (
    CPU_IMAGE,
    DEFAULT_CPU,
    DEFAULT_DEADLINE_S,
    DEFAULT_GRACE_S,
    DEFAULT_MEMORY,
    DEFAULT_SHM_SIZE,
    PRESETS,
    PodSettings,
)

UID_VARIABLE: Final = "BATCHLLM_POD_UID"
"""Environment variable in which a pod finds its own UID."""
UID_PLACE: Final = f"$({UID_VARIABLE})"
"""Kubernetes replaces this by the pod's UID in the pod's arguments."""

_GPU_USER: Final = 10001
_AIRFLOW_USER: Final = 50000
_Item = TypeVar("_Item")

# Where a pod may write; its root file system is read-only.
_CACHE_ENV: Final = {
    "HOME": "/tmp",
    "TMPDIR": "/tmp",
    "XDG_CACHE_HOME": "/cache",
    "TRITON_CACHE_DIR": "/cache/triton",
    "TORCHINDUCTOR_CACHE_DIR": "/cache/inductor",
    "VLLM_CACHE_ROOT": "/cache/vllm",
    "NUMBA_CACHE_DIR": "/cache/numba",
}
_QUIET_ENV: Final = {
    "PYTHONUNBUFFERED": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "HF_HUB_DISABLE_TELEMETRY": "1",
}


_MODEL_ENV: Final = {"HF_HOME": "/models", "HF_HUB_OFFLINE": "1"}


def default_pod(settings: PodSettings, container_name: str) -> k8s.V1Pod:
    """A pod with the least privileges that a stage needs, without a name, a command or labels.

    It runs as an unprivileged user on a read-only file system, without a token for the cluster's
    API; /tmp, /cache and /dev/shm are volumes.
    """
    preset = settings.preset
    return k8s.V1Pod(
        metadata=k8s.V1ObjectMeta(),
        spec=k8s.V1PodSpec(
            automount_service_account_token=False,
            active_deadline_seconds=DEFAULT_DEADLINE_S,
            termination_grace_period_seconds=DEFAULT_GRACE_S,
            node_selector=dict(preset.node_selector) if preset else None,
            tolerations=_tolerations(settings),
            security_context=k8s.V1PodSecurityContext(
                run_as_non_root=True,
                run_as_user=_GPU_USER if preset else _AIRFLOW_USER,
                run_as_group=_GPU_USER if preset else 0,  # as in Airflow's image
                fs_group=_GPU_USER,
                fs_group_change_policy="OnRootMismatch",
                supplemental_groups=(list(preset.groups) or None) if preset else None,
                seccomp_profile=k8s.V1SeccompProfile(type="RuntimeDefault"),
            ),
            containers=[
                k8s.V1Container(
                    name=container_name,
                    image=preset.image if preset else CPU_IMAGE,
                    env=_environment(settings),
                    resources=_resources(),
                    security_context=k8s.V1SecurityContext(
                        allow_privilege_escalation=False,
                        read_only_root_filesystem=True,
                        capabilities=k8s.V1Capabilities(drop=["ALL"]),
                    ),
                    volume_mounts=[mount for _, mount in _places(settings)],
                )
            ],
            volumes=[volume for volume, _ in _places(settings)],
        ),
    )


def merged_pod(default: k8s.V1Pod, template: k8s.V1Pod | None, container_name: str) -> k8s.V1Pod:
    """`default` overridden by `template`; the main container comes first.

    Lists of named items (volumes, mounts, variables) are merged, and so are security contexts and
    resources, field by field; the template's win. A node selector of the template, even an empty
    one, replaces the default.

    Raises:
        ValueError: the template has containers, and none is the main one.
    """
    if template is None:
        return default
    if template.spec is not None:
        if template.spec.containers:
            _put_first(template.spec.containers, container_name)
        if template.spec.node_selector is not None:
            default.spec.node_selector = None
    merged = PodGenerator.reconcile_pods(default, template)
    return without_repetitions(overlaid(merged, default, template))


def overlaid(merged: k8s.V1Pod, below: k8s.V1Pod, above: k8s.V1Pod) -> k8s.V1Pod:
    """Merge security contexts and resources field by field; returns `merged`, which it mutates.

    Args:
        merged: `below` and `above` as merged by Airflow, which takes such objects whole from one.
        below: its fields stay where `above` has none.
        above: its fields win. A resource that it only limits loses the request of `below`, and
            one that it only requests gets that as its limit: a request must not exceed the limit.
    """
    if above.spec is None:
        return merged
    merged.spec.security_context = _united(below.spec.security_context, above.spec.security_context)
    if above.spec.containers:
        main = merged.spec.containers[0]
        low, high = below.spec.containers[0], above.spec.containers[0]
        main.security_context = _united(low.security_context, high.security_context)
        main.resources = _united(low.resources, high.resources)
        if low.resources is not None and high.resources is not None:
            _fit_resources(main.resources, high.resources)
    return merged


def _put_first(containers: list[k8s.V1Container], name: str) -> None:
    containers.sort(key=lambda each: each.name != name)
    if containers[0].name != name:
        names = ", ".join(each.name for each in containers)
        raise ValueError(
            f"the pod template has no container named {name!r} (base_container_name), only {names}"
        )


def _fit_resources(united: k8s.V1ResourceRequirements, given: k8s.V1ResourceRequirements) -> None:
    limits, requests = given.limits or {}, given.requests or {}
    for name in limits.keys() - requests.keys():
        (united.requests or {}).pop(name, None)
    for name in requests.keys() - limits.keys():
        if name in (united.limits or {}):
            united.limits[name] = requests[name]


def _united(below: Any, above: Any) -> Any:
    """An API object with the fields that are set in `above`, else those of `below`."""
    if above is None or below is None:
        return below if above is None else above
    united = copy.deepcopy(below)
    for name in above.openapi_types:
        value = getattr(above, name)
        if value is None:
            continue
        if isinstance(value, dict):
            value = {**(getattr(below, name) or {}), **value}
        setattr(united, name, value)
    return united


def with_arguments(pod: k8s.V1Pod, settings: PodSettings) -> k8s.V1Pod:
    """Let the operator's given arguments win; mutates and returns `pod`."""
    spec, main = pod.spec, pod.spec.containers[0]
    if settings.cpu is not None or settings.memory is not None:
        resources = main.resources = main.resources or k8s.V1ResourceRequirements()
        resources.requests, resources.limits = resources.requests or {}, resources.limits or {}
        if settings.cpu is not None:
            resources.requests["cpu"] = settings.cpu
            resources.limits.pop("cpu", None)
        if settings.memory is not None:
            resources.requests["memory"] = resources.limits["memory"] = settings.memory
    given = {
        "shm": settings.shm_size is not None,
        "cache": settings.cache_claim is not None,
        "models": settings.model_claim is not None,
    }
    places = [place for place in _places(settings) if given.get(place[0].name)]
    spec.volumes = [*(spec.volumes or []), *(volume for volume, _ in places)]
    main.volume_mounts = [*(main.volume_mounts or []), *(mount for _, mount in places)]
    if settings.model_claim is not None:
        main.env = [*(main.env or []), *_variables(_MODEL_ENV)]
    secrets = _secrets(settings)  # last, as a later source wins
    main.env_from = [*(each for each in main.env_from or [] if each not in secrets), *secrets]
    if settings.deadline_s is not None:
        spec.active_deadline_seconds = settings.deadline_s
    if settings.grace_s is not None:
        spec.termination_grace_period_seconds = settings.grace_s
    return without_repetitions(pod)


def with_secret(pod: k8s.V1Pod, secret_name: str, keys: Iterable[str]) -> k8s.V1Pod:
    """Give the main container the keys of a Secret as variables; mutates and returns `pod`.

    Each is a variable of its own, so it wins over plain variables and whole Secrets, as a
    connection does in the worker.
    """
    main = pod.spec.containers[0]
    given = [
        k8s.V1EnvVar(
            name=key,
            value_from=k8s.V1EnvVarSource(
                secret_key_ref=k8s.V1SecretKeySelector(name=secret_name, key=key)
            ),
        )
        for key in keys
    ]
    main.env = [*(main.env or []), *given]
    return without_repetitions(pod)


def without_repetitions(pod: k8s.V1Pod) -> k8s.V1Pod:
    """Keep the last of volumes, mounts and variables of one name; mutates and returns `pod`."""
    spec = pod.spec
    spec.volumes = _last(spec.volumes, lambda volume: volume.name)
    for container in [*spec.containers, *(spec.init_containers or [])]:
        container.env = _last(container.env, lambda variable: variable.name)
        container.volume_mounts = _last(container.volume_mounts, lambda mount: mount.mount_path)
        container.env_from = _last(container.env_from, repr)
    return pod


def check_gpus(pod: k8s.V1Pod, settings: PodSettings) -> None:
    """Give the main container its GPUs, unless the template names its devices; mutates it.

    Raises:
        ValueError: the template asks for another number of GPUs, or for another vendor's.
    """
    if settings.preset is None:
        return
    container = pod.spec.containers[0]
    container.resources = container.resources or k8s.V1ResourceRequirements()
    given = _devices(container.resources)
    for other in (name for name in given if not settings.preset.device.fullmatch(name)):
        raise ValueError(
            f"the pod template asks for {other}, the operator for {settings.preset.resource}"
        )
    if container.resources.claims and not given:
        return
    devices = given or {settings.preset.resource: settings.gpu_count}
    if sum(devices.values()) != settings.gpu_count:
        asked = " and ".join(f"{count} x {name}" for name, count in devices.items())
        raise ValueError(
            f"the pod template asks for {asked}, the operator's gpu_count is"
            f" {settings.gpu_count}; they must be the same"
        )
    limits = {name: str(count) for name, count in devices.items()}
    container.resources.limits = {**(container.resources.limits or {}), **limits}


def num_gpus(pod: k8s.V1Pod, settings: PodSettings) -> int:
    """Number of GPUs, or slices of GPUs, of the main container, of any vendor.

    How many its resource claims stand for, only the operator's arguments tell.

    Raises:
        ValueError: the template's number of GPUs isn't one.
    """
    resources = pod.spec.containers[0].resources or k8s.V1ResourceRequirements()
    devices = _devices(resources)
    if not devices and resources.claims and settings.preset is not None:
        return settings.gpu_count
    return sum(devices.values())


def _devices(resources: k8s.V1ResourceRequirements) -> dict[str, int]:
    """How many of which GPUs a container asks for, whole ones and slices, of any vendor."""
    asked = {**(resources.requests or {}), **(resources.limits or {})}
    known = {name for each in PRESETS.values() for name in asked if each.device.fullmatch(name)}
    return {name: int(count) for name, count in asked.items() if name in known}


def _resources() -> k8s.V1ResourceRequirements:
    """Memory is limited; CPU time isn't, because a throttled process keeps its GPU waiting.

    `check_gpus` adds the GPUs: a template may name others.
    """
    requests = {"cpu": DEFAULT_CPU, "memory": DEFAULT_MEMORY}
    return k8s.V1ResourceRequirements(requests=requests, limits={"memory": DEFAULT_MEMORY})


def _tolerations(settings: PodSettings) -> list[k8s.V1Toleration] | None:
    if settings.preset is None:
        return None
    return [k8s.V1Toleration(key=settings.preset.resource, operator="Exists", effect="NoSchedule")]


def _environment(settings: PodSettings) -> list[k8s.V1EnvVar]:
    variables = {**_CACHE_ENV, **_QUIET_ENV}
    if settings.preset is not None:
        variables |= settings.preset.env
    own_uid = k8s.V1EnvVarSource(field_ref=k8s.V1ObjectFieldSelector(field_path="metadata.uid"))
    return [*_variables(variables), k8s.V1EnvVar(name=UID_VARIABLE, value_from=own_uid)]


def _variables(values: Mapping[str, str]) -> list[k8s.V1EnvVar]:
    return [k8s.V1EnvVar(name=name, value=value) for name, value in values.items()]


def _secrets(settings: PodSettings) -> list[k8s.V1EnvFromSource]:
    return [
        k8s.V1EnvFromSource(secret_ref=k8s.V1SecretEnvSource(name=name))
        for name in settings.secret_names
    ]


def _places(settings: PodSettings) -> list[tuple[k8s.V1Volume, k8s.V1VolumeMount]]:
    """Each volume with its mount in the main container."""
    size = settings.shm_size or DEFAULT_SHM_SIZE
    memory = k8s.V1EmptyDirVolumeSource(medium="Memory", size_limit=size)
    places = [
        _place("scratch", "/tmp"),
        _place("cache", "/cache", settings.cache_claim),
        _place("shm", "/dev/shm", own=memory),
    ]
    if settings.model_claim is not None:
        places.append(_place("models", "/models", settings.model_claim, read_only=True))
    return places


def _place(
    name: str, path: str, claim: str | None = None, *, own: Any = None, read_only: bool = False
) -> tuple[k8s.V1Volume, k8s.V1VolumeMount]:
    """The claim's volume, or the pod's own if there is no claim."""
    mount = k8s.V1VolumeMount(name=name, mount_path=path, read_only=read_only or None)
    if claim is None:
        return k8s.V1Volume(name=name, empty_dir=own or k8s.V1EmptyDirVolumeSource()), mount
    source = k8s.V1PersistentVolumeClaimVolumeSource(claim_name=claim, read_only=read_only)
    return k8s.V1Volume(name=name, persistent_volume_claim=source), mount


def _last(items: Iterable[_Item] | None, key: Callable[[_Item], Any]) -> list[_Item] | None:
    """The last of each `key`, in order of first occurrence; None stays None."""
    return list({key(item): item for item in items}.values()) if items is not None else None


def escaped(argument: str) -> str:
    """Escape `$`: in arguments, Kubernetes expands $(NAME) and turns $$ into $."""
    return argument if argument == UID_PLACE else argument.replace("$", "$$")
