"""An attempt at a shard: its requests go to an engine, and their outputs into parts."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from itertools import count
from typing import NamedTuple

from batchllm_operator.amounts import counted
from batchllm_operator.answers import Answers
from batchllm_operator.engine import EngineOutput, EngineRequest
from batchllm_operator.errors import BatchLLMError, FailedRowsError, FencedError
from batchllm_operator.row_error import RowError
from batchllm_operator.run.draining import Drain
from batchllm_operator.run.live_progress import LiveProgress, Observe
from batchllm_operator.run.open_parts import OpenParts
from batchllm_operator.run.shard_queue import Claimed
from batchllm_operator.run.shard_tally import ShardTally
from batchllm_operator.run.shard_work import ShardWork
from batchllm_operator.shards.parts import part_schema, read_ledger, write_part
from batchllm_operator.shards.report import REPORT_FILE, ShardReport
from batchllm_operator.shards.spills import OpenPart, read_spills, stored_errors, write_spill
from batchllm_operator.stored_plan.counts import Counts
from batchllm_operator.stored_plan.stored_plan import StoredPlan

_log = logging.getLogger(__name__)


class Lap:
    """Seconds since the last call, or since `begin`."""

    def __init__(self) -> None:
        self.begin()

    def begin(self) -> None:
        self._began_at = time.monotonic()

    def __call__(self) -> float:
        before, self._began_at = self._began_at, time.monotonic()
        return self._began_at - before


class Holder(NamedTuple):
    """The process that runs shards, as far as they all share it."""

    drain: Drain
    lap: Lap
    """From one part to the next, of any shard, so that the engine's time is counted once."""
    num_gpus: int
    every_s: float
    """Seconds between two progress objects."""
    worker: int
    num_workers: int
    observe: Observe | None = None


