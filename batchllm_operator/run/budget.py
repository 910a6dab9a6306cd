"""Ends a run that has used what its spec allows."""

import logging
import threading
import time
from collections.abc import Callable
from typing import Final

from batchllm_operator.errors import BatchLLMError, LimitError
from batchllm_operator.run.draining import Drain
from batchllm_operator.run.live_progress import LiveProgress
from batchllm_operator.shards.job_status import read_attempts, used_before
from batchllm_operator.shards.usage import Usage
from batchllm_operator.spec import LimitsSpec
from batchllm_operator.stored_plan.stored_plan import StoredPlan

LOOK_S: Final = 10.0
"""Seconds between two looks at other workers' progress, which is five seconds old at most."""
_log = logging.getLogger(__name__)


class Budget:
    """What all workers have used of a plan's `limits`, with the rounds before it.

    This worker's attempts count as of now, others' as of the last look at the lake. Once a limit is
    reached, the drain begins, with the `LimitError` that ends the run.
    """

    def __init__(
        self, plan: StoredPlan, drain: Drain, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._plan, self._drain, self._clock = plan, drain, clock
        self._has_limits = plan.manifest.spec.limits != LimitsSpec()
        self._own: set[tuple[int, int]] = set()
        """This worker's attempts, by shard and number."""
        self._used: tuple[Usage, tuple[LiveProgress, ...]] = Usage(), ()
        """What those that have ended have used, and the others; replaced as a whole."""
        self._finished: dict[int, Usage] = {}
        """Of shards that were finished elsewhere."""
        self._before: Usage | None = None
        """Of the rounds before."""
        self._elsewhere, self._look_at = Usage(), clock()
        self._lock = threading.Lock()

    def watch(self, shard_idx: int, number: int, progress: LiveProgress) -> None:
        """Count an attempt of this worker, also after its end."""
        self._own.add((shard_idx, number))
        used, live = self._used
        ended = [each.usage for each in live if each.has_ended]
        going_on = (each for each in live if not each.has_ended)
        self._used = Usage.total([used, *ended]), (*going_on, progress)

    def check(self, *, looks: bool = True) -> None:
        """Begin the drain if a limit is reached; any thread may call it.

        With `looks`, read others' progress first, if the last look is `LOOK_S` seconds old.
        """
        if not self._has_limits or self._drain.has_begun:
            return
        if looks and self._clock() >= self._look_at and self._lock.acquire(blocking=False):
            try:  # another thread's look isn't waited for
                self._look()
            finally:
                self._lock.release()
        ended, live = self._used
        used = Usage.total([self._elsewhere, ended, *(progress.usage for progress in live)])
        if reason := next(used.reached(self._plan.manifest), None):
            self._drain.begin(reason, LimitError(reason))

    def _look(self) -> None:
        try:
            if self._before is None:
                self._before = used_before(self._plan)
            seen = list[Usage]()
            for shard_idx, attempts in read_attempts(self._plan, but=self._finished).items():
                others = [a for a in attempts.progress if (shard_idx, a.attempt) not in self._own]
                seen.append(Usage.of(others))
                if attempts.latest is not None and attempts.latest.state == "finished":
                    self._finished[shard_idx] = seen.pop()
            self._elsewhere = Usage.total([self._before, *seen, *self._finished.values()])
        except (BatchLLMError, OSError) as error:
            _log.warning("limits: what others have used can't be read: %s", error)
        self._look_at = self._clock() + LOOK_S
