"""The pod of a stage: `pod.yaml`, a user's template over it, single arguments over both."""

from __future__ import annotations

import copy
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Literal

import yaml

from batchllm_operator import __version__

GpuVendor = Literal["nvidia", "amd"]

DRAIN_MARGIN_S: Final = 30
"""The end of a pod's grace period, for closing the engine once open parts are finished."""
JOB_UID: Final = "$(BATCHLLM_JOB_UID)"
INDEX: Final = "$(JOB_COMPLETION_INDEX)"
"""Kubernetes replaces these two by the Job's UID and the pod's index, in the pod's arguments."""

_SAID: Final[Mapping[str, Any]] = yaml.safe_load(
    Path(__file__).with_name("pod.yaml").read_text(encoding="utf-8")
)
KINDS: Final[Mapping[str, Any]] = _SAID["kinds"]
_VENDORS: Final = [name for name, kind in KINDS.items() if "resource" in kind]
_UID_ENV: Final = {
    "name": JOB_UID[2:-1],
    "valueFrom": {
        "fieldRef": {"fieldPath": "metadata.labels['batch.kubernetes.io/controller-uid']"}
    },
}
_NAMED: Final = {
    **dict.fromkeys(("containers", "initContainers", "volumes", "env", "claims"), "name"),
    **dict.fromkeys(("resourceClaims", "imagePullSecrets"), "name"),
    "volumeMounts": "mountPath",
}
"""Lists of a pod whose items have a name, and the field that holds it."""


@dataclass(frozen=True, slots=True)
class PodSettings:
    """An operator's arguments about its pods.

    Raises:
        ValueError: a value is out of its range, or there is no such `gpu`.
    """

    gpu: GpuVendor | None
    gpu_count: int = 1
    gpu_resource: str | None = None
    resource_claims: Mapping[str, str] = field(default_factory=dict)
    cpu: str | None = None
    """None, here and in the next two: as in the template, or the default."""
    memory: str | None = None
    shm_size: str | None = None
    model_claim: str | None = None
    cache_claim: str | None = None
    secret_names: tuple[str, ...] = ()
    grace_s: int | None = None

    def __post_init__(self) -> None:
        if self.gpu is not None and self.gpu not in _VENDORS:
            known = " or ".join(repr(name) for name in _VENDORS)
            raise ValueError(f"gpu is {self.gpu!r}; it must be {known}, or None for no GPU")
        check_grace("termination_grace_period", self.grace_s)
        if self.gpu_count < 1:
            raise ValueError(f"gpu_count is {self.gpu_count}; a pod with a GPU has at least one")

    @property
    def kind(self) -> Mapping[str, Any]:
        kind: Mapping[str, Any] = KINDS[self.gpu or "cpu"]
        return kind

    @property
    def resource(self) -> str | None:
        """The resource by which a pod without devices of its own asks for GPUs."""
        return self.gpu_resource or self.kind.get("resource")


def default_pod(settings: PodSettings, container_name: str) -> dict[str, Any]:
    """A pod with the least privileges that a stage needs, without a name, a command or labels."""
    kind = settings.kind
    pod = merged(copy.deepcopy(_SAID["pod"]), {"spec": kind["spec"]})
    (main,) = pod["spec"]["containers"]
    main |= {"name": container_name, "image": f"{kind['image']}:{__version__}"}
    main["env"] = [*main["env"], _UID_ENV]
    return dict(pod)


def with_template(pod: Any, template: Any, container_name: str) -> Any:
    """`pod` overridden by a user's template.

    Raises:
        ValueError: the template has containers, and none is the main one.
    """
    names = [
        container["name"] for container in (template.get("spec") or {}).get("containers") or ()
    ]
    if names and container_name not in names:
        raise ValueError(
            f"the pod template has no container named {container_name!r} (base_container_name),"
            f" only {', '.join(names)}"
        )
    return merged(pod, template)


def arguments_pod(settings: PodSettings, container_name: str) -> dict[str, Any]:
    """What single arguments say of a pod, to be merged over its template."""
    places: list[tuple[dict[str, Any], dict[str, Any]]] = []
    if settings.shm_size is not None:
        memory = {"medium": "Memory", "sizeLimit": settings.shm_size}
        places.append(({"name": "shm", "emptyDir": memory}, {"mountPath": "/dev/shm"}))
    if settings.cache_claim is not None:
        claim: dict[str, Any] = {"claimName": settings.cache_claim}
        places.append(({"name": "cache", "persistentVolumeClaim": claim}, {"mountPath": "/cache"}))
    env = {}
    if settings.model_claim is not None:
        claim = {"claimName": settings.model_claim, "readOnly": True}
        volume = {"name": "models", "persistentVolumeClaim": claim}
        places.append((volume, {"mountPath": "/models", "readOnly": True}))
        env = {"HF_HOME": "/models", "HF_HUB_OFFLINE": "1"}
    claims = settings.resource_claims
    main = {
        "name": container_name,
        "env": variables(env),
        "envFrom": [{"secretRef": {"name": name}} for name in settings.secret_names],
        "volumeMounts": [{"name": volume["name"], **mount} for volume, mount in places],
        "resources": {
            "requests": {"cpu": settings.cpu, "memory": settings.memory},
            "limits": {"memory": settings.memory},
            "claims": [{"name": name} for name in claims],
        },
    }
    spec = {
        "containers": [main],
        "volumes": [volume for volume, _ in places],
        "resourceClaims": [
            {"name": name, "resourceClaimTemplateName": of} for name, of in claims.items()
        ],
        "terminationGracePeriodSeconds": settings.grace_s,
    }
    return {"spec": spec}


