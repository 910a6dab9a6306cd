"""An attempt at a shard: its requests go to an engine, and their outputs into parts."""

from __future__ import annotations

import logging
import threading
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
from batchllm_operator.run.live_progress import Holder, LiveProgress
from batchllm_operator.run.open_parts import OpenParts
from batchllm_operator.run.shard_work import ShardWork
from batchllm_operator.shards.attempts import Attempt
from batchllm_operator.shards.parts import (
    PartEntry,
    ShardParts,
    part_schema,
    read_ledger,
    write_part,
)
from batchllm_operator.shards.reports import REPORT_FILE, ShardReport
from batchllm_operator.shards.spills import OpenPart, read_spills, write_spill
from batchllm_operator.storage import Folder
from batchllm_operator.stored_plan.counts import Counts
from batchllm_operator.stored_plan.stored_plan import StoredPlan

_log = logging.getLogger(__name__)


class StoredShard(NamedTuple):
    """What all attempts at a shard have stored so far."""

    folder: Folder
    entries: dict[int, PartEntry]
    """The ledger, by part_idx."""
    spilled: dict[int, OpenPart]
    """Spilled outputs of other parts, by part_idx."""

    @classmethod
    def read(cls, plan: StoredPlan, shard_idx: int) -> StoredShard:
        """Raises `PlanError` if an entry is of another version."""
        folder, plan_id = plan.run_folder(shard_idx), plan.manifest.plan_id
        entries, schema = read_ledger(folder, plan_id), part_schema(plan.manifest.spec)
        return cls(folder, entries, read_spills(folder, plan_id, shard_idx, entries, schema))

    def errors(self) -> Iterator[tuple[RowError, list[int]]]:
        """The error and the rows of each request that has failed."""
        yield from ShardParts(self.folder, list(self.entries.values())).failed()
        for part in self.spilled.values():
            yield from part.errors()


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

    def __init__(self, plan: StoredPlan, shard_idx: int, attempt: Attempt, holder: Holder) -> None:
        self.shard_idx, self.attempt, self.shard = shard_idx, attempt, plan.shard(shard_idx)
        self.is_given_up = False
        self._plan, self._holder, self._plan_id = plan, holder, plan.manifest.plan_id
        self._schema = part_schema(plan.manifest.spec)
        self._answers = Answers.of(plan.manifest.spec)
        # An earlier attempt may have finished parts until it saw the claim.
        folder, self._entries, spilled = StoredShard.read(plan, shard_idx)
        self._folder, self._num_resumed = folder, len(self._entries)
        self._open = OpenParts(spilled)
        self.progress = LiveProgress(
            *(plan, shard_idx, attempt, holder, self._stored(), self._num_resumed),
            also=self._spill_while_waiting,
        )
        self._context = ExitStack()
        self._spill_idxs, self._spilling = count(), threading.Lock()

    def begin(self) -> None:
        """Show progress, and open the shard's file.

        Raises:
            PlanError: the file is damaged or missing.
        """
        spilled = dict(self._open.items())
        if self.attempt.number > 1:
            _log.info(
                "shard %d, attempt %d: earlier attempts have finished %s, and %s of others",
                self.shard_idx,
                self.attempt.number,
                counted(self._num_resumed, "part"),
                counted(sum(part.counts.num_rows for part in spilled.values()), "row"),
            )
        if self._holder.observe is not None:
            self._context.enter_context(self._holder.observe(self.progress))
        self.progress.start()
        spec = self._plan.manifest.spec
        self.work = ShardWork(
            self._context.enter_context(self._plan.open_shard(self.shard_idx)),
            [idx for idx in range(self.shard.num_parts) if idx not in self._entries],
            # Otherwise planned lengths say no more than the spec's limit.
            has_estimates=spec.planner.estimated_output_tokens is not None
            or spec.sampling.ignore_eos,
            first=self.shard.replicas.first_groups if self.shard.replicas else [],
            finished=[idx for part in spilled.values() for idx in part.outputs],
        )

    def end(self, error: BaseException | None = None) -> None:
        """Keep what is finished, and show the last state; `error` has ended the attempt."""
        with self._context:
            try:
                if error is not None and not isinstance(error, FencedError):
                    self._keep_finished(error)
            finally:
                self._open.stop()
                self.progress.end(error, self._stored())

    def _keep_finished(self, why: BaseException) -> None:
        is_trusted = isinstance(why, (KeyboardInterrupt, FailedRowsError))
        try:
            try:
                self.spill(with_suspects=is_trusted)
            except KeyboardInterrupt:  # the signal came while it was written
                self.spill(with_suspects=is_trusted)
        except (BatchLLMError, OSError) as error:
            _log.warning("finished rows of shard %d are lost: %s", self.shard_idx, error)

    def _stored(self) -> Counts:
        parts = (part.counts for _, part in self._open.items())
        return Counts.total([*self._entries.values(), *parts])

    @property
    def num_failed_rows(self) -> int:
        """Rows that have failed in all attempts, without those for which the engine may be at
        fault."""
        return self.progress.done.num_failed_rows - self._open.num_suspect_rows

    def errors(self) -> Iterator[tuple[RowError, list[int]]]:
        """The error and the rows of each request that has failed in any attempt."""
        return StoredShard(self._folder, self._entries, dict(self._open.items())).errors()

    @property
    def num_open_parts(self) -> int:
        """Parts that the engine works on."""
        return self._open.num_in_engine

    @property
    def num_left(self) -> int:
        """Parts that aren't finished."""
        return self.shard.num_parts - len(self._entries)

    def requests(self) -> Iterator[EngineRequest]:
        """The requests of the missing parts; ends early once draining begins, or after `give_up`.

        Part by part: only those with requests in the engine are in memory.
        """
        self.progress.begin_running()
        parts = self.work.parts()
        # First the question: once the shard is given up, its file is closed.
        while self._may_open_part() and (part := next(parts, None)) is not None:
            part_idx, table = part
            request_idxs = table["request_idx"].to_pylist()
            rows = dict(zip(request_idxs, table["row_idxs"].to_pylist(), strict=True))
            self._open.feed(part_idx, rows)
            hints = table.drop_columns(["row_idxs", "prompt_token_ids"]).to_pylist()
            for hint, token_ids in zip(hints, table["prompt_token_ids"], strict=True):
                if self.is_given_up:
                    return
                yield EngineRequest(prompt_token_ids=token_ids.as_py(), **hint)

    def _may_open_part(self) -> bool:
        return not (self._holder.drain.has_begun or self.is_given_up)

    def takes(self, output: EngineOutput) -> bool:
        """Whether the output's request is from here."""
        return output in self._open

    def take(self, output: EngineOutput) -> int:
        """Keep an output; its part is written after the last one. Returns its number of rows.

        Raises:
            FencedError: a later attempt has taken over.
        """
        if output.is_served and output.text is not None:
            fault = self._answers.fault(output.text, output.raw)
            output = output if fault is None else replace(output, error=fault)
        num_rows, finished = self._open.add(output)
        if self.is_given_up:
            return 0
        self.progress.count_output(output, num_rows)
        if finished is None:
            self._spill_if_due()
        else:
            part_idx, part = finished
            self._write(part_idx, part, self._holder.lap() + part.engine_s)
        return num_rows

    def write_spilled_parts(self) -> None:
        """Write the parts of which earlier attempts have spilled all outputs.

        Raises:
            FencedError: a later attempt has taken over.
        """
        for part_idx, part in sorted(self._open.items()):
            if len(part.outputs) == self.work.num_requests_of(part_idx):
                self._write(part_idx, part, part.engine_s)

    def _write(self, part_idx: int, part: OpenPart, part_s: float) -> None:
        outputs = list(part.outputs.values())
        self._entries[part_idx] = write_part(
            self.attempt, self._plan_id, part_idx, outputs, part.row_idxs, part_s, self._schema
        )
        self.progress.count_part()
        self._open.close(part_idx)

    def _spill_if_due(self) -> None:
        if self._open.is_spill_due and self._spilling.acquire(blocking=False):
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
        outputs, row_idxs = self._open.new_outputs(with_suspects=with_suspects)
        if not outputs:
            return
        # The number first: a signal may end the writing, and leave the entry.
        place = self.attempt, self._plan_id, self.shard_idx, next(self._spill_idxs)
        engine_s = self._holder.lap()
        write_spill(*place, outputs, row_idxs, engine_s, self._schema)
        self._open.spilled(outputs, engine_s)

    def give_up(self) -> None:
        """Feed and write nothing any more: a later attempt has taken over."""
        self.is_given_up = True
        self._open.stop()

    def report(self) -> ShardReport:
        """Write the report of the finished shard.

        Raises:
            FencedError: a later attempt has taken over.
        """
        self.attempt.check_current()
        parts = [self._entries[part_idx] for part_idx in sorted(self._entries)]
        report = ShardReport.of_parts(self._plan_id, self.shard_idx, parts, self._num_resumed)
        self._folder.write_bytes(REPORT_FILE, report.to_bytes())
        return report
