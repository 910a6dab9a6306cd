"""The plan stage: a partition's rows become a persisted plan."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, fields
from datetime import date
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from batchllm_operator.amounts import counted
from batchllm_operator.plan.arrange import Arrangement, WrittenShards, arrange, write_shards
from batchllm_operator.plan.earlier_outputs import Reuse, find_indexes
from batchllm_operator.plan.given import Given, find_given
from batchllm_operator.plan.group_lengths import write_groups
from batchllm_operator.plan.memory import MemoryBudget
from batchllm_operator.plan.output_lengths import learn_output_lengths
from batchllm_operator.plan.rows.input_checks import (
    check_rows,
    describe_rows,
)
from batchllm_operator.plan.rows.keys import check_keys
from batchllm_operator.plan.rows.reading import Rows, read_rows
from batchllm_operator.plan.scratch import open_scratch
from batchllm_operator.prefixes import (
    Advance,
    PlanSharing,
    PrefixSearch,
    PromptStore,
    RankedPrompts,
    Requests,
    describe_sharing,
    make_requests,
)
from batchllm_operator.progress import Progress
from batchllm_operator.prompts import TokenIdsDifferError
from batchllm_operator.shards.parts import part_schema
from batchllm_operator.shards.reuse_index import reuse_identity
from batchllm_operator.shards.row_errors import WrittenRows
from batchllm_operator.spec import JobSpec, load_spec
from batchllm_operator.storage import Folder
from batchllm_operator.stored_plan.manifest import (
    FINGERPRINTS_FILE,
    GROUPS_FILE,
    MANIFEST_FILE,
    REUSED_FILE,
    ROWS_FILE,
    CostEstimate,
    DataFile,
    LearnedOutputs,
    PlanCounts,
    PlanManifest,
    ShardInfo,
    compute_plan_id,
    describe_file,
)
from batchllm_operator.stored_plan.stored_plan import (
    StoredPlan,
    job_folder,
)

if TYPE_CHECKING:
    pass

_log = logging.getLogger(__name__)
_PROMPTS_FILE: Final = "prompts.bin"


def plan_job(spec: JobSpec | str | Path | Mapping[str, Any], ds: str | date | int) -> StoredPlan:
    """Plan the job for partition `ds`, and persist the plan in the job's staging folder.

    Nothing is written there before the whole plan is ready. Equal inputs give equal bytes
    in the same folder, so planning again is harmless.

    Args:
        spec: the job's, or what `load_spec` takes.
        ds: the partition, as text or as its key's value, such as a date.

    Raises:
        SpecError: input and output overlap; a file is in the place of an output folder; the spec
            names a column that the table lacks or that can't be placed in a prompt, or an argument
            that the engine lacks, or a form of answers that it can't have; no output can have
            `min_tokens`; or the memory budget is too small.
        TableError: the table or a column is missing, the output partition holds rows of another job
            or program, or the output table doesn't accept the job's columns.
        KeyColumnError: keys aren't unique or are null; names up to ten.
        ModelError: the tokenizer can't be loaded, or refuses a prompt.
        StorageError: the input changed while it was read, or the disk is full.
        EmptyPartitionError: there is no such partition, or it has no rows, and the spec says
            `on_empty: fail`.
        FailedRowsError: more rows can't be prompted than `max_failed_fraction` allows.
    """
    given = find_given(load_spec(spec), str(ds))
    try:
        with open_scratch() as scratch:
            return _build(given, scratch)
    except TokenIdsDifferError as error:  # it won't happen again
        _log.warning("%s: planning starts again", error)
    with open_scratch() as scratch:  # not above: the error holds the first attempt's memory
        return _build(given, scratch)


def _build(given: Given, scratch: Path) -> StoredPlan:
    """Build the plan, with temporary files in `scratch`.

    Raises:
        TokenIdsDifferError: see `Tokenizer.encode`.
    """
    spec, target, tokenizer, adapters = given.spec, given.target, given.tokenizer, given.adapters
    with ExitStack() as stack:
        rows, budget = _read(given, scratch, stack)
        requests, ranked = _find_prefixes(given, rows)
        where = describe_rows(spec, given.table, given.snapshot)
        check_keys(scratch / ROWS_FILE, spec.input.key, where)
        learned = learn_output_lengths(spec, given.ds, budget)
        classes = adapters.classes if adapters is not None else None
        chosen = arrange(spec, requests, ranked, learned, target, tokenizer.max_model_len, classes)
        decode = tokenizer.decode if adapters is None else adapters.decode
        sharing = describe_sharing(requests, chosen.groups, decode)
        take_out = adapters.take_out if adapters is not None else None
        shards = write_shards(spec, requests, chosen, target, given.replicas, scratch, take_out)
    files = _write_files(spec, chosen, shards, scratch)
    by_length = learned.by_length if learned is not None else None
    counts = _counts(rows, requests, chosen)
    content = PlanContent(
        counts=counts,
        files=files,
        shards=shards.infos,
        learned=by_length,
        estimate=shards.estimate,
        sharing=sharing,
        imbalance=chosen.cut.imbalance,
    )
    manifest = describe_plan(given, content)
    return complete(manifest, lambda folder: _publish(folder, files, scratch))


@dataclass(frozen=True, slots=True)
class PlanContent:
    """What planning has made; see the fields of `PlanManifest`."""

    counts: PlanCounts
    files: Mapping[str, DataFile]
    shards: tuple[ShardInfo, ...]
    learned: LearnedOutputs | None
    estimate: CostEstimate | None
    sharing: PlanSharing
    imbalance: float
    row_parts: tuple[int, ...] = ()


def describe_plan(given: Given, content: PlanContent) -> PlanManifest:
    """The manifest of a plan."""
    spec, tokenizer = given.spec, given.tokenizer
    versions = given.adapter_versions
    return PlanManifest(
        plan_id=compute_plan_id(
            spec, given.ds, tokenizer.model_version, content.files, content.learned, versions
        ),
        spec=spec,
        ds=given.ds,
        input_uri=given.table.uri,
        input_version=given.snapshot.version,
        tokenizer_fingerprint=tokenizer.fingerprint,
        model_version=tokenizer.model_version,
        adapter_versions=versions,
        max_model_len=tokenizer.max_model_len,
        answers=given.answers,
        **{field.name: getattr(content, field.name) for field in fields(content)},
    )


def _write_files(
    spec: JobSpec, chosen: Arrangement, shards: WrittenShards, scratch: Path
) -> dict[str, DataFile]:
    """The plan's data files, all in `scratch`; writes that of the groups."""
    names = [ROWS_FILE, *(shard.file for shard in shards.infos)]
    if spec.planner.learns_output_tokens:
        write_groups(scratch / GROUPS_FILE, chosen.prefix_hashes)
        names.append(GROUPS_FILE)
    if spec.reuse_outputs:
        names += [FINGERPRINTS_FILE, REUSED_FILE]
    return {name: describe_file(scratch / name) for name in names}


