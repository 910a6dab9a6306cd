"""A pod's specification: our defaults, under what the user's template and arguments say."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Final, TypeVar

from airflow.providers.cncf.kubernetes.pod_generator import PodGenerator
from kubernetes.client import models as k8s

from batchllm_operator.operators.pods.settings import CPU_IMAGE, PodSettings

_USER: Final = 10001
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


def default_pod(settings: PodSettings, container_name: str) -> k8s.V1Pod:
    """A pod that may do as little as a stage needs, without a name, a command or labels.

    It runs as a user without privileges on a read-only file system, with no token of the
    cluster's API; /tmp, /cache and /dev/shm are volumes.
    """
    preset = settings.preset
    return k8s.V1Pod(
        metadata=k8s.V1ObjectMeta(),
        spec=k8s.V1PodSpec(
            automount_service_account_token=False,
            node_selector=dict(preset.node_selector) if preset else None,
            tolerations=_tolerations(settings),
            security_context=k8s.V1PodSecurityContext(
                run_as_non_root=True,
                run_as_user=_USER,
                run_as_group=_USER,
                fs_group=_USER,
                fs_group_change_policy="OnRootMismatch",
                seccomp_profile=k8s.V1SeccompProfile(type="RuntimeDefault"),
            ),
            containers=[
                k8s.V1Container(
                    name=container_name,
                    image=preset.image if preset else CPU_IMAGE,
                    env=_environment(settings),
                    env_from=[
                        k8s.V1EnvFromSource(secret_ref=k8s.V1SecretEnvSource(name=name))
                        for name in settings.secret_names
                    ],
                    resources=_resources(settings),
                    security_context=k8s.V1SecurityContext(
                        allow_privilege_escalation=False,
                        read_only_root_filesystem=True,
                        capabilities=k8s.V1Capabilities(drop=["ALL"]),
                    ),
                    volume_mounts=_mounts(settings),
                )
            ],
            volumes=_volumes(settings),
        ),
    )


def merged_pod(default: k8s.V1Pod, template: k8s.V1Pod | None, container_name: str) -> k8s.V1Pod:
    """`default` with what `template` says instead; the main container comes first.

    Lists of things with names (volumes, mounts, variables) are united, the template's win.
    """
    if template is None:
        return default
    if template.spec is not None and template.spec.containers:
        template.spec.containers.sort(key=lambda each: each.name != container_name)
    merged = PodGenerator.reconcile_pods(default, template)
    return without_repetitions(merged)


def without_repetitions(pod: k8s.V1Pod) -> k8s.V1Pod:
    """`pod`, changed so that of equally named volumes, mounts and variables the last stays."""
    spec = pod.spec
    spec.volumes = _last(spec.volumes, lambda volume: volume.name)
    for container in [*spec.containers, *(spec.init_containers or [])]:
        container.env = _last(container.env, lambda variable: variable.name)
        container.volume_mounts = _last(container.volume_mounts, lambda mount: mount.mount_path)
        container.env_from = _last(container.env_from, repr)
    return pod


def check_gpus(pod: k8s.V1Pod, settings: PodSettings) -> None:
    """See to it that the main container gets the GPUs that the command is told of; mutates it.

    Raises:
        ValueError: the pod's template asks for another number of them.
    """
    if settings.preset is None:
        return
    container = pod.spec.containers[0]
    container.resources = container.resources or k8s.V1ResourceRequirements()
    name, count = settings.preset.resource, str(settings.gpu_count)
    for kind in ("limits", "requests"):
        given = getattr(container.resources, kind) or {}
        if str(given.get(name, count)) != count:
            raise ValueError(
                f"the pod template asks for {given[name]} x {name}, the operator's gpu_count is"
                f" {count}; they must be the same"
            )
    container.resources.limits = {**(container.resources.limits or {}), name: count}


def _resources(settings: PodSettings) -> k8s.V1ResourceRequirements:
    """Memory is limited; processor time isn't, for a throttled host keeps its GPU waiting."""
    requests = {"cpu": settings.cpu, "memory": settings.memory}
    limits = {"memory": settings.memory}
    if settings.preset is not None:
        limits[settings.preset.resource] = str(settings.gpu_count)
    return k8s.V1ResourceRequirements(requests=requests, limits=limits)


def _tolerations(settings: PodSettings) -> list[k8s.V1Toleration] | None:
    if settings.preset is None:
        return None
    return [k8s.V1Toleration(key=settings.preset.resource, operator="Exists", effect="NoSchedule")]


def _environment(settings: PodSettings) -> list[k8s.V1EnvVar]:
    variables = {**_CACHE_ENV, **_QUIET_ENV}
    if settings.preset is not None:
        variables |= settings.preset.env
    if settings.model_claim is not None:
        variables |= {"HF_HOME": "/models", "HF_HUB_OFFLINE": "1"}
    return [k8s.V1EnvVar(name=name, value=value) for name, value in variables.items()]


def _volumes(settings: PodSettings) -> list[k8s.V1Volume]:
    volumes = [
        k8s.V1Volume(name="tmp", empty_dir=k8s.V1EmptyDirVolumeSource()),
        _claim_or_own("cache", settings.cache_claim),
        k8s.V1Volume(
            name="shm",
            empty_dir=k8s.V1EmptyDirVolumeSource(medium="Memory", size_limit=settings.shm_size),
        ),
    ]
    if settings.model_claim is not None:
        volumes.append(_claim_or_own("models", settings.model_claim, read_only=True))
    return volumes


def _claim_or_own(name: str, claim: str | None, *, read_only: bool = False) -> k8s.V1Volume:
    if claim is None:
        return k8s.V1Volume(name=name, empty_dir=k8s.V1EmptyDirVolumeSource())
    source = k8s.V1PersistentVolumeClaimVolumeSource(claim_name=claim, read_only=read_only)
    return k8s.V1Volume(name=name, persistent_volume_claim=source)


def _mounts(settings: PodSettings) -> list[k8s.V1VolumeMount]:
    mounts = [
        k8s.V1VolumeMount(name="tmp", mount_path="/tmp"),
        k8s.V1VolumeMount(name="cache", mount_path="/cache"),
        k8s.V1VolumeMount(name="shm", mount_path="/dev/shm"),
    ]
    if settings.model_claim is not None:
        mounts.append(k8s.V1VolumeMount(name="models", mount_path="/models", read_only=True))
    return mounts


def _last(items: Iterable[_Item] | None, key: Callable[[_Item], Any]) -> list[_Item] | None:
    """The last of each `key`, in order of first occurrence; None stays None."""
    return list({key(item): item for item in items}.values()) if items is not None else None
