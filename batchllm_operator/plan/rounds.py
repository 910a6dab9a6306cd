"""Rounds after the first: which is planned, and the answers beside the rows that it asks about."""

from __future__ import annotations

import logging
from collections.abc import Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from batchllm_operator.answers import NOTHING_PLANNED
from batchllm_operator.engine.gpus import block_size_of
from batchllm_operator.errors import (
    IncompleteRunError,
    PlanError,
    SpecError,
    StorageError,
    TableError,
)
from batchllm_operator.lake import LakeTable, Snapshot, find_place
from batchllm_operator.lake.places import Place
from batchllm_operator.prefixes import (
    PromptStore,
    RankedPrompts,
    TokenTable,
    make_requests,
    sort_prompts,
)
from batchllm_operator.prefixes.prompt_store import chunks
from batchllm_operator.row_error import SKIPPED, UNASKED, RowError
from batchllm_operator.shards.buckets import answer_fields
from batchllm_operator.shards.job_status import newest_plan_uri
from batchllm_operator.shards.joining import (
    FinishedRound,
    Joining,
    outputs_of,
)
from batchllm_operator.shards.parts import STATUS_COLUMN
from batchllm_operator.shards.reports import find_committed
from batchllm_operator.spec import JobSpec
from batchllm_operator.spec.rounds import answers_named
from batchllm_operator.stored_plan.manifest import ERROR_COLUMN, PlanManifest
from batchllm_operator.stored_plan.rounds import INPUT_FILE, PinnedInput, plans_of_rounds
from batchllm_operator.stored_plan.stored_plan import StoredPlan
from batchllm_operator.streams import ahead

if TYPE_CHECKING:
    from batchllm_operator.prompts import Tokenizer

_log = logging.getLogger(__name__)
_BATCH_PROMPTS: Final = 1 << 10


@dataclass(frozen=True, slots=True)
class Earlier:
    """What a job has done already of a partition."""

    rounds: Sequence[FinishedRound] = ()
    """Those before the one to plan."""
    published: StoredPlan | None = None
    """The plan of the last round, if the output table holds the answers to this input."""


def find_earlier(
    spec: JobSpec,
    ds: str,
    input_version: str,
    tokenizers: Sequence[Tokenizer],
    adapter_versions: tuple[str, ...],
) -> Earlier:
    """The rounds that the newest plan of the job and partition has finished, and those before it,
    as far as their prompts and the model are the same; of a published one, the input, too.

    Args:
        input_version: of the input table now.
        tokenizers: one for each question.

    Raises `PlanError`: a part of an earlier round is of another version.
    """
    uri = newest_plan_uri(spec, ds) if len(spec.rounds) > 1 else None
    if uri is None:
        return Earlier()
    try:
        plans = plans_of_rounds(StoredPlan.open(uri))
    except PlanError as error:
        _log.warning("planning begins with the first round: %s", error)
        return Earlier()
    newest, rounds = plans[-1], list[FinishedRound]()
    same = [each for each in plans if _is_same(each.manifest, spec, tokenizers, adapter_versions)]
    if find_committed(newest) is not None:
        if newest.manifest.input_version != input_version:
            return Earlier()
        if newest in same:
            return Earlier(published=newest)
    with suppress(IncompleteRunError):  # that round is planned again
        for plan in same:
            rounds.append(FinishedRound.of(plan))
    return Earlier(rounds[: len(spec.rounds) - 1])


def _is_same(
    manifest: PlanManifest,
    spec: JobSpec,
    tokenizers: Sequence[Tokenizer],
    adapter_versions: tuple[str, ...],
) -> bool:
    """Whether planning its round again, and those before it, would ask the same."""
    num, model = manifest.round_idx + 1, tokenizers[0]
    asked = [tokenizers[number] for numbers in spec.rounds[:num] for number in numbers]
    fingerprints = manifest.tokenizer_fingerprint.split()
    return (
        manifest.spec.identity_until(num) == spec.identity_until(num)
        and (manifest.model_version, manifest.max_model_len, manifest.adapter_versions)
        == (model.model_version, model.max_model_len, adapter_versions)
        and all(tokenizer.fingerprint in fingerprints for tokenizer in asked)
    )


def pinned_input(table: LakeTable, before: StoredPlan) -> Snapshot:
    """The partition that an earlier plan has read.

    Raises `TableError`: it isn't there any more.
    """
    try:
        pinned = PinnedInput.read(before.folder, INPUT_FILE)
        if pinned is None:
            raise PlanError(f"{before.folder.uri}/{INPUT_FILE} is missing")
        snapshot = pinned.snapshot(before.manifest.input_version)
        table.check_unchanged(snapshot)
        for _ in ahead(snapshot.files, lambda file: table.footer(snapshot, file)):
            pass
    except (PlanError, StorageError, TableError) as error:
        raise TableError(
            f"the input that plan {before.folder.uri} has read is gone: {error}. To begin again"
            " with the input as it is now, plan without --retry, or, with several rounds, remove"
            " that folder"
        ) from error
    return snapshot


