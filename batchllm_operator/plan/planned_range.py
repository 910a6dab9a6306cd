"""Plans a range of sorted prompts: all of a job in one process, or those of a task of Spark."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import CancelledError, ThreadPoolExecutor
from dataclasses import dataclass, fields, replace
from itertools import pairwise
from pathlib import Path
from threading import Event, Lock
from typing import TYPE_CHECKING, Final

import numpy as np

from batchllm_operator.cost import Work, WorkArrays, prompt_work
from batchllm_operator.plan.arrange import Arrangement, Cut, arrange
from batchllm_operator.plan.estimate import Target
from batchllm_operator.plan.output_lengths import Learned, write_groups
from batchllm_operator.plan.rows.adapters import RowAdapters
from batchllm_operator.prefixes import (
    PlanSharing,
    PromptStore,
    RankedPrompts,
    Requests,
    describe_sharing,
    make_requests,
)
from batchllm_operator.prefixes.jit import Int64s
from batchllm_operator.progress import Progress
from batchllm_operator.prompts import Tokenizer
from batchllm_operator.spec import JobSpec
from batchllm_operator.stored_plan.counts import Frozen, PromptCounts
from batchllm_operator.stored_plan.manifest import (
    GROUPS_FILE,
    ReplicaPlacement,
    ShardInfo,
)
from batchllm_operator.stored_plan.shard_files import shard_file, write_shard

if TYPE_CHECKING:
    from batchllm_operator.plan.replicas import ReplicaPlanner

_AT_ONCE: Final = 2
"""Shards that are written at a time, on any machine: each holds parts of itself in memory."""


class PlannedRange(Frozen):
    """What the manifest needs to know of a range; ranges add up to a plan."""

    num_prompts: int
    """Rows that have a request; equal prompts share one."""
    counts: dict[str, int]
    """Fields of `PlanCounts`, but those that reading rows tells."""
    prompts: tuple[PromptCounts, ...] = ()
    """Of a job of several prompts."""
    sharing: PlanSharing
    shards: tuple[ShardInfo, ...]
    """As in a plan of this range alone, and without a predicted time."""
    works: tuple[Work, ...]
    """The work of each shard."""
    costs: tuple[float, ...]
    """The cost of each shard, by which shards are balanced."""
    unshared: Work
    """The work of all rows, if each row's prompt were computed alone."""


@dataclass(frozen=True, slots=True)
class RangePlanner:
    """What planning a range takes beside its prompts; it travels to tasks.

    Attributes:
        spec: the job's, with the range's number of shards.
        target: the GPU whose time is balanced and predicted.
        replicas: places the groups of each shard; None with one replica.
        shares_prefixes: False for a model whose prompts can't share a prefix.
        learned: output lengths from an earlier partition.
    """

    spec: JobSpec
    target: Target | None
    replicas: ReplicaPlanner | None
    shares_prefixes: bool
    learned: Learned | None = None

    def plan(
        self,
        prompts: PromptStore,
        ranked: RankedPrompts,
        row_idxs: Int64s,
        output_tokens: Int64s | None,
        tokenizer: Tokenizer,
        adapters: RowAdapters | None,
        scratch: Path,
        first_id: int = 0,
    ) -> PlannedRange:
        """Choose the groups, and write the shards' files.

        Prompts are merged if they are equal and their answers are, too.

        Args:
            prompts: of the range; `ranked` has their order.
            row_idxs: int64 [num_prompts], the row of each prompt, ascending.
            output_tokens: int64 [num_prompts], estimates, if a column holds them.
            scratch: folder for the files.
            first_id: of the requests, and of the groups.
        """
        merge = [question.sampling.is_greedy for question in self.spec.questions]
        requests, ranked = make_requests(prompts, ranked, row_idxs, output_tokens, merge=merge)
        ranked = ranked if self.shares_prefixes else ranked.apart()
        classes = None if adapters is None else adapters.classes
        length = tokenizer.max_model_len
        chosen = arrange(self.spec, requests, ranked, self.learned, self.target, length, classes)
        if chosen.prefix_hashes is not None:
            write_groups(scratch / GROUPS_FILE, chosen.prefix_hashes)
        num_parts = _write_files(self.spec, requests, chosen, adapters, scratch, first_id)
        works = _shard_works(chosen.cut)
        placements = self._placements(requests, chosen, first_id)
        per_shard = zip(chosen.shards, works, num_parts, placements, strict=True)
        infos = tuple(
            ShardInfo(
                file=shard_file(idx),
                num_groups=len(groups),
                num_requests=groups.num_prompts,
                num_rows=int(requests.num_rows[groups.member_idxs].sum()),
                num_parts=num,
                num_prefill_tokens=work.num_prefill_tokens,
                replicas=placement,
            )
            for idx, (groups, work, num, placement) in enumerate(per_shard)
        )
        decode = tokenizer.decode if adapters is None else adapters.decode
        return PlannedRange(
            num_prompts=int(requests.num_rows.sum()),
            counts=chosen.counts,
            prompts=chosen.prompts,
            sharing=describe_sharing(requests, chosen.groups, decode, chosen.tree),
            shards=infos,
            works=works,
            costs=tuple(chosen.cut.costs.tolist()),
            unshared=prompt_work(requests.lengths, chosen.decode_tokens).total(requests.num_rows),
        )

    def _placements(
        self, requests: Requests, chosen: Arrangement, first_id: int
    ) -> Iterator[ReplicaPlacement | None]:
        """How replicas share each shard, if there are several."""
        planner, decode_tokens = self.replicas, chosen.decode_tokens
        for groups, (begin, end) in zip(chosen.shards, pairwise(chosen.group_bounds), strict=True):
            if planner is None:
                yield None
                continue
            ids = first_id + np.arange(begin, end)
            placement = planner.place(groups, requests.lengths, decode_tokens, ids)
            if placement is not None and placement.measure:  # one shard's run measures
                planner = replace(planner, wants_profile=False)
            yield placement


def _shard_works(cut: Cut) -> tuple[Work, ...]:
    work, firsts = cut.work, cut.bounds[:-1]
    sums = [np.add.reduceat(getattr(work, field.name), firsts) for field in fields(WorkArrays)]
    longest = np.maximum.reduceat(work.num_decode_tokens, firsts)
    return tuple(Work(*counts) for counts in np.array([*sums, longest]).T.tolist())


def _write_files(
    spec: JobSpec,
    requests: Requests,
    chosen: Arrangement,
    adapters: RowAdapters | None,
    scratch: Path,
    first_id: int,
) -> list[int]:
    """Write the groups of each shard to its file; returns the number of parts of each."""
    one_at_a_time, stopped = Lock(), Event()

    def write(shard_idx: int) -> int:
        parts = write_shard(
            scratch / shard_file(shard_idx),
            requests,
            chosen.shards[shard_idx],
            chosen.output_tokens,
            first_request=first_id + int(chosen.cut.bounds[shard_idx]),
            first_group=first_id + int(chosen.group_bounds[shard_idx]),
            part_rows=spec.planner.part_rows,
            take_out=None if adapters is None else adapters.take_out,
        )
        num_parts = 0
        for num_requests in parts:
            num_parts += 1
            if stopped.is_set():
                raise CancelledError
            with one_at_a_time:
                progress.advance(num_requests)
        return num_parts

    with (
        Progress("write shards", len(requests), unit="requests", announce=False) as progress,
        ThreadPoolExecutor(_AT_ONCE, "batchllm-shards") as threads,
    ):
        try:
            return list(threads.map(write, range(len(chosen.shards))))
        except BaseException:
            stopped.set()  # the other one ends with its part
            raise
