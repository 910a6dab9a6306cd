"""vLLM engines that stay for later jobs, because an engine takes seconds to start.

They share a process, which ends with the tests: to free an engine takes seconds, too. It isn't the
tests' own, in whose modules vLLM would find more than in a worker's, and whose modules would find
vLLM's changes.
"""

import json
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from multiprocessing.pool import ExceptionWithTraceback  # type: ignore[attr-defined]
from pathlib import Path
from typing import Any
from unittest.mock import patch

from support.fork_server import ForkServer

from batchllm_operator.engine import Engine, EngineJob, EngineOutput, EngineRequest
from batchllm_operator.run.run_shards import run_worker
from batchllm_operator.spec import JobSpec, load_spec
from batchllm_operator.vllm_plugin.scheduler.hints import SchedulerSettings


class WarmProcess:
    """The process of `WarmEngines`, as tests see it."""

    def __init__(self, server: ForkServer, env: Mapping[str, str]) -> None:
        self._server, self._env = server, env
        self._connection: Connection | None = None

    def run(self, plan: str) -> int:
        """Run all that is left of the plan at an address; the number of shards that were run."""
        return int(self._ask(run_plan, plan))

    def second_job(self, spec: Path) -> list[Any]:
        """See the function of this name."""
        return list(self._ask(second_job, str(spec)))

    def _ask(self, function: Callable[..., Any], argument: str) -> Any:
        if self._connection is None:
            self._connection, far = Pipe()
            with far:  # the process answers on what would be its stdout
                self._server.start(
                    "support.warm_engines", [], env=self._env, stdout=far.fileno(), stderr=2
                )
        self._connection.send([function.__name__, argument])
        error, found = self._connection.recv()
        if error is not None:
            raise error
        return found


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

    @property
    def unread(self) -> Any:
        return self._engine.unread

    def stream(self, requests: Iterator[EngineRequest]) -> Iterator[EngineOutput]:
        yield from self._engine.stream(requests)

    def close(self) -> None:
        scheduler = self._engine._scheduler
        if scheduler is not None:
            while scheduler.has_unfinished_requests():  # aborted ones leave with the next step
                self._engine.llm_engine.step()
            scheduler.begin(SchedulerSettings())  # which ends the trace


def run_plan(engines: WarmEngines, plan: str) -> int:
    return len(run_worker(plan, start=engines).shards)


def second_job(engines: WarmEngines, path: str) -> list[Any]:
    """Why an engine takes no second job while it has requests, and how many it ends after that."""
    spec, job = load_spec(path), EngineJob(64)
    num_requests = 8 + (spec.engine.max_num_seqs or 0)  # so that the first to end leave others
    requests = (EngineRequest(idx, [5, 6], idx, 0) for idx in range(num_requests))
    stream = engines(spec, job).stream(requests)
    next(stream)
    try:
        engines(spec, job)
    except RuntimeError as error:
        return [str(error), num_requests - 1 - len(list(stream))]
    return ["", 0]


def _serve() -> None:
    # An engine that a test sees refused would end the groups of all.
    patch("vllm.v1.engine.core.cleanup_dist_env_and_memory").start()
    connection, engines = Connection(os.dup(1)), WarmEngines()
    os.dup2(2, 1)
    functions = {function.__name__: function for function in (run_plan, second_job)}
    while True:
        try:
            name, argument = connection.recv()
        except EOFError:  # the tests have ended
            sys.exit()
        try:
            connection.send([None, functions[name](engines, argument)])
        except Exception as error:  # noqa: BLE001  # for the test that asked
            connection.send([ExceptionWithTraceback(error, error.__traceback__), None])


if __name__ == "__main__":
    _serve()