class ShardRun:
    """An attempt at a shard, from `begin` to `end`.

    A part is written when all of its requests have an output. Outputs of open parts are spilled
    from time to time, and when an error or a signal ends the attempt; the next one writes the
    parts.

    Attributes:
        work: what is left to generate; set by `begin`.
        is_given_up: a later attempt has taken over; nothing is fed any more.
    """

    work: ShardWork

    def __init__(self, plan: StoredPlan, claimed: Claimed, holder: Holder) -> None:
        self.plan, self._holder = plan, holder
        self.shard_idx, self.attempt = claimed
        self.shard = plan.shard(self.shard_idx)
        self.is_given_up = False
        spec, folder = plan.manifest.spec, self.attempt.shard_folder
        self._plan_id, self._schema = plan.manifest.plan_id, part_schema(spec)
        self._answers = Answers.of(spec)
        # An earlier attempt may have finished parts until it saw the claim.
        self._entries = read_ledger(folder, self._plan_id)
        self._num_resumed = len(self._entries)
        self._spilled = read_spills(
            folder, self._plan_id, self.shard_idx, self._entries, self._schema
        )
        self.tally = ShardTally(
            plan,
            self.shard_idx,
            self.attempt,
            self._entries.values(),
            [part.counts for part in self._spilled.values()],
            num_gpus=holder.num_gpus,
            interval_s=holder.every_s,
            worker=holder.worker,
            num_workers=holder.num_workers,
        )
        self._progress = LiveProgress(
            self.attempt.folder,
            self.tally,
            holder.every_s,
            holder.observe,
            self._spill_while_waiting,
        )
        self._context = ExitStack()
        self._open_parts = OpenParts()
        self._spill_idxs, self._spilling = count(), threading.Lock()
        self._part_of: dict[int, int] = {}  # request_idx -> part_idx, for requests in the engine

    def begin(self) -> None:
        """Show progress, and open the shard's file.

        Raises:
            PlanError: the file is damaged or missing.
        """
        if self.attempt.number > 1:
            _log.info(
                "shard %d, attempt %d: earlier attempts have finished %s, and %s of others",
                self.shard_idx,
                self.attempt.number,
                counted(self._num_resumed, "part"),
                counted(sum(part.counts.num_rows for part in self._spilled.values()), "row"),
            )
        self._progress.start()
        file = self._context.enter_context(self.plan.open_shard(self.shard_idx))
        spec = self.plan.manifest.spec
        self.work = ShardWork(
            file,
            self._missing,
            # Otherwise planned lengths say no more than the spec's limit.
            has_estimates=spec.planner.estimated_output_tokens is not None
            or spec.sampling.ignore_eos,
            first=self.shard.replicas.first_groups if self.shard.replicas else [],
            finished=[idx for part in self._spilled.values() for idx in part.outputs],
        )
        self._num_requests = {
            part_idx: file.metadata.row_group(part_idx).num_rows for part_idx in self._spilled
        }

    def end(self, error: BaseException | None = None) -> None:
        """Keep what is finished, and show the last state; `error` has ended the attempt."""
        with self._context:
            try:
                if error is not None and not isinstance(error, FencedError):
                    self._keep_finished(error)
            finally:
                parts = [*self._entries.values(), *(part.counts for part in self._parts)]
                self.tally.keep(Counts.total(parts))
                self._progress.end(error)

    def _keep_finished(self, why: BaseException) -> None:
        is_trusted = isinstance(why, (KeyboardInterrupt, FailedRowsError))
        try:
            try:
                self.spill(with_suspects=is_trusted)
            except KeyboardInterrupt:  # the signal came while it was written
                self.spill(with_suspects=is_trusted)
        except (BatchLLMError, OSError) as error:
            _log.warning("finished rows of shard %d are lost: %s", self.shard_idx, error)

    @property
    def _parts(self) -> list[OpenPart]:
        """Unfinished parts with outputs of this attempt or of earlier ones."""
        return [*self._open_parts, *self._spilled.values()]

    @property
    def _missing(self) -> list[int]:
        return [idx for idx in range(self.shard.num_parts) if idx not in self._entries]

    @property
    def num_failed_rows(self) -> int:
        """Rows that have failed in all attempts, without those for which the engine may be at
        fault."""
        return self.tally.num_failed_rows - self._open_parts.num_suspect_rows

    def errors(self) -> Iterator[tuple[RowError, list[int]]]:
        """The error and the rows of each request that has failed in any attempt."""
        return stored_errors(self.attempt.shard_folder, self._entries.values(), self._parts)

    @property
    def num_open_parts(self) -> int:
        """Parts that the engine works on."""
        return len(self._open_parts)

    @property
    def num_left(self) -> int:
        """Parts that aren't finished."""
        return len(self._missing)

    def requests(self) -> Iterator[EngineRequest]:
        """The requests of the missing parts; ends early once draining begins, or after `give_up`.

        Part by part: only those with requests in the engine are in memory.
        """
        self.tally.begin_running()
        self._progress.write_soon()
        parts = self.work.parts()
        # First the question: once the shard is given up, its file is closed.
        while self._may_open_part() and (part := next(parts, None)) is not None:
            part_idx, table = part
            request_idxs = table["request_idx"].to_pylist()
            open_part = self._spilled.pop(part_idx, OpenPart())
            open_part.row_idxs.update(zip(request_idxs, table["row_idxs"].to_pylist(), strict=True))
            self._open_parts.open(part_idx, open_part)
            hints = table.drop_columns(["request_idx", "row_idxs", "prompt_token_ids"]).to_pylist()
            for request_idx, hint, token_ids in zip(
                request_idxs, hints, table["prompt_token_ids"], strict=True
            ):
                if self.is_given_up:
                    return
                self._part_of[request_idx] = part_idx
                yield EngineRequest(
                    request_idx=request_idx, prompt_token_ids=token_ids.as_py(), **hint
                )

    def _may_open_part(self) -> bool:
        return not (self._holder.drain.has_begun or self.is_given_up)

    def takes(self, output: EngineOutput) -> bool:
        """Whether the output's request is from here."""
        return output.request_idx in self._part_of

    def take(self, output: EngineOutput) -> int:
        """Keep an output; its part is written after the last one. Returns its number of rows.

        Raises:
            FencedError: a later attempt has taken over.
        """
        part_idx = self._part_of.pop(output.request_idx)
        if self.is_given_up:
            return 0
        output = self._checked(output)
        num_rows, finished = self._open_parts.add(part_idx, output)
        self.tally.count_output(output, num_rows)
        if finished is None:
            self._spill_if_due()
        else:
            self._write(part_idx, finished, self._holder.lap() + finished.engine_s)
        return num_rows

    def _checked(self, output: EngineOutput) -> EngineOutput:
        """The output, with a row error if its answer can't be used."""
        if not output.is_served or output.text is None:
            return output
        fault = self._answers.fault(output.text, output.raw)
        return output if fault is None else replace(output, error=fault)

    def write_spilled_parts(self) -> None:
        """Write the parts of which earlier attempts have spilled all outputs.

        Raises:
            FencedError: a later attempt has taken over.
        """
        for part_idx, part in sorted(self._spilled.items()):
            if len(part.outputs) == self._num_requests[part_idx]:
                self._write(part_idx, part, part.engine_s)

    def _write(self, part_idx: int, part: OpenPart, part_s: float) -> None:
        outputs = list(part.outputs.values())
        self._entries[part_idx] = write_part(
            self.attempt, self._plan_id, part_idx, outputs, part.row_idxs, part_s, self._schema
        )
        self.tally.count_part()
        self._spilled.pop(part_idx, None)
        self._open_parts.close(part_idx)

    def _spill_if_due(self) -> None:
        if self._open_parts.is_spill_due and self._spilling.acquire(blocking=False):
            try:
                self.spill()
            finally:
                self._spilling.release()

    def _spill_while_waiting(self) -> None:
        """Spill what is due while the engine finishes nothing; for another thread.

        What fails here fails again in `take`, where it is raised.
        """
        try:
            self._spill_if_due()
        except (BatchLLMError, OSError) as error:
            _log.debug("shard %d: no spill: %s", self.shard_idx, error)

    def spill(self, *, with_suspects: bool = False) -> None:
        """Write the outputs of open parts that no file holds to one; see `OpenParts.new_outputs`.

        Raises:
            FencedError: a later attempt has taken over.
        """
        outputs, row_idxs = self._open_parts.new_outputs(with_suspects=with_suspects)
        if not outputs:
            return
        # The number first: a signal may end the writing, and leave the entry.
        place = self.attempt, self._plan_id, self.shard_idx, next(self._spill_idxs)
        engine_s = self._holder.lap()
        write_spill(*place, outputs, row_idxs, engine_s, self._schema)
        self._open_parts.spilled(outputs, engine_s)

    def give_up(self) -> None:
        """Feed and write nothing any more: a later attempt has taken over."""
        self.is_given_up = True
        self._open_parts.clear()

    def report(self) -> ShardReport:
        """Write the report of the finished shard.

        Raises:
            FencedError: a later attempt has taken over.
        """
        self.attempt.check_current()
        parts = [self._entries[part_idx] for part_idx in sorted(self._entries)]
        report = ShardReport.of_parts(self._plan_id, self.shard_idx, parts, self._num_resumed)
        self.attempt.shard_folder.write_bytes(REPORT_FILE, report.to_bytes())
        return report
