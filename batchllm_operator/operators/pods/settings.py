"""Settings of a pod, and what the cluster calls each vendor's GPUs."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final, Literal, get_args

import yaml

from batchllm_operator import __version__

GpuVendor = Literal["nvidia", "amd"]

DRAIN_MARGIN_S: Final = 30
"""The end of a pod's grace period, for closing the engine once open parts are finished."""


@dataclass(frozen=True, slots=True)
class GpuPreset:
    """A vendor's GPUs: their names in a cluster, and the needs of their software."""

    resource: str
    """The extended resource that the vendor's device plugin offers."""
    device: re.Pattern[str]
    """Names of all its resources that are GPUs: whole, shared, or slices of one."""
    image: str
    node_selector: Mapping[str, str]
    """Labels that GPU feature discovery or node feature discovery puts on such nodes."""
    env: Mapping[str, str]
    groups: tuple[int, ...] = ()
    """Supplemental groups that own the device files."""


def _image(variant: str) -> str:
    return f"batchllm-{variant}:{__version__}"


CPU_IMAGE: Final = _image("airflow")

PRESETS: Final[Mapping[GpuVendor, GpuPreset]] = MappingProxyType(
    {
        "nvidia": GpuPreset(
            resource="nvidia.com/gpu",
            device=re.compile(r"nvidia\.com/(gpu([.-].+)?|mig-.+)"),
            image=_image("cuda"),
            node_selector={"nvidia.com/gpu.present": "true"},
            env={"CUDA_CACHE_PATH": "/cache/cuda"},
        ),
        "amd": GpuPreset(
            resource="amd.com/gpu",
            device=re.compile(r"amd\.com/(gpu([.-].+)?|[sdqc]px_nps\d)"),
            image=_image("rocm"),
            node_selector={"feature.node.kubernetes.io/amd-gpu": "true"},
            env={
                "MIOPEN_USER_DB_PATH": "/cache/miopen",
                "MIOPEN_CUSTOM_CACHE_DIR": "/cache/miopen",
            },
            groups=(44, 109),  # video and render, as Ubuntu numbers them
        ),
    }
)


DEFAULT_CPU: Final = "4"
DEFAULT_MEMORY: Final = "32Gi"
DEFAULT_SHM_SIZE: Final = "8Gi"
DEFAULT_DEADLINE_S: Final = 24 * 3600
DEFAULT_GRACE_S: Final = 300 + DRAIN_MARGIN_S


@dataclass(frozen=True, slots=True)
class PodSettings:
    """An operator's arguments about its pods.

    Raises:
        ValueError: a value is out of its range, or there is no such `gpu`.
    """

    gpu: GpuVendor | None
    gpu_count: int = 1
    cpu: str | None = None
    """None, here and in the next two: as in the template, or the default."""
    memory: str | None = None
    shm_size: str | None = None
    """Shared memory, where the processes of one vLLM engine exchange tensors."""
    model_claim: str | None = None
    """PersistentVolumeClaim with models, mounted read-only; None if the image or hub has them."""
    cache_claim: str | None = None
    """PersistentVolumeClaim for compiled kernels and graphs; None for the pod's own volume."""
    secret_names: tuple[str, ...] = ()
    """Secrets whose keys become environment variables."""
    deadline_s: int | None = None
    grace_s: int | None = None

    def __post_init__(self) -> None:
        if self.gpu is not None and self.gpu not in PRESETS:
            known = " or ".join(repr(name) for name in get_args(GpuVendor))
            raise ValueError(f"gpu is {self.gpu!r}; it must be {known}, or None for no GPU")
        check_grace("termination_grace_period", self.grace_s)
        if self.gpu_count < 1:
            raise ValueError(f"gpu_count is {self.gpu_count}; a pod with a GPU has at least one")

    @property
    def preset(self) -> GpuPreset | None:
        return PRESETS[self.gpu] if self.gpu is not None else None


def check_grace(name: str, seconds: Any) -> None:
    """Raise ValueError if a pod would have no time to finish its open parts.

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


def check_grace_of_template(file: Any, content: Any, full_pod_spec: Any) -> None:
    """`check_grace` of a pod template, in the operator's three forms.

    A file that isn't on this machine, or isn't YAML, is left to the one that makes the pod.
    """
    if file is not None:
        try:
            content = yaml.safe_load(Path(file).read_bytes())
        except (OSError, TypeError, yaml.YAMLError):
            content = None
    spec = content.get("spec") if isinstance(content, Mapping) else None
    seconds = spec.get("terminationGracePeriodSeconds") if isinstance(spec, Mapping) else None
    full_spec = getattr(full_pod_spec, "spec", None)
    whole = getattr(full_spec, "termination_grace_period_seconds", None)
    name = "the pod template's terminationGracePeriodSeconds"
    check_grace(name, seconds if whole is None else whole)
