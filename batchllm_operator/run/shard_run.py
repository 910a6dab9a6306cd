"""An attempt at a shard: its requests go to an engine, and their outputs into parts."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import replace
from itertools import count
from types import TracebackType
from typing import NamedTuple

from batchllm_operator.amounts import counted
from batchllm_operator.answers import Answers
from batchllm_operator.engine import EngineOutput, EngineRequest
from batchllm_operator.errors import BatchLLMError, FailedRowsError, FencedError
from batchllm_operator.row_error import RowError
from batchllm_operator.run.draining import Drain
from batchllm_operator.run.live_progress import Observe, ProgressWriter, live_progress
from batchllm_operator.run.open_parts import OpenPart, OpenParts
from batchllm_operator.run.shard_source import Claimed
from batchllm_operator.run.shard_tally import ShardTally
from batchllm_operator.run.shard_work import ShardWork
from batchllm_operator.shards.parts import (
    PartEntry,
    part_schema,
    read_ledger,
    write_part,
)
from batchllm_operator.shards.report import REPORT_FILE, ShardReport
from batchllm_operator.shards.spills import (
    SpilledPart,
    read_spills,
    stored_errors,
    write_spill,
)
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
    """An attempt at a shard; the context ends it, as `live_progress` does.

    A part is written when all of its requests have an output. Outputs of open parts are spilled
    from time to time, and when an error or a signal ends the attempt; the next one writes the
    parts.

    Attributes:
        work: what is left to generate.
    """

    def __init__(
        self,
        plan: StoredPlan,
        claimed: Claimed,
        holder: Holder,
    ) -> None:
        self.plan = plan
        self.shard_idx, self.attempt = claimed
        self.shard = plan.shard(self.shard_idx)
        self._drain, self._holder = holder.drain, holder
        # An earlier attempt may have finished parts until it saw the claim.
        self._entries = read_ledger(self.attempt.shard_folder, plan.manifest.plan_id)
        self._num_resumed = len(self._entries)
        self._schema = part_schema(plan.manifest.spec)
        plan_id, folder = plan.manifest.plan_id, self.attempt.shard_folder
        self._spilled = read_spills(folder, plan_id, self.shard_idx, self._entries, self._schema)
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
        self.is_given_up = False
        """Set once a later attempt has taken over: nothing is fed any more."""
        self._answers = Answers.of(plan.manifest.spec)
        self._context = ExitStack()
        self._open_parts = OpenParts()
        self._spill_idxs = count()
        self._part_of: dict[int, int] = {}  # request_idx -> part_idx, for requests in the engine

    def __enter__(self) -> ShardRun:
        if self.attempt.number > 1:
            _log.info(
                "shard %d, attempt %d: earlier attempts have finished %s, and %s of others",
                self.shard_idx,
                self.attempt.number,
                counted(self._num_resumed, "part"),
                counted(sum(part.counts.num_rows for part in self._spilled.values()), "row"),
            )
        with ExitStack() as undo:
            self._writer: ProgressWriter = undo.enter_context(
                live_progress(
                    self.attempt.folder,
                    self.tally,
                    self._holder.every_s,
                    self._holder.observe,
                    self._spill_while_waiting,
                )
            )
            file = undo.enter_context(self.plan.open_shard(self.shard_idx))
            self.work = ShardWork(
                file,
                missing_parts(self.plan, self.shard_idx, self._entries),
                has_estimates=_has_estimates(self.plan),
                first=self.shard.replicas.first_groups if self.shard.replicas else [],
                finished=[idx for part in self._spilled.values() for idx in part.outputs],
            )
            self._num_requests = {
                part_idx: file.metadata.row_group(part_idx).num_rows for part_idx in self._spilled
            }
            self._context = undo.pop_all()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        try:
            if error is not None and not isinstance(error, FencedError):
                self._keep_finished(error)
        finally:
            self.tally.keep(self._stored_counts())
            self._context.__exit__(kind, error, traceback)

    def _keep_finished(self, why: BaseException) -> None:
        """Spill what is finished, as the attempt ends early."""
        is_trusted = isinstance(why, (KeyboardInterrupt, FailedRowsError))
        try:
            try:
                self.spill(with_suspects=is_trusted)
            except KeyboardInterrupt:  # the signal came while it was written
                self.spill(with_suspects=is_trusted)
        except (BatchLLMError, OSError) as error:
            _log.warning("finished rows of shard %d are lost: %s", self.shard_idx, error)

    def _stored_counts(self) -> Counts:
        """Of parts and spills."""
        open_parts = (part.stored_counts for part in self._open_parts)
        spilled = (part.counts for part in self._spilled.values())
        return Counts.total([*self._entries.values(), *open_parts, *spilled])

    @property
    def num_failed_rows(self) -> int:
        """Rows that have failed in all attempts, without those for which the engine may be at
        fault."""
        return self.tally.num_failed_rows - self._open_parts.num_suspect_rows

    def errors(self) -> Iterator[tuple[RowError, list[int]]]:
        """The error and the rows of each request that has failed in any attempt."""
        parts = [*self._open_parts, *self._spilled.values()]
        return stored_errors(self.attempt.shard_folder, self._entries.values(), parts)

    @property
    def num_open_parts(self) -> int:
        return len(self._open_parts)

    @property
    def num_left(self) -> int:
        """Parts that aren't finished."""
        return len(missing_parts(self.plan, self.shard_idx, self._entries))

    def begin_running(self) -> None:
        """Note that the engine takes requests."""
        self.tally.begin_running()
        self._writer.write_soon()

    def requests(self) -> Iterator[EngineRequest]:
        """The requests of the missing parts; ends early once draining begins, or after `give_up`.

        Part by part: only those with requests in the engine are in memory.
        """
        parts = self.work.parts()
        # First the question: once the shard is given up, its file is closed.
        while self._may_open_part() and (part := next(parts, None)) is not None:
            part_idx, table = part
            request_idxs = table["request_idx"].to_pylist()
            row_idxs = dict(zip(request_idxs, table["row_idxs"].to_pylist(), strict=True))
            spilled = self._spilled.pop(part_idx, SpilledPart())
            self._open_parts.open(part_idx, OpenPart.of(row_idxs, spilled))
            self._drain.num_open_parts += 1
            known = table.drop_columns(["request_idx", "row_idxs", "prompt_token_ids"]).to_pylist()
            for request_idx, hints, token_ids in zip(
                request_idxs, known, table["prompt_token_ids"], strict=True
            ):
                if self.is_given_up:
                    return
                self._part_of[request_idx] = part_idx
                yield EngineRequest(
                    request_idx=request_idx, prompt_token_ids=token_ids.as_py(), **hints
                )

    def _may_open_part(self) -> bool:
        return not (self._drain.has_begun or self.is_given_up)

    def takes(self, output: EngineOutput) -> bool:
        """Whether the output's request is from here."""
        return output.request_idx in self._part_of

    def take(self, output: EngineOutput) -> int:
        """Keep an output; its part is written after the last one. Returns its number of rows.

        Raises:
            FencedError: a later attempt has taken over.
        """
        part_idx = self._part_of[output.request_idx]
        if self.is_given_up:
            del self._part_of[output.request_idx]
            return 0
        output = self._checked(output)
        num_rows = self._open_parts.add(part_idx, output)
        del self._part_of[output.request_idx]
        self.tally.count_output(output, num_rows)
        if self._open_parts[part_idx].is_finished:
            self._write(part_idx)
        else:
            self._spill_if_due()
        return num_rows

    def _checked(self, output: EngineOutput) -> EngineOutput:
        """The output, with a row error if its answer can't be used."""
        if not output.is_served or output.text is None:
            return output
        fault = self._answers.fault(output.text, output.raw)
        return output if fault is None else replace(output, error=fault)

    def _write(self, part_idx: int) -> None:
        part = self._open_parts[part_idx]
        self._write_part(part_idx, part, self._holder.lap() + part.engine_s)
        self._open_parts.close(part_idx)
        self._drain.num_open_parts -= 1

    def _write_part(self, part_idx: int, part: OpenPart, part_s: float) -> None:
        outputs, plan_id = list(part.outputs.values()), self.plan.manifest.plan_id
        entry = write_part(
            self.attempt, plan_id, part_idx, outputs, part.row_idxs, part_s, self._schema
        )
        self._entries[part_idx] = entry
        self.tally.count_part()

    def write_spilled_parts(self) -> None:
        """Write the parts of which earlier attempts have spilled all outputs.

        Raises:
            FencedError: a later attempt has taken over.
        """
        for part_idx, spilled in sorted(self._spilled.items()):
            if len(spilled.outputs) == self._num_requests[part_idx]:
                self._write_part(part_idx, OpenPart.of({}, spilled), spilled.engine_s)
                del self._spilled[part_idx]

    def _spill_if_due(self) -> None:
        with self._open_parts.due_spill() as is_due:
            if is_due:
                self.spill()

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
        spill_idx, engine_s = next(self._spill_idxs), self._holder.lap()
        place = self.attempt, self.plan.manifest.plan_id, self.shard_idx, spill_idx
        write_spill(*place, outputs, row_idxs, engine_s, self._schema)
        self._open_parts.spilled(outputs, engine_s)

    def give_up(self) -> None:
        """Feed and write nothing any more: a later attempt has taken over."""
        self.is_given_up = True
        self._drain.num_open_parts -= len(self._open_parts)
        self._open_parts.clear()

    def report(self) -> ShardReport:
        """Write the report of the finished shard.

        Raises:
            FencedError: a later attempt has taken over.
        """
        self.attempt.check_current()
        return store_report(self.plan, self.shard_idx, self._entries, self._num_resumed)


def missing_parts(plan: StoredPlan, shard_idx: int, entries: Mapping[int, PartEntry]) -> list[int]:
    """The parts of a shard that the ledger lacks, ascending."""
    num_parts = plan.manifest.shards[shard_idx].num_parts
    return [part_idx for part_idx in range(num_parts) if part_idx not in entries]


def store_report(
    plan: StoredPlan, shard_idx: int, entries: Mapping[int, PartEntry], num_resumed_parts: int
) -> ShardReport:
    """Write the report of a shard whose parts are all in the ledger, and return it."""
    in_order = [entries[part_idx] for part_idx in sorted(entries)]
    report = ShardReport.of_parts(plan.manifest.plan_id, shard_idx, in_order, num_resumed_parts)
    plan.run_folder(shard_idx).write_bytes(REPORT_FILE, report.to_bytes())
    return report


def _has_estimates(plan: StoredPlan) -> bool:
    """Whether planned output lengths tell more than the spec's limit."""
    spec = plan.manifest.spec
    return spec.planner.estimated_output_tokens is not None or spec.sampling.ignore_eos
