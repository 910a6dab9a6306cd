"""What an engine of a run is told, the rows that it gets again, and the traces that it leaves."""

from __future__ import annotations

import logging
import tempfile
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from batchllm_operator.amounts import counted
from batchllm_operator.answers import Answers
from batchllm_operator.cost import matrix_seconds
from batchllm_operator.engine import Engine, EngineJob, EngineOutput, EngineRequest
from batchllm_operator.engine.device_profile import StoredProfiles
from batchllm_operator.errors import StorageError
from batchllm_operator.spec import JobSpec
from batchllm_operator.spec.tasks import INVALID_OUTPUT
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
        profiles=StoredProfiles.of(plan.manifest.spec),
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


class Retries:
    """A stream of outputs in which invalid ones are the last of all tries only.

    Each row is one request at any time, so what follows gets one output for it, as without
    retries.
    """

    def __init__(self, spec: JobSpec) -> None:
        self._most = spec.retry_invalid
        self._answers = Answers.of(spec)
        self._running: dict[int, EngineRequest] = {}
        self._again: deque[EngineRequest] = deque()
        self._num_retries = self._num_tokens = 0

    def stream(self, engine: Engine, requests: Iterator[EngineRequest]) -> Iterator[EngineOutput]:
        """As `Engine.stream`; rows with invalid answers come again before new ones."""
        if not self._most:
            yield from engine.stream(requests)
            return
        fed = self._fed(requests)
        while True:
            for output in engine.stream(fed):
                if not self._retries(self._running.pop(output.request_idx), output):
                    yield output
            if not self._again:  # the engine may have ended before the last answers
                break
            fed = self._fed(iter(()))
        if self._num_retries:
            _log.info(
                "retry_invalid: rows were generated again %s, after %s of answers that couldn't be"
                " used",
                counted(self._num_retries, "time"),
                counted(self._num_tokens, "token"),
            )
            self._num_retries = self._num_tokens = 0

    def _fed(self, requests: Iterator[EngineRequest]) -> Iterator[EngineRequest]:
        while request := self._again.popleft() if self._again else next(requests, None):
            self._running[request.request_idx] = request
            yield request

    def _retries(self, request: EngineRequest, output: EngineOutput) -> bool:
        """Whether the row is generated again."""
        if request.num_tries == self._most or not output.is_served or output.text is None:
            return False
        fault = self._answers.fault(output.text, output.raw)
        if fault is None or fault.kind != INVALID_OUTPUT:
            return False
        self._num_retries += 1
        self._num_tokens += output.num_output_tokens
        # The scheduler no longer waits for it as a member of its group, which may have ended. It
        # finds the group's prefix in the cache, if it is still there.
        alone = replace(
            request,
            num_tries=request.num_tries + 1,
            group_id=-1 - request.request_idx,
            group_size=1,
        )
        self._again.append(alone)
        return True