def _read(given: Given, scratch: Path, stack: ExitStack) -> tuple[Rows, MemoryBudget]:
    """All rows, which `stack` closes, and the remaining budget."""
    spec, snapshot, budget = given.spec, given.snapshot, given.budget
    prompts = stack.enter_context(PromptStore(scratch / _PROMPTS_FILE))
    reuse = None
    if spec.reuse_outputs:
        reuse = stack.enter_context(_open_reuse(given, scratch))
        budget = budget.holding(reuse.num_bytes)
    if not spec.input.filter:  # a filter may skip any number of rows
        budget.check(snapshot.num_rows)
    rows = Rows(prompts, PrefixSearch(budget.row_bytes(snapshot.num_rows)), reuse)
    path = scratch / ROWS_FILE
    read_rows(
        spec, given.table, snapshot, given.tokenizer, rows, path, given.adapters, given.stored
    )
    written = WrittenRows(Folder.open(str(scratch)), [ROWS_FILE], spec.input.key)
    check_rows(spec, rows.num_rows, rows.num_rejected, given.table, snapshot, written)
    warn_of_control_tokens(spec, rows.num_control)
    budget.check(rows.num_rows)
    return rows, budget


def _counts(rows: Rows, requests: Requests, chosen: Arrangement) -> PlanCounts:
    return PlanCounts(
        num_rows=rows.num_rows,
        num_rejected_rows=rows.num_rejected,
        num_duplicate_rows=len(rows.prompts) - len(requests),
        num_requests=len(requests),
        num_groups=len(chosen.groups),
        num_shared_groups=int(np.count_nonzero(chosen.groups.sizes > 1)),
        num_logical_tokens=rows.prompts.num_tokens,
        num_planned_tokens=int(chosen.cut.num_prefill_tokens.sum()),
        num_optimal_tokens=chosen.cut.num_optimal_tokens,
        num_algorithm_1_saved_tokens=chosen.num_algorithm_1_saved_tokens,
        num_exact_saved_tokens=chosen.num_exact_saved_tokens,
        num_reused_rows=rows.num_reused,
        num_control_rows=rows.num_control,
        num_truncated_rows=rows.num_truncated,
    )


