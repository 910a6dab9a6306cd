"""What an engine of a run is told, the rows that it gets again, and the traces that it leaves."""

import logging
import tempfile
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from batchllm_operator.amounts import counted
from batchllm_operator.answers import Answers
from batchllm_operator.cost import matrix_seconds
from batchllm_operator.engine import Engine, EngineJob, EngineOutput, EngineRequest
from batchllm_operator.engine.device_profile import StoredProfiles
from batchllm_operator.errors import StorageError
from batchllm_operator.row_error import INVALID_OUTPUT
from batchllm_operator.spec import JobSpec
from batchllm_operator.storage import Folder
from batchllm_operator.stored_plan.manifest import PlanManifest, describe_file
from batchllm_operator.stored_plan.stored_plan import StoredPlan
from batchllm_operator.vllm_plugin.scheduler.hints import StepCost

_log = logging.getLogger(__name__)


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
    """What the plan says about an engine's work; for the arguments see `EngineJob`."""
    manifest, step_cost = plan.manifest, None
    if (estimate := manifest.estimate) is not None:
        num_gpus = manifest.spec.engine.tensor_parallel_size
        token_s, weights_s = matrix_seconds(estimate.model, estimate.gpu, num_gpus)
        step_cost = StepCost(token_s, weights_s, estimate.gpu.step_overhead_s)
    return EngineJob(
        max_model_len=manifest.max_model_len,
        num_requests=num_requests,
        step_cost=step_cost,
        profiles=StoredProfiles.of(manifest.spec),
        trace_folder=trace_folder,
        answers=manifest.planned_answers,
        is_chained=is_chained,
    )


@contextmanager
def traced(folder: Folder) -> Iterator[Path]:
    """A local folder for traces, which are published at the end, even after an error.

    Each becomes `trace-<UTC time>-<engine>-<digest>.parquet` in `folder`, one per engine and
    attempt, prefixed with the name of its subfolder if it has one. A trace that can't be published
    leads to a warning only.
    """
    began = time.strftime("%Y%m%dT%H%M%SZ", time.gmtime())
    with tempfile.TemporaryDirectory(prefix="batchllm-trace-") as local:
        try:
            yield Path(local)
        finally:
            for path in sorted(Path(local).rglob("*.parquet")):
                digest = describe_file(path).sha256[:8]
                number = path.stem.rpartition("-")[2]
                whose = "".join(f"{name}-" for name in path.relative_to(local).parts[:-1])
                try:
                    folder.publish_file(path, f"{whose}trace-{began}-{number}-{digest}.parquet")
                except StorageError as error:
                    _log.warning("a trace of the engine's steps is lost: %s", error)


def stream_with_retries(
    engine: Engine,
    requests: Iterator[EngineRequest],
    spec: JobSpec,
    drop: Callable[[EngineOutput], object],
) -> Iterator[EngineOutput]:
    """As `Engine.stream`; rows whose answers aren't in the spec's form come again before new ones.

    Each row is one request at any time, and has one output, that of its last try; `drop` gets those
    of the others.
    """
    most_tries = [question.retry_invalid for question in spec.questions]
    if not any(most_tries):
        yield from engine.stream(requests)
        return
    answers, running = Answers.of_all(spec), dict[int, EngineRequest]()
    again = deque[EngineRequest]()
    num_retries = num_tokens = 0

    def fed(new: Iterator[EngineRequest]) -> Iterator[EngineRequest]:
        while request := again.popleft() if again else next(new, None):
            running[request.request_idx] = request
            yield request

    while True:
        for output in engine.stream(fed(requests)):
            request = running.pop(output.request_idx)
            is_text = output.is_served and output.text is not None
            of_question = answers[request.question]
            fault = of_question.fault(output.text or "", output.raw) if is_text else None
            is_invalid = fault is not None and fault.kind == INVALID_OUTPUT
            if request.num_tries == most_tries[request.question] or not is_invalid:
                yield output
                continue
            drop(output)
            num_retries, num_tokens = num_retries + 1, num_tokens + output.num_output_tokens
            # The scheduler no longer waits for it as a member of its group, which may have ended.
            # It finds the group's prefix in the cache, if it is still there.
            alone = replace(request, group_id=-1 - request.request_idx, group_size=1)
            again.append(replace(alone, num_tries=request.num_tries + 1))
        if not again:  # the engine may have ended before the last answers
            break
        requests = iter(())
    if num_retries:
        _log.info(
            "retry_invalid: rows were generated again %s, after %s of answers that couldn't be"
            " used",
            counted(num_retries, "time"),
            counted(num_tokens, "token"),
        )
