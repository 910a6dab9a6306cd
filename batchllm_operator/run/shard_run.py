"""An attempt at a shard: its requests go to an engine, and their outputs into parts."""

import logging
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from itertools import count
from typing import Final

from batchllm_operator.amounts import counted
from batchllm_operator.answers import Answers
from batchllm_operator.engine import EngineOutput, EngineRequest
from batchllm_operator.errors import BatchLLMError, FailedRowsError, FencedError, LimitError
from batchllm_operator.row_error import INVALID_OUTPUT
from batchllm_operator.run.live_progress import Holder, LiveProgress
from batchllm_operator.run.shard_work import ShardWork
from batchllm_operator.shards.attempts import Attempt
from batchllm_operator.shards.parts import PartOutputs, ShardFiles, ShardParts
from batchllm_operator.shards.reports import REPORT_FILE, ShardReport
from batchllm_operator.stored_plan.stored_plan import StoredPlan

_log = logging.getLogger(__name__)
SPILL_ROWS: Final = 1_000
SPILL_S: Final = 20.0
"""Finished rows of open parts are spilled when there are so many that no file holds, or one has
waited for so long; at first for a tenth of that, and each time half as long again. `kill -9` loses
no more than that, and nothing that is 30 s old: the time is looked at every few seconds."""


class OpenParts:
    """Parts with requests in the engine or with outputs in spills; for one thread at a time."""

    def __init__(self, spilled: Mapping[int, PartOutputs]) -> None:
        self.parts = dict(spilled)
        """By part_idx; at first what earlier attempts have finished of unfinished parts."""
        self.in_engine: set[int] = set()
        self._part_of: dict[int, int] = {}
        """request_idx -> part_idx, for requests in the engine."""
        self._new: dict[int, PartOutputs] = {}
        """Outputs that no spill holds, by part_idx."""
        self._new_since, self._spill_s = 0.0, SPILL_S / 10
        self.suspects: dict[int, int] = {}
        """Requests that the engine couldn't serve, since it has served one, with their numbers of
        rows: the engine may be at fault."""

    def __contains__(self, output: EngineOutput) -> bool:
        """Whether the output's request is from here."""
        return output.request_idx in self._part_of

    def feed(self, part_idx: int, row_idxs: Mapping[int, list[int]]) -> None:
        """Note that the engine gets these requests of a part; `row_idxs` are their rows."""
        self.parts.setdefault(part_idx, PartOutputs()).row_idxs.update(row_idxs)
        self.in_engine.add(part_idx)
        self._part_of.update(dict.fromkeys(row_idxs, part_idx))

    def add(self, output: EngineOutput) -> tuple[int, int | None]:
        """Add an engine's output; its number of rows, and its part_idx if that is whole now."""
        request_idx = output.request_idx
        part_idx = self._part_of.pop(request_idx)
        part = self.parts[part_idx]
        row_idxs = part.row_idxs[request_idx]
        self._new_since = self._new_since if self._new else time.monotonic()
        new = self._new.setdefault(part_idx, PartOutputs())
        # In this order, and in that of `close`, a signal leaves nothing that can't be spilled.
        new.row_idxs[request_idx] = row_idxs
        part.outputs[request_idx] = new.outputs[request_idx] = output
        if output.is_served:
            self.suspects.clear()
        else:
            self.suspects[request_idx] = len(row_idxs)
        return len(row_idxs), part_idx if len(part.outputs) == len(part.row_idxs) else None

    def close(self, part_idx: int) -> None:
        self._new.pop(part_idx, None)
        del self.parts[part_idx]
        self.in_engine.discard(part_idx)

    def stop(self) -> None:
        """Forget what no file holds, and what the engine works on."""
        for part_idx, new in self._new.items():
            for request_idx in new.outputs:
                # A signal may have ended an earlier call in the middle.
                self.parts[part_idx].outputs.pop(request_idx, None)
        self._new.clear()
        self.in_engine.clear()

    @property
    def is_spill_due(self) -> bool:
        num_rows = sum(sum(map(len, new.row_idxs.values())) for new in self._new.values())
        has_waited = bool(self._new) and time.monotonic() - self._new_since >= self._spill_s
        return has_waited or num_rows >= SPILL_ROWS

    def unspilled(self, *, with_suspects: bool) -> dict[int, PartOutputs]:
        """The outputs that no spill holds, by part_idx; all but suspects if not `with_suspects`."""
        left_out = () if with_suspects else self.suspects
        chosen = {
            part_idx: PartOutputs(
                {idx: out for idx, out in new.outputs.items() if idx not in left_out}, new.row_idxs
            )
            for part_idx, new in self._new.items()
        }
        return {part_idx: part for part_idx, part in chosen.items() if part.outputs}

    def note_spilled(self, spilled: Mapping[int, PartOutputs], engine_s: float) -> None:
        """Note that a spill holds these outputs, and `engine_s` seconds, which its parts share."""
        num_outputs = sum(len(part.outputs) for part in spilled.values())
        for part_idx, part in spilled.items():
            self.parts[part_idx].engine_s += engine_s * len(part.outputs) / num_outputs
            new = self._new[part_idx]
            for request_idx in part.outputs:
                del new.outputs[request_idx], new.row_idxs[request_idx]
            if not new.outputs:
                del self._new[part_idx]
        self._new_since, self._spill_s = time.monotonic(), min(1.5 * self._spill_s, SPILL_S)


