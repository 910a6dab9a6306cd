"""One engine that runs shard after shard, until none is left (ADR 33)."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Generator, Iterator
from contextlib import ExitStack, suppress
from itertools import chain
from typing import TYPE_CHECKING, Final

from batchllm_operator.amounts import counted
from batchllm_operator.answers import Answers
from batchllm_operator.engine import Engine, EngineJob, EngineOutput, EngineRequest
from batchllm_operator.errors import BatchLLMError, FencedError, LimitError, PlanError
from batchllm_operator.progress import Progress
from batchllm_operator.run.budget import Budget
from batchllm_operator.run.engine_job import engine_job, pin_revision, stream_with_retries, traced
from batchllm_operator.run.live_progress import Holder
from batchllm_operator.run.shard_queue import ShardQueue
from batchllm_operator.run.shard_run import ShardRun
from batchllm_operator.shards.parts import ShardParts
from batchllm_operator.shards.reports import ShardReport
from batchllm_operator.shards.row_errors import RowErrors, are_too_many, too_many_failed
from batchllm_operator.spec import JobSpec
from batchllm_operator.stored_plan.counts import NOTHING
from batchllm_operator.stored_plan.stored_plan import StoredPlan

if TYPE_CHECKING:
    from batchllm_operator.run.replicas import Replicas

Start = Callable[[JobSpec, EngineJob], Engine]

MOST_WAIT_S: Final = 120.0
"""How long a worker waits for the shards of others: until then it has seen that one is lost."""
_POLL_S: Final = 5.0

_log = logging.getLogger(__name__)


class Worker:
    """Runs the shards that it gets, through one engine.

    The engine starts with the first shard, and takes requests of the next one before the last of
    this one have ended. As long as replicas compute prefixes together, it ends a shard first; then
    it starts again, without what a chain takes.

    Args:
        holder: what all shards of this process share.
        replicas: the other replicas of this worker; None if they compute nothing together.
    """

    def __init__(
        self,
        plan: StoredPlan,
        shards: ShardQueue,
        start: Start,
        holder: Holder,
        *,
        replicas: Replicas | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._plan, self._shards, self._start, self._holder = plan, shards, start, holder
        self._clock, self._replicas = clock, replicas
        self._runs: list[ShardRun] = []
        """Those with requests in the engine, or yet to be fed, in the order of their claims."""
        self._given_up: list[ShardRun] = []
        """Those that others have taken over, until the engine has ended their requests."""
        self._fault: PlanError | None = None
        """Why the next shard can't be run: raised once the engine has ended the others."""
        self._engine: Engine | None = None
        self._context = ExitStack()
        """Of the engine."""
        self._watches = [answers.watches() for answers in Answers.of_all(plan.manifest.spec)]
        """Of the answers to each question."""
        self._progress: Progress | None = None
        self._finished = NOTHING
        """What all of `reports` have done."""
        self.reports: dict[int, ShardReport] = {}
        """Of the shards that it has finished, by shard_idx."""
        holder.drain.num_open_parts = lambda: sum(
            len(run.open_parts.in_engine) for run in self._runs
        )
        self._budget = Budget(plan, holder.drain, clock)
        holder.check_limits = self._budget.check

    def steps(self) -> Generator[float, None, None]:
        """Run shards until none is left; the caller may do other things between the steps.

        Yields seconds to pause: 0 after each output, more where only others' shards are left.
        Raises like `run_worker`.
        """
        with ExitStack() as lines:
            try:
                yield from self._run_all(lines)
            except BaseException as raised:
                error = self._holder.drain.reason_of(raised)
                self._holder.drain.end()
                unread = self._unread(error)
                for run in reversed(self._runs):
                    run.end(error, unread)
                if (kept := self._kept(error)) is not None:
                    error.add_note(kept)
                if error is not raised:
                    raise error from None
                raise
            finally:
                if self._replicas is not None:
                    self._replicas.close()
                for watch in chain.from_iterable(self._watches):
                    watch.judge()
                self._close_engine()

    def _run_all(self, lines: ExitStack) -> Iterator[float]:
        drain, waiting_since = self._holder.drain, None
        while not drain.has_begun:
            if (run := self._claim()) is not None:
                waiting_since = None
                yield from self._stream(run, lines)
                continue
            if self._replicas is not None:
                self._meet(None)
                continue
            if not self._shards.others():
                break
            if self._shards.stands_back:
                waiting_since = None  # until none is free
            elif waiting_since is None:
                waiting_since = self._clock()
                _log.info("other workers run the rest: waiting for at most %.0f s", MOST_WAIT_S)
            elif self._clock() - waiting_since >= MOST_WAIT_S:
                break
            yield _POLL_S
        drain.check(num_left=self._shards.num_left)
        if self._progress is not None:
            self._progress.expect(0)

    def _claim(self) -> ShardRun | None:
        """Claim the next shard with something left to generate, unless a limit is reached."""
        self._budget.check()
        while not self._holder.drain.has_begun and (claimed := self._shards.take()) is not None:
            self._plan.check_stays()
            run = ShardRun(self._plan, *claimed, self._holder)
            self._budget.watch(claimed.shard_idx, claimed.attempt.number, run.progress)
            self._runs.append(run)
            run.begin()
            self._runs[0].progress.hold_gpus()
            try:
                run.write_spilled_parts()
            except FencedError as error:
                self._give_up(run, error)
                continue
            if run.num_left:
                self._check_failures()
                return run
            self._finish(run)
        return None

    def _unread(self, error: BaseException) -> list[EngineOutput]:
        """What the engine had computed when a signal or an error of ours stopped its reader."""
        if self._engine is None or not isinstance(error, (KeyboardInterrupt, BatchLLMError)):
            return []
        return [self._charged(output) for output in self._engine.unread]

    def _charged(self, output: EngineOutput) -> EngineOutput:
        return output if self._replicas is None else self._replicas.charged(output)

    def _kept(self, error: BaseException) -> str | None:
        """How many rows are stored, once an error has ended all runs; None if that is no news."""
        if isinstance(error, KeyboardInterrupt | LimitError):
            with suppress(BatchLLMError, OSError):
                self._shards.look()  # others have gone on
        num_kept = sum(run.progress.done.num_rows for run in self._runs)
        num_kept += sum(done.num_rows for done in self._shards.elsewhere().values())
        num_rows = sum(shard.num_rows for shard in self._plan.manifest.shards)
        verb = "is" if num_kept == 1 else "are"
        num = counted(num_rows, self._plan.manifest.spec.unit)
        kept = f"{num_kept:,} of the plan's {num} {verb} finished and kept"
        if isinstance(error, KeyboardInterrupt):
            return f"{kept}: give the same command again to go on"
        return kept if num_kept else None

    def _stream(self, run: ShardRun, lines: ExitStack) -> Iterator[float]:
        """Generate a shard, and those that follow it without a gap."""
        if self._replicas is not None:
            self._meet(run)
        engine, spec = self._running_engine(run), self._plan.manifest.spec
        num_left = self._num_rows_left()
        if self._progress is None:
            line = Progress(f"worker {self._shards.worker}", num_left, unit=f"{spec.unit}s")
            self._progress = lines.enter_context(line)
        else:
            self._progress.expect(num_left)
        self._holder.lap()  # the engine's time begins here
        requests = self._requests(run)
        for output in stream_with_retries(engine, requests, spec, self._count_dropped):
            self._keep(output)
            yield 0.0
        for given_up in self._given_up:
            self._shards.give_up(given_up.shard_idx)
        self._given_up.clear()
        if self._fault is not None:
            raise self._fault
        self._holder.drain.end()
        for open_run in self._runs:
            assert not open_run.open_parts.in_engine, "the engine left requests without an output"
            self._holder.drain.check(num_left=open_run.num_left)

    def _meet(self, run: ShardRun | None) -> None:
        assert self._replicas is not None
        if not self._replicas.is_over:
            drain = self._holder.drain
            self._replicas.meet(self._running_engine(run), run, lambda: drain.has_begun)
            return
        self._replicas = None
        if self._engine is not None and self._engine.chain is not None:
            self._close_engine()

    def _requests(self, run: ShardRun | None) -> Iterator[EngineRequest]:
        while run is not None:
            requests = run.requests()
            yield from requests if self._replicas is None else self._replicas.noted(requests)
            try:
                run = self._claim() if self._replicas is None else None
            except PlanError as error:
                self._plan.check_stays()
                self._fault = error  # the engine still works on the shards before
                return
            if run is not None and self._progress is not None:
                self._progress.expect(self._num_rows_left())

    def _num_rows_left(self) -> int:
        """Rows of the shards that it runs, and of the others in its own run of the plan's order."""
        begun = {run.shard_idx: run.progress.done.num_rows for run in self._runs}
        idxs = begun.keys() | self._shards.own()
        return sum(self._plan.shard(idx).num_rows - begun.get(idx, 0) for idx in idxs)

    def _run_of(self, output: EngineOutput) -> ShardRun:
        return next(run for run in (*self._runs, *self._given_up) if output in run.open_parts)

    def _count_dropped(self, output: EngineOutput) -> None:
        self._run_of(output).progress.count_generated(output)
        self._budget.check(looks=False)

    def _keep(self, output: EngineOutput) -> None:
        run = self._run_of(output)
        num_failed = run.num_failed_rows
        try:
            num_rows = run.take(self._charged(output))
        except FencedError as error:
            self._give_up(run, error)
            return
        assert self._progress is not None
        watches = self._watches[output.question]
        for watch in watches if output.is_served else ():
            watch.count(output.text or "", output.raw)
        others = [other.progress.done for other in self._runs if other is not run]
        others.append(self._finished)

        def note() -> str:
            return "".join([run.progress.note(others), *(watch.note for watch in watches)])

        self._progress.advance(num_rows, note)
        if run.num_failed_rows != num_failed:
            self._check_failures()
        if not run.num_left and not run.is_given_up:
            self._finish(run)
        self._budget.check(looks=False)

    def _finish(self, run: ShardRun) -> None:
        try:
            report = run.report()
        except FencedError as error:
            self._give_up(run, error)
            return
        self._remove(run, None)
        self.reports[run.shard_idx] = report
        self._finished += report.counts
        self._shards.ended(report)

    def _give_up(self, run: ShardRun, error: FencedError) -> None:
        """Leave a shard to another; it may come back once the engine has ended its requests."""
        _log.warning("shard %d is left to another worker: %s", run.shard_idx, error)
        if run.open_parts.in_engine:
            self._given_up.append(run)
        else:
            self._shards.give_up(run.shard_idx)
        run.give_up()
        self._remove(run, error)

    def _remove(self, run: ShardRun, error: FencedError | None) -> None:
        self._runs.remove(run)
        run.end(error)
        if self._runs:
            self._runs[0].progress.hold_gpus()

    def _check_failures(self) -> None:
        """Check that commit can still publish: by the rows that planning has rejected, those of
        this worker's runs, and those of other shards as they were last seen.

        Raises `FailedRowsError`: more rows have failed than the spec allows.
        """
        plan, spec, counts = self._plan, self._plan.manifest.spec, self._plan.manifest.counts
        others = {idx: done.num_failed_rows for idx, done in self._shards.elsewhere().items()}
        num_own, num_others = sum(run.num_failed_rows for run in self._runs), sum(others.values())
        num_failed = counts.num_rejected_rows + num_own + num_others
        if not are_too_many(spec, num_failed, counts.num_asked_rows):
            return
        shown = [run.finished for run in self._runs]
        if not num_own:  # another shard tells the kinds
            shard_idx = max(others, key=lambda idx: others[idx])
            shown = [ShardParts.read(plan, shard_idx, with_spilled=True)]
            num_others -= others[shard_idx]
        errors = RowErrors()
        for shard in shown:
            errors.add_all(shard.failed())
        if counts.num_rejected_rows:
            errors.add_rejected(plan)
        raise too_many_failed(
            *(spec, counts.num_asked_rows, plan, errors),
            verdict="commit would publish nothing, so the run stops",
            cure="To go on all the same, raise max_failed_fraction in the spec, plan again and run:"
            " finished rows are kept",
            num_others=num_others,
        )

    def _running_engine(self, run: ShardRun | None) -> Engine:
        if self._engine is None:  # `steps` closes the context after an error here, too
            trace_folder, num_requests = None, 0
            if run is not None:
                trace_folder = self._context.enter_context(traced(run.attempt.folder))
                later = (idx for idx in self._shards.own() if idx != run.shard_idx)
                num_requests = sum(self._plan.shard(idx).num_requests for idx in later)
                num_requests += sum(run.work.sizes.values())
            is_chained = self._replicas is not None and not self._replicas.is_over
            job = engine_job(self._plan, num_requests, trace_folder, is_chained=is_chained)
            self._engine = self._start(pin_revision(self._plan.manifest), job)
            self._context.callback(self._engine.close)
        return self._engine

    def _close_engine(self) -> None:
        self._engine = None
        self._context.close()