def variables(values: Mapping[str, Any]) -> list[dict[str, str]]:
    return [{"name": name, "value": str(value)} for name, value in values.items()]


def secret_variables(secret_name: str, keys: Iterable[str]) -> list[dict[str, Any]]:
    """The keys of a Secret as variables, which win over plain ones and over whole Secrets."""
    return [
        {"name": key, "valueFrom": {"secretKeyRef": {"name": secret_name, "key": key}}}
        for key in keys
    ]


def merged(below: Any, above: Any, key: str = "") -> Any:
    """Parts of an object of the API, `above` over `below`; values of None say nothing.

    Mappings are merged field by field, a container with the one of its name. A volume, variable or
    mount replaces the one of its name or path, and a node selector the whole one; other lists of
    objects are joined, and those of texts and numbers replaced.
    """
    if isinstance(below, Mapping) and isinstance(above, Mapping) and key != "nodeSelector":
        given = {name: value for name, value in above.items() if value is not None}
        both = {name: merged(below.get(name), value, name) for name, value in given.items()}
        united = {**below, **both}
        return _fitted(united, below, given) if key == "resources" else united
    if not isinstance(below, list) or not isinstance(above, list):
        return _without_nones(above)
    if (by := _NAMED.get(key)) is None:
        is_joined = all(isinstance(item, Mapping) for item in above)
        return [*(item for item in below if item not in above), *above] if is_joined else above
    items = {item[by]: item for item in below}
    for item in above:
        is_container = key in ("containers", "initContainers") and item[by] in items
        items[item[by]] = merged(items[item[by]], item) if is_container else item
    return list(items.values())


def _without_nones(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {name: _without_nones(part) for name, part in value.items() if part is not None}
    return value


def _fitted(united: Any, below: Any, above: Any) -> dict[str, Any]:
    """Resources whose requests don't exceed their limits.

    One that `above` only limits loses the request of `below`; one that it only requests gets that
    as its limit.
    """
    requests, limits = (_without_nones(above.get(part) or {}) for part in ("requests", "limits"))
    for name in limits.keys() - requests.keys():
        united.get("requests", {}).pop(name, None)
    for name in (requests.keys() - limits.keys()) & united.get("limits", {}).keys():
        united["limits"][name] = requests[name]
    return dict(united)


def main_container(pod: Mapping[str, Any]) -> dict[str, Any]:
    main: dict[str, Any] = pod["spec"]["containers"][0]
    return main


def with_gpus(pod: dict[str, Any], settings: PodSettings) -> int:
    """Give the main container its GPUs, unless the template names its devices; mutates `pod`.

    Returns how many GPUs, or slices of GPUs, it has, of any vendor. How many its resource claims
    stand for, only the operator's arguments tell.

    Raises:
        ValueError: the template asks for another number of GPUs, or for another vendor's.
    """
    resources = main_container(pod).setdefault("resources", {})
    asked = {**(resources.get("requests") or {}), **(resources.get("limits") or {})}
    devices = {name: int(count) for name, count in asked.items() if _is_gpu(name, settings)}
    if settings.gpu is None and settings.gpu_resource is None:
        has_claims = bool(settings.resource_claims) and not devices
        return settings.gpu_count if has_claims else sum(devices.values())
    pattern = settings.kind.get("device", "")
    for name in devices:
        if name != settings.gpu_resource and not re.fullmatch(pattern, name):
            raise ValueError(
                f"the pod template asks for {name}, the operator for {settings.resource}"
            )
    if resources.get("claims") and not devices:
        return settings.gpu_count
    devices = devices or {str(settings.resource): settings.gpu_count}
    if sum(devices.values()) != settings.gpu_count:
        named = " and ".join(f"{count} x {name}" for name, count in devices.items())
        raise ValueError(
            f"the pod template asks for {named}, the operator's gpu_count is"
            f" {settings.gpu_count}; they must be the same"
        )
    limits = {name: str(count) for name, count in devices.items()}
    resources["limits"] = {**(resources.get("limits") or {}), **limits}
    return settings.gpu_count


def _is_gpu(name: str, settings: PodSettings) -> bool:
    patterns = [kind["device"] for kind in KINDS.values() if "device" in kind]
    return name == settings.gpu_resource or any(re.fullmatch(each, name) for each in patterns)


def check_grace(name: str, seconds: Any) -> None:
    """Raise `ValueError` if a pod would have no time to finish its open parts.

    None, or a text that Airflow renders first, is no number of seconds yet.
    """
    try:
        number = float(seconds)
    except (TypeError, ValueError):
        return
    if number <= DRAIN_MARGIN_S:
        raise ValueError(
            f"{name} is {seconds}; it must be above {DRAIN_MARGIN_S} seconds, which closing the"
            " engine takes: what is above is for finishing open parts"
        )


def escaped(argument: str) -> str:
    """Escape `$`: in arguments, Kubernetes expands $(NAME) and turns $$ into $."""
    is_place = re.fullmatch(r"[0-9a-f/]*\$\((BATCHLLM_JOB_UID|JOB_COMPLETION_INDEX)\)", argument)
    return argument if is_place else argument.replace("$", "$$")