def _open_reuse(given: Given, scratch: Path) -> Reuse:
    """Copy and load the indexes for reuse."""
    spec, tokenizer = given.spec, given.tokenizer
    identity = reuse_identity(
        spec,
        tokenizer.model_version,
        tokenizer.fingerprint,
        tokenizer.max_model_len,
        given.adapter_versions,
    )
    indexes = find_indexes(spec, given.ds, identity, given.budget, scratch)
    return Reuse(indexes, scratch, part_schema(spec))


@contextmanager
def _shown(name: str, total: int) -> Iterator[Advance]:
    """Shows the progress of a phase of the prefix search."""
    with Progress(f"{name} prompts", total, unit="prompts", announce=False) as progress:
        yield progress.advance


def _find_prefixes(given: Given, rows: Rows) -> tuple[Requests, RankedPrompts]:
    """Sort the prompts, and merge equal ones into one request."""
    ranked, merge = rows.search.finish(rows.prompts, _shown), given.spec.sampling.is_greedy
    requests, ranked = make_requests(
        rows.prompts, ranked, rows.row_idxs(), rows.output_tokens(), merge=merge
    )
    if given.answers.reason_against_sharing is not None:
        ranked = ranked.apart()
    return requests, ranked


def warn_of_control_tokens(spec: JobSpec, num_rows: int) -> None:
    """Log how many rows spell a control token of the model, and what becomes of it."""
    mode, spelling_rows = spec.prompt.control_mode, counted(num_rows, "row spells", "rows spell")
    if num_rows and mode == "keep":
        _log.warning(
            "%s control tokens of the model, which stay control tokens: a row can end its turn and"
            " begin another; prompt.special_tokens: text makes ordinary text of them",
            spelling_rows,
        )
    elif num_rows:
        fate = "in its prompt they are ordinary text" if mode == "text" else "such a row fails"
        _log.info(
            "%s control tokens of the model; %s (prompt.special_tokens)",
            spelling_rows,
            fate,
        )


def _publish(folder: Folder, files: Mapping[str, DataFile], scratch: Path) -> None:
    """Copy data files into the plan's folder."""
    num_bytes = sum(file.size_bytes for file in files.values())
    with Progress("publish the plan", num_bytes, unit="bytes", announce=False) as progress:
        for name, file in files.items():
            folder.publish_file(scratch / name, name)
            progress.advance(file.size_bytes)


def complete(manifest: PlanManifest, publish: Callable[[Folder], None]) -> StoredPlan:
    """Let `publish` put the data files into the plan's folder, then write the manifest there."""
    folder = job_folder(manifest.spec, manifest.ds).child(f"plan-{manifest.plan_id}")
    publish(folder)
    plan = StoredPlan(folder, manifest)
    plan.note_turn()
    folder.write_bytes(MANIFEST_FILE, manifest.to_bytes())
    plan.mark_current()
    return plan