class ShardRun:
    """An attempt at a shard, from `begin` to `end`.

    A part is written when all of its requests have an output. Outputs of open parts are spilled
    from time to time, and when an error or a signal ends the attempt; the next one writes the
    parts.

    Attributes:
        work: what is left to generate; set by `begin`.
        open_parts: what isn't written yet.
        is_given_up: a later attempt has taken over; nothing is fed any more.
    """

    work: ShardWork

    def __init__(self, plan: StoredPlan, shard_idx: int, attempt: Attempt, holder: Holder) -> None:
        self.shard_idx, self.attempt, self.shard = shard_idx, attempt, plan.shard(shard_idx)
        self.is_given_up = False
        self._plan, self._holder = plan, holder
        self._questions, self._unit = plan.manifest.spec.questions, plan.manifest.spec.unit
        self._answers = Answers.of_all(plan.manifest.spec)
        self._files = ShardFiles.of(plan, shard_idx)
        # An earlier attempt may have finished parts until it saw the claim.
        self._entries = self._files.ledger()
        self._num_resumed = len(self._entries)
        self.open_parts = OpenParts(self._files.spilled(self._entries))
        self._lock = threading.RLock()
        self.progress = LiveProgress(
            *(plan, shard_idx, attempt, holder, self.finished.counts, self._num_resumed),
            also=self._while_waiting,
        )
        self._context = ExitStack()
        self._spill_idxs = count()

    def begin(self) -> None:
        """Show progress, and open the shard's file.

        Raises `PlanError`: the file is damaged or missing.
        """
        spilled = self.open_parts.parts.values()
        if self.attempt.number > 1:
            _log.info(
                "shard %d, attempt %d: earlier attempts have finished %s, and %s of others",
                self.shard_idx,
                self.attempt.number,
                counted(self._num_resumed, "part"),
                counted(sum(part.counts.num_rows for part in spilled), self._unit),
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
            or all(question.sampling.ignore_eos for question in self._questions),
            first=self.shard.replicas.first_groups if self.shard.replicas else [],
            finished=[idx for part in spilled for idx in part.outputs],
        )

    def end(self, error: BaseException | None = None, unread: Sequence[EngineOutput] = ()) -> None:
        """Keep what is finished, and show the last state; `error` has ended the attempt. Outputs
        that are `unread` may be other shards', or one that `take` has had."""
        with self._context:
            try:
                if error is not None and not isinstance(error, FencedError):
                    self._keep_finished(error, unread)
            finally:
                with self._lock:
                    self.open_parts.stop()
                self.progress.end(error, self.finished.counts)

    def _keep_finished(self, why: BaseException, unread: Sequence[EngineOutput]) -> None:
        is_trusted = isinstance(why, (KeyboardInterrupt, FailedRowsError, LimitError))

        def keep() -> None:
            with self._lock:
                for output in filter(self._is_final, map(self._judged, unread)):
                    if output in self.open_parts:
                        self.progress.count_generated(output)
                        self.open_parts.add(output)
                self.spill(with_suspects=is_trusted)

        try:
            try:
                keep()
            except KeyboardInterrupt:  # the signal came while it was written
                keep()
        except (BatchLLMError, OSError) as error:
            _log.warning("finished rows of shard %d are lost: %s", self.shard_idx, error)

    @property
    def num_failed_rows(self) -> int:
        """Rows that have failed in all attempts, without those for which the engine may be at
        fault."""
        return self.progress.done.num_failed_rows - sum(self.open_parts.suspects.values())

    @property
    def finished(self) -> ShardParts:
        """What all attempts have finished."""
        entries, open_parts = list(self._entries.values()), list(self.open_parts.parts.values())
        return ShardParts(self._files.folder, entries, open_parts)

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
            with self._lock:
                self.open_parts.feed(part_idx, rows)
            hints = table.drop_columns(["row_idxs", "prompt_token_ids"]).to_pylist()
            for hint, token_ids in zip(hints, table["prompt_token_ids"], strict=True):
                if self.is_given_up:
                    return
                question = rows[hint["request_idx"]][0] % len(self._questions)
                yield EngineRequest(prompt_token_ids=token_ids.as_py(), question=question, **hint)

    def _may_open_part(self) -> bool:
        return not (self._holder.drain.has_begun or self.is_given_up)

    def take(self, output: EngineOutput) -> int:
        """Keep an output; its part is written after the last one. Returns its number of rows.

        Raises `FencedError`: a later attempt has taken over.
        """
        output = self._judged(output)
        with self._lock:
            num_rows, whole_part = self.open_parts.add(output)
            if self.is_given_up:
                return 0
            self.progress.count_output(output, num_rows)
            if whole_part is not None:
                self._write(whole_part, self._holder.lap())
            elif self.open_parts.is_spill_due:
                self.spill()
        return num_rows

    def _judged(self, output: EngineOutput) -> EngineOutput:
        if not output.is_served or output.text is None:
            return output
        fault = self._answers[output.question].fault(output.text, output.raw)
        return output if fault is None else replace(output, error=fault)

    def _is_final(self, output: EngineOutput) -> bool:
        """Whether the row wouldn't be generated again for the form of its answer."""
        is_invalid = output.error is not None and output.error.kind == INVALID_OUTPUT
        return not (is_invalid and self._questions[output.question].retry_invalid)

    def write_spilled_parts(self) -> None:
        """Write the parts of which earlier attempts have spilled all outputs.

        Raises `FencedError`: a later attempt has taken over.
        """
        for part_idx, part in sorted(self.open_parts.parts.items()):
            if len(part.outputs) == self.work.num_requests_of(part_idx):
                self._write(part_idx)

    def _write(self, part_idx: int, engine_s: float = 0.0) -> None:
        part = self.open_parts.parts[part_idx]
        whole = replace(part, engine_s=part.engine_s + engine_s)
        self._entries[part_idx] = self._files.write_part(self.attempt, part_idx, whole)
        self.progress.count_part()
        self.open_parts.close(part_idx)

    def _while_waiting(self) -> None:
        """Spill what is due, and see to limits, while the engine finishes nothing; for another
        thread.

        What fails here fails again in `take`, where it is raised.
        """
        self._holder.check_limits()
        if not self._lock.acquire(blocking=False):
            return
        try:
            if self.open_parts.is_spill_due:
                self.spill()
        except (BatchLLMError, OSError) as error:
            _log.debug("shard %d: no spill: %s", self.shard_idx, error)
        finally:
            self._lock.release()

    def spill(self, *, with_suspects: bool = False) -> None:
        """Write the outputs of open parts that no file holds to one; see `OpenParts.unspilled`.

        Raises `FencedError`: a later attempt has taken over.
        """
        with self._lock:
            if parts := self.open_parts.unspilled(with_suspects=with_suspects):
                # The number first: a signal may end the writing, and leave the entry.
                spill_idx, engine_s = next(self._spill_idxs), self._holder.lap()
                self._files.write_spill(self.attempt, spill_idx, parts, engine_s)
                self.open_parts.note_spilled(parts, engine_s)

    def give_up(self) -> None:
        """Feed and write nothing any more: a later attempt has taken over."""
        self.is_given_up = True
        with self._lock:
            self.open_parts.stop()

    def report(self) -> ShardReport:
        """Write the report of the finished shard.

        Raises `FencedError`: a later attempt has taken over.
        """
        self.attempt.check_current()
        report = ShardReport.of(self._plan, self.shard_idx, self.finished, self._num_resumed)
        self._files.folder.write_bytes(REPORT_FILE, report.to_bytes())
        return report