def num_repeated_tokens(
    before: StoredPlan, prompts: PromptStore, ranked: RankedPrompts, scratch: Path
) -> int:
    """Tokens of sorted prompts that the round before computes, too, with memory without bounds."""
    block_size = block_size_of(before.manifest.spec)

    def num_computed(prompts: PromptStore, ranked: RankedPrompts) -> int:
        rows = np.arange(len(prompts))
        requests, ranked = make_requests(prompts, ranked, rows, merge=[True])
        cached = ranked.cached_tokens(requests.lengths, block_size)
        return int(requests.lengths.sum() - cached.sum())

    with PromptStore(scratch / "both.bin") as both:
        for part in chunks(prompts.lengths):
            both.append(prompts.take(np.arange(part.start, part.stop)))
        for shard_idx in range(len(before.manifest.shards)):
            with before.open_shard(shard_idx) as file:
                for batch in file.iter_batches(_BATCH_PROMPTS, columns=["prompt_token_ids"]):
                    both.append(
                        TokenTable.from_lists(batch.column(0).to_numpy(zero_copy_only=False))
                    )
        num_both = num_computed(both, sort_prompts(both))
    num_own = num_computed(prompts, ranked)
    return max(0, num_own + before.manifest.counts.num_optimal_tokens - num_both)


def answers_schema(spec: JobSpec) -> pa.Schema:
    """A field for each answer that a prompt names, by its place.

    Raises `SpecError`: a prompt names what its answers don't have.
    """
    structs = pa.schema(
        pa.field(name, pa.struct(answer_fields(question, NOTHING_PLANNED)))
        for name, question in zip(spec.prompts, spec.questions, strict=False)
    )
    places = _places(spec, structs, spec.prompts)
    return pa.schema(pa.field(name, place.kind) for name, place in places.items())


def _places(spec: JobSpec, schema: pa.Schema, known: Collection[str]) -> dict[str, Place]:
    """Where the answers to known prompts that prompts name are in a table with their columns, and
    statuses."""
    questions = dict(zip(spec.prompts, spec.questions, strict=False))
    paths: dict[str, str] = {}
    for name, prompt in spec.prompts.items():
        for place, head in answers_named(prompt, known).items():
            paths[place] = f"{head}.{questions[head].answer_column}" if place == head else place
            paths[f"{head}.{STATUS_COLUMN}"] = f"{head}.{STATUS_COLUMN}"
            if find_place(schema, paths[place]) is None:
                kind = schema.field(head).type
                raise SpecError(f"prompts.{name}: {place!r} isn't in the answers to {head}: {kind}")
    found = {place: find_place(schema, path) for place, path in paths.items()}
    return {place: where for place, where in found.items() if where is not None}


class EarlierAnswers:
    """Answers of finished rounds, read side by side with the rows of the input, in their order.

    The local folder `spool` holds them; memory is that of `Joining`. Raises as that.
    """

    def __init__(self, spec: JobSpec, rounds: Sequence[FinishedRound], spool: Path) -> None:
        plan, outputs = rounds[-1].plan, outputs_of(rounds)
        joining = Joining(plan, outputs)
        self.num_rounds = len(rounds)
        self._names, self._num = list(spec.prompts), len(spec.prompts)
        self._known = [number for each in rounds for number in each.asked]
        names = {self._names[number] for number in self._known}
        self._places = _places(spec, joining.schema, names)
        spool.mkdir()
        self._tables = joining.all_tables(plan, outputs, spool)
        self._left = joining.schema.empty_table()

    def beside(self, rows: pa.RecordBatch) -> tuple[pa.RecordBatch, dict[int, RowError]]:
        """The next rows with columns of the answers that prompts name, and by ask, counted from the
        first row, why the earlier rounds have none."""
        answers = self._next(rows.num_rows)
        columns = dict(zip(rows.schema.names, rows.columns, strict=True))
        columns |= {name: place.of(answers) for name, place in self._places.items()}
        errors: dict[int, RowError] = {}
        for number in self._known:
            answer = answers.column(self._names[number])
            statuses = pc.struct_field(answer, STATUS_COLUMN)
            unasked = pc.is_in(statuses, pa.array([SKIPPED, "rejected"]))
            for row in np.flatnonzero(unasked.to_numpy(zero_copy_only=False)).tolist():
                fields = answer[row][ERROR_COLUMN].as_py()
                error = UNASKED if fields is None else RowError(**fields)
                errors[row * self._num + number] = error
        return pa.RecordBatch.from_pydict(columns), errors

    def _next(self, num_rows: int) -> pa.RecordBatch:
        tables = [self._left]
        while sum(table.num_rows for table in tables) < num_rows:
            tables.append(next(self._tables))
        table = pa.concat_tables(tables)
        self._left = table.slice(num_rows)
        columns = [column.combine_chunks() for column in table.slice(0, num_rows).columns]
        return pa.RecordBatch.from_arrays(columns, schema=table.schema)

    def close(self) -> None:
        self._tables.close()
