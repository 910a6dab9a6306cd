"""vLLM engines in this process that stay for later jobs, because an engine takes seconds to start.

They end with the process: to free one takes seconds, too.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from batchllm_operator.engine import Engine, EngineJob, EngineOutput, EngineRequest
from batchllm_operator.spec import JobSpec
from batchllm_operator.vllm_plugin.scheduler.hints import SchedulerSettings


class WarmEngines:
    """Starts engines for `run_worker`, one for a task's jobs with the same arguments of vLLM."""

    def __init__(self) -> None:
        self._engines: dict[str, Any] = {}

    def __call__(self, spec: JobSpec, job: EngineJob) -> Engine:
        from batchllm_operator.engine.vllm.engine import VLLMEngine
        from batchllm_operator.engine.vllm.start import engine_args

        key = json.dumps([engine_args(spec, job.max_model_len), spec.engine.attention, spec.task])
        if key in self._engines:
            self._engines[key].begin(job, spec)
        else:
            self._engines[key] = VLLMEngine(spec, job)
        return _Kept(self._engines[key])


class _Kept:
    """An engine that its job doesn't close."""

    chain = None

    def __init__(self, engine: Any) -> None:
        self._engine = engine

    def stream(self, requests: Iterator[EngineRequest]) -> Iterator[EngineOutput]:
        yield from self._engine.stream(requests)

    def close(self) -> None:
        scheduler = self._engine._scheduler
        if scheduler is not None:
            while scheduler.has_unfinished_requests():  # aborted ones leave with the next step
                self._engine.llm_engine.step()
            scheduler.begin(SchedulerSettings())  # which ends the trace
