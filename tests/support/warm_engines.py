"""vLLM engines in this process that stay for later jobs, because an engine takes seconds to start.

They end with the process: to free one takes seconds, too.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
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
            with _without_proxies():
                self._engines[key] = VLLMEngine(spec, job)
        return _Kept(self._engines[key])


@contextmanager
def _without_proxies() -> Iterator[None]:
    """Hide modules that hold a proxy of Flask's, which other tests have imported.

    vLLM looks at every object of every module when it starts; a proxy raises without a request.
    """
    proxy = getattr(sys.modules.get("werkzeug.local"), "LocalProxy", None)
    hidden = {
        name: module
        for name, module in list(sys.modules.items())
        if any(type(value) is proxy for value in list(getattr(module, "__dict__", {}).values()))
    }
    for name in hidden:
        del sys.modules[name]
    try:
        yield
    finally:
        sys.modules.update(hidden)


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
