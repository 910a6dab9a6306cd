"""What the plan tells the engine."""

from __future__ import annotations

from pathlib import Path

from batchllm_operator.cost import matrix_seconds
from batchllm_operator.engine import EngineJob
from batchllm_operator.spec import JobSpec
from batchllm_operator.stored_plan.manifest import PlanManifest
from batchllm_operator.stored_plan.profiles import StoredProfiles, profiles_folder
from batchllm_operator.stored_plan.stored_plan import StoredPlan
from batchllm_operator.vllm_plugin.scheduler.hints import StepCost


def pin_revision(manifest: PlanManifest) -> JobSpec:
    """The spec with the planned commit as revision, if the model is on the hub."""
    kind, _, commit = manifest.model_version.partition(":")
    if kind != "commit":
        return manifest.spec
    model = manifest.spec.model.model_copy(update={"revision": commit})
    return manifest.spec.model_copy(update={"model": model})


def engine_job(
    plan: StoredPlan, num_requests: int, trace_folder: Path | None, *, is_chained: bool = False
) -> EngineJob:
    """What the plan says about an engine's work.

    Args:
        num_requests: those that are expected.
        trace_folder: local folder for traces of the engine's steps; None for no traces.
        is_chained: see `EngineJob`.
    """
    return EngineJob(
        max_model_len=plan.manifest.max_model_len,
        num_requests=num_requests,
        step_cost=_step_cost(plan.manifest),
        profiles=StoredProfiles(profiles_folder(plan.manifest.spec)),
        trace_folder=trace_folder,
        answers=plan.manifest.answers,
        is_chained=is_chained,
    )


def _step_cost(manifest: PlanManifest) -> StepCost | None:
    estimate = manifest.estimate
    if estimate is None:
        return None
    num_gpus = manifest.spec.engine.tensor_parallel_size
    token_s, weights_s = matrix_seconds(estimate.model, estimate.gpu, num_gpus)
    return StepCost(token_s, weights_s, estimate.gpu.step_overhead_s)
