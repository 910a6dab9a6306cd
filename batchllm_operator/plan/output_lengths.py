"""Estimated output lengths: a constant, a column, or learned from an earlier partition.

Learned is the mean of a group with the same prefix, which its hashes recognise, else of prompts of
about the same length.
"""

import logging
from collections.abc import Iterator
from dataclasses import dataclass
from functools import reduce
from pathlib import Path
from typing import Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from batchllm_operator.errors import BatchLLMError
from batchllm_operator.lake import LakeTable, Publication, open_table
from batchllm_operator.prefixes import NO_HASH, PrefixGroups, Requests
from batchllm_operator.prefixes.jit import Int64s
from batchllm_operator.shards.group_lengths import LENGTHS_FILE, LENGTHS_SCHEMA, question_salts
from batchllm_operator.shards.reuse_index import find_places
from batchllm_operator.spec import JobSpec
from batchllm_operator.stored_plan.manifest import GROUPS_SCHEMA, LearnedOutputs, LengthBucket
from batchllm_operator.stored_plan.parquet_files import PlanFile
from batchllm_operator.stored_plan.stored_plan import StoredPlan, earlier_publications, plan_folder

_NUM_BUCKETS: Final = 64
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, eq=False)
class Learned:
    """Output lengths of an earlier partition.

    Attributes:
        hashes: int64 [n], ascending, of the prefixes of its groups, with `question_salts`; empty if
            they are unknown.
        means: int64 [n], output tokens of the groups with that prefix, rounded up.
    """

    by_length: LearnedOutputs
    hashes: Int64s
    means: Int64s

    def estimates(
        self,
        spec: JobSpec,
        lengths: Int64s,
        asked: Int64s,
        groups: PrefixGroups,
        prefix_hashes: Int64s,
    ) -> Int64s:
        """Estimated output tokens of requests: int64 [num_requests].

        Args:
            lengths, asked: int64 [num_requests], prompt tokens and question.
            prefix_hashes: int64 [num_groups, 2], see `hash_prefixes`; the first that is known
                decides.
        """
        estimates: Int64s = self._means_by_length(spec)[asked, _bucket(lengths)]
        asked = asked[groups.member_idxs]
        for question, salt in enumerate(question_salts(spec)):
            hashes = prefix_hashes ^ salt  # never one that is known if there is none
            places = find_places(self.hashes, hashes[:, 0])
            places = np.where(places < 0, find_places(self.hashes, hashes[:, 1]), places)
            places = np.repeat(places, groups.sizes)
            is_known = (places >= 0) & (asked == question)
            estimates[groups.member_idxs[is_known]] = self.means[places[is_known]]
        return estimates

    def _means_by_length(self, spec: JobSpec) -> Int64s:
        """Output tokens, rounded up, by question and bucket: of all outputs where it has none."""
        means = np.empty((len(spec.questions), _NUM_BUCKETS), dtype=np.int64)
        for question, of_question in enumerate(means):
            own = [each for each in self.by_length.buckets if each.question == question]
            known = own or self.by_length.buckets
            num_rows = sum(bucket.num_rows for bucket in known)
            of_question[:] = -(-sum(bucket.num_output_tokens for bucket in known) // num_rows)
            for bucket in own:
                mean = -(-bucket.num_output_tokens // bucket.num_rows)
                of_question[bucket.min_prompt_tokens.bit_length() - 1] = mean
        return means


def estimate_output_tokens(
    spec: JobSpec,
    requests: Requests,
    asked: Int64s,
    learned: Learned | None,
    groups: PrefixGroups,
    prefix_hashes: Int64s | None,
) -> Int64s:
    """Estimated output tokens of each request, in [1, max_tokens]: int64 [num_requests].

    Args:
        asked: int64 [num_requests], the question of each.
        learned: None if the spec doesn't ask for it, or there is no earlier partition.
        prefix_hashes: see `Learned.estimates`; None if the spec doesn't ask to learn.
    """
    if requests.output_tokens is not None:
        return requests.output_tokens
    most = np.array([question.sampling.max_tokens for question in spec.questions])[asked]
    if learned is not None:
        assert prefix_hashes is not None
        lengths = requests.lengths
        estimates = learned.estimates(spec, lengths, asked, groups, prefix_hashes)
        return np.clip(estimates, 1, most)
    constant = spec.planner.estimated_output_tokens
    return np.minimum(most, constant) if isinstance(constant, int) else most


def learn_output_lengths(spec: JobSpec, ds: str, *, by_group: bool = True) -> Learned | None:
    """Learn from the latest partition before `ds` that this job has published, if asked to.

    `lake.before` compares partitions. Those without any text, or of another job or program, don't
    count.

    Args:
        by_group: whether to look for what the commit has noted of groups, too.

    Raises `TableError`: that partition can't be read.
    """
    if not spec.planner.learns_output_tokens:
        return None
    table = open_table(spec.output.uri, spec.input.partition_column)
    for published in earlier_publications(table, spec, ds):
        if buckets := tuple(_buckets(spec, table, published.partition)):
            hashes, means = np.zeros((2, 0), dtype=np.int64)
            if by_group:
                hashes, means = _known_groups(spec, published)
            by_length = LearnedOutputs(
                ds=published.partition,
                plan_id=published.plan_id,
                buckets=buckets,
                num_known_prefixes=len(hashes),
            )
            return Learned(by_length, hashes, means)
    return None


def _buckets(spec: JobSpec, table: LakeTable, ds: str) -> Iterator[LengthBucket]:
    """Counts of the partition's rows with a text, by question and the length of their prompts."""
    counts = np.zeros((len(spec.questions), _NUM_BUCKETS, 2), dtype=np.int64)
    names = ["num_prompt_tokens", "num_output_tokens"]
    snapshot = table.snapshot(ds)
    published = [name for name in spec.prompts if name in snapshot.schema.names]
    columns = published if spec.prompts else [*names, "error"]
    for batch in table.scan(snapshot, columns):
        for question, prompt in enumerate(spec.prompts or [None]):
            if prompt is None:
                answers = batch
            elif prompt in published:
                answers = pa.RecordBatch.from_struct_array(batch.column(prompt))
            else:
                continue
            has_counts = (answers.column(name).is_valid() for name in names)
            answered = answers.filter(
                reduce(pc.and_, has_counts, answers.column("error").is_null())
            )
            prompts, outputs = (answered.column(name).to_numpy() for name in names)
            added = np.column_stack([np.ones_like(outputs), outputs])
            np.add.at(counts[question], _bucket(prompts), added)
    for question, idx in zip(*np.nonzero(counts[:, :, 0]), strict=True):
        num_rows, num_tokens = counts[question, idx].tolist()
        least = 1 << int(idx)
        yield LengthBucket(
            question=int(question),
            min_prompt_tokens=least,
            num_rows=num_rows,
            num_output_tokens=num_tokens,
        )


def _known_groups(spec: JobSpec, published: Publication) -> tuple[Int64s, Int64s]:
    """Hashes of a published plan's groups, ascending, and their mean output tokens, rounded up.

    Empty, with a note in the log, if the plan was removed or its commit has left none.
    """
    fault: object = f"its commit has left no {LENGTHS_FILE}"
    try:
        plan = StoredPlan.open(plan_folder(spec, published).uri)
        with plan.folder.open_file(LENGTHS_FILE) as file:
            where = f"plan {plan.folder.uri}: {LENGTHS_FILE}"
            table = PlanFile(file, where, LENGTHS_SCHEMA).read()
        hashes, num_rows, num_tokens = (column.to_numpy() for column in table.columns)
        return hashes, -(-num_tokens // np.maximum(num_rows, 1))
    except FileNotFoundError:
        pass
    # Only an estimate depends on it, so a fault is no reason to stop.
    except (BatchLLMError, OSError, pa.ArrowException) as error:
        fault = error
    unknown = "partition %s: output lengths are learned without groups: %s"
    _log.info(unknown, published.partition, fault)
    return np.zeros(0, dtype=np.int64), np.zeros(0, dtype=np.int64)


def _bucket(lengths: Int64s) -> Int64s:
    """Floor of log2 of each length; exact for lengths below 2**53."""
    return np.frexp(np.maximum(lengths, 1).astype(np.float64))[1].astype(np.int64) - 1


def write_groups(path: Path, prefix_hashes: Int64s) -> None:
    """Create a file of hashes, int64 [num_groups, 2], by which later plans recognise the groups."""
    columns = [pa.array(hashes, mask=hashes == NO_HASH) for hashes in prefix_hashes.T]
    pq.write_table(pa.table(columns, schema=GROUPS_SCHEMA), path, compression="zstd")
