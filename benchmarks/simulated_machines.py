"""Machines that run shards by a simulated clock, over real claims, parts and reports in a lake."""

import heapq
import math
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from itertools import count, islice
from typing import Final
from unittest.mock import patch

from batchllm_operator.engine import Engine, EngineJob, EngineOutput, EngineRequest
from batchllm_operator.engine.fake import FakeEngine
from batchllm_operator.run.live_progress import DEFAULT_INTERVAL_S, Holder, LiveProgress
from batchllm_operator.run.shard_queue import ShardQueue
from batchllm_operator.run.worker import Worker
from batchllm_operator.shards.attempts import PROGRESS_FILE, attempt_name
from batchllm_operator.spec import JobSpec
from batchllm_operator.stored_plan.stored_plan import StoredPlan

Seconds = Callable[[EngineRequest], float]
"""What a request takes on a machine as given."""

_EPOCH: Final = datetime(2026, 1, 1, tzinfo=UTC)


class Simulation:
    """Events in the order of one clock.

    Attributes:
        clock_s: simulated seconds.
        finished_at: when the last shard was finished.
    """

    def __init__(self) -> None:
        self.clock_s = self.finished_at = 0.0
        self._events: list[tuple[float, int, Callable[[], float | None]]] = []
        self._numbers = count()

    def clock(self) -> float:
        return self.clock_s

    def now(self) -> datetime:
        return _EPOCH + timedelta(seconds=self.clock_s)

    def at(self, clock_s: float, act: Callable[[], float | None]) -> None:
        """Call `act` then, and again after as many seconds as it returns, until that is None."""
        heapq.heappush(self._events, (clock_s, next(self._numbers), act))

    def run(self) -> None:
        """Let all happen; progress is written by events, not by threads in real time."""
        with patch.object(LiveProgress, "_run", lambda progress: None):
            while self._events:
                self.clock_s, _, act = heapq.heappop(self._events)
                pause_s = act()
                if pause_s is not None:
                    self.at(self.clock_s + pause_s, act)


@dataclass(frozen=True, slots=True)
class Place:
    """A machine for a worker.

    Attributes:
        slowness: what requests take here, as a multiple.
        begins_at, dies_at: simulated seconds. Once dead, the machine does and writes nothing more.
    """

    slowness: float = 1.0
    begins_at: float = 0.0
    dies_at: float = math.inf


class Machine:
    """A worker on a machine of its own, with an engine whose requests end one after the other.

    Each output takes effect at its own time, except that an engine's first one doesn't wait for it.

    Args:
        plan, shards: the worker's.
        seconds: what requests take on a machine as given.
        look_ahead: requests in the engine.
        start_s: what the engine's start takes.
    """

    def __init__(
        self,
        simulation: Simulation,
        plan: StoredPlan,
        shards: ShardQueue,
        seconds: Seconds,
        place: Place,
        *,
        look_ahead: int,
        start_s: float,
    ) -> None:
        self._simulation, self._plan, self._place, self._seconds = simulation, plan, place, seconds
        self._look_ahead, self._start_s = look_ahead, start_s
        self._owed_s = 0.0
        """Until the next output."""
        self._progress: list[LiveProgress] = []
        """Of attempts that it has begun and not ended."""
        holder = Holder(shards.worker, shards.num_workers, num_gpus=1, observe=self._observe)
        worker = Worker(plan, shards, self._start_engine, holder, clock=simulation.clock)
        self._steps = worker.steps()
        self.has_ended = False
        simulation.at(place.begins_at, self._step)
        simulation.at(place.begins_at, self._write_progress)

    @property
    def _is_dead(self) -> bool:
        return self._simulation.clock_s >= self._place.dies_at

    def discard(self) -> None:
        """End the worker of a dead machine, after the simulation."""
        assert self.has_ended or self._is_dead
        self._steps.close()

    def _step(self) -> float | None:
        if self._is_dead:
            return None
        pause_s = next(self._steps, None)
        if pause_s is None:
            self.has_ended = True
            return None
        owed_s, self._owed_s = self._owed_s, 0.0
        return pause_s + owed_s

    def _start_engine(self, spec: JobSpec, job: EngineJob) -> Engine:
        self._owed_s += self._start_s
        return _Engine(spec, job.max_model_len, self._look_ahead, self._owe)

    def _owe(self, request: EngineRequest) -> None:
        self._owed_s += self._seconds(request) * self._place.slowness

    def _write_progress(self) -> float | None:
        """As a thread of the real worker does, which also writes while the engine starts."""
        if self.has_ended or self._is_dead:
            return None
        for live in self._progress:
            self._write(live)
        return DEFAULT_INTERVAL_S

    @contextmanager
    def _observe(self, live: LiveProgress) -> Iterator[None]:
        self._progress.append(live)
        self._write(live)
        try:
            yield
        finally:
            self._progress.remove(live)
            if not self._is_dead:
                self._write(live)

    def _write(self, live: LiveProgress) -> None:
        progress = live.snapshot().model_copy(update={"updated_at": self._simulation.now()})
        folder = self._plan.run_folder(progress.shard_idx).child(attempt_name(progress.attempt))
        folder.write_bytes(PROGRESS_FILE, progress.to_bytes())
        if progress.state == "finished":
            self._simulation.finished_at = self._simulation.clock_s


class _Engine(FakeEngine):
    """Takes requests ahead, and says before each output which one is next."""

    def __init__(
        self,
        spec: JobSpec,
        max_model_len: int,
        look_ahead: int,
        begin: Callable[[EngineRequest], None],
    ) -> None:
        super().__init__(spec, max_model_len)
        self._look_ahead, self._begin = look_ahead, begin

    def stream(self, requests: Iterator[EngineRequest]) -> Iterator[EngineOutput]:
        fed = deque(islice(requests, self._look_ahead))
        if fed:
            self._begin(fed[0])
        while fed:
            request = fed.popleft()
            fed.extend(islice(requests, 1))
            if fed:
                self._begin(fed[0])
            yield self._answer(request, 0)
