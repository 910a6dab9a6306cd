"""From requests to shards: chooses groups, their shards and their order."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import FIRST_EXCEPTION, CancelledError, ThreadPoolExecutor, wait
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from threading import Event, Lock
from typing import TYPE_CHECKING, Final

import numpy as np
import numpy.typing as npt

from batchllm_operator.plan.cut import Cut
from batchllm_operator.plan.estimate import Target, estimate_cost
from batchllm_operator.plan.group_lengths import hash_prefixes
from batchllm_operator.plan.output_lengths import Learned, estimate_output_tokens
from batchllm_operator.prefixes import (
    PrefixGroups,
    PrefixTree,
    PromptClasses,
    RankedPrompts,
    Requests,
    choose_prefixes,
    order_groups_by_subtree,
    split_groups,
)
from batchllm_operator.progress import Progress
from batchllm_operator.spec import JobSpec
from batchllm_operator.stored_plan.manifest import CostEstimate, ShardInfo
from batchllm_operator.stored_plan.shard_files import TakeOut, shard_file, write_shard

if TYPE_CHECKING:
    from batchllm_operator.plan.replicas import ReplicaPlanner

_AT_ONCE: Final = 2
"""Shards that are written at a time, on any machine: each holds parts of itself in memory."""
_STEPS: Final = ("tree built", "prefixes chosen", "outputs estimated", "shards cut")


@dataclass(frozen=True, slots=True, eq=False)
class Arrangement:
    """The groups in the order of the plan, shard after shard."""

    groups: PrefixGroups
    group_bounds: npt.NDArray[np.int64]
    """int64 [num_shards + 1]: shard s has the groups [group_bounds[s], group_bounds[s + 1])."""
    cut: Cut
    output_tokens: npt.NDArray[np.int64]
    """int64 [num_requests], estimates."""
    decode_tokens: npt.NDArray[np.int64]
    """int64 [num_requests]: those that take decode steps; 0 in a job without decode."""
    prefix_hashes: npt.NDArray[np.int64]
    """int64 [num_groups, 2], see `hash_prefixes`; [0, 2] if nothing is to be learned."""
    num_algorithm_1_saved_tokens: int
    num_exact_saved_tokens: int

    def shard_groups(self) -> list[PrefixGroups]:
        """The groups of each shard."""
        return [
            self.groups.take(np.arange(begin, end))
            for begin, end in pairwise(self.group_bounds.tolist())
        ]


def arrange(
    spec: JobSpec,
    requests: Requests,
    ranked: RankedPrompts,
    learned: Learned | None,
    target: Target | None,
    max_model_len: int,
    classes: PromptClasses | None = None,
) -> Arrangement:
    """Choose the groups, cut the requests into shards (ADR 32), and sort the groups of each.

    The members of a group in two shards are two groups. The order is that of Eq. 4, with subtrees
    kept together (ADR 8).

    Args:
        ranked: the requests' prompts in order.
        learned: output lengths from an earlier partition.
        target: shards are balanced by this GPU's time; None to balance by tokens.
        max_model_len: upper bound of a prompt with its output.
        classes: of the prompts, if there are several: each shard has one after the other.
    """
    with Progress("choose and order groups", len(_STEPS), unit="steps", announce=False) as progress:
        tree = ranked.tree(requests.lengths)
        progress.advance(1, _STEPS[0])
        choice = choose_prefixes(tree)
        progress.advance(1, _STEPS[1])
        learns = spec.planner.learns_output_tokens
        none = np.zeros((0, 2), dtype=np.int64)
        prefix_hashes = hash_prefixes(requests, choice.groups) if learns else none
        estimated = estimate_output_tokens(spec, requests, learned, choice.groups, prefix_hashes)
        room = np.maximum(max_model_len - requests.lengths, 1)  # a pooled prompt may leave none
        output_tokens = np.minimum(estimated, room)
        progress.advance(1, _STEPS[2])
        decode_tokens = output_tokens if spec.decodes else np.zeros_like(output_tokens)
        cut = Cut.of(spec, requests, ranked, decode_tokens, target)
        groups, shards, origins = _split(choice.groups, tree, cut, output_tokens)
        if classes is not None:
            by_class = np.lexsort((classes.of_groups(groups, requests), shards))
            groups, shards, origins = groups.take(by_class), shards[by_class], origins[by_class]
        group_bounds = np.searchsorted(shards, np.arange(len(cut.bounds)))
        progress.advance(1, _STEPS[3])
    return Arrangement(
        groups,
        group_bounds,
        cut,
        output_tokens,
        decode_tokens,
        prefix_hashes[origins] if learns else none,
        choice.algorithm_1_saved_tokens,
        choice.exact_saved_tokens,
    )


def _split(
    chosen: PrefixGroups, tree: PrefixTree, cut: Cut, output_tokens: npt.NDArray[np.int64]
) -> tuple[PrefixGroups, npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """The groups of the shards in order, each one's shard, and the chosen group that it is from."""
    parts, shards = split_groups(chosen, cut.shard_of_request)
    order = order_groups_by_subtree(parts, tree, output_tokens)
    order = order[np.argsort(shards[order], kind="stable")]
    origins = np.searchsorted(chosen.offsets, parts.offsets[order], side="right") - 1
    return parts.take(order), shards[order], origins


@dataclass(frozen=True, slots=True)
class WrittenShards:
    """The shards of a plan, in order."""

    infos: tuple[ShardInfo, ...]
    estimate: CostEstimate | None
    """For all shards together."""


def write_shards(
    spec: JobSpec,
    requests: Requests,
    arrangement: Arrangement,
    target: Target | None,
    replicas: ReplicaPlanner | None,
    scratch: Path,
    take_out: TakeOut | None = None,
    first_id: int = 0,
) -> WrittenShards:
    """Write the shards, and predict their time.

    Args:
        target: the GPU to predict it for, if any.
        replicas: places the groups of each shard; None with one replica.
        scratch: folder for the files.
        take_out: see `write_shard`.
        first_id: of the requests, and of the groups.
    """
    cut, decode_tokens = arrangement.cut, arrangement.decode_tokens
    estimated = estimate_cost(
        target, requests, decode_tokens, cut.work, cut.bounds, spec.engine.replicas
    )
    estimate, gpu_s = estimated or (None, None)
    infos = []
    shards = arrangement.shard_groups()
    all_parts = _write_files(spec, requests, arrangement, shards, scratch, take_out, first_id)
    num_prefill_tokens = cut.num_prefill_tokens.tolist()
    for shard_idx, (groups, num_parts) in enumerate(zip(shards, all_parts, strict=True)):
        placement = None
        if replicas is not None:
            begin, end = arrangement.group_bounds[shard_idx : shard_idx + 2]
            costs = np.add.reduceat(cut.costs[groups.member_idxs], groups.offsets[:-1])
            placement = replicas.place(
                groups, requests.lengths, decode_tokens, costs, first_id + np.arange(begin, end)
            )
            if placement is not None and placement.measure:  # one shard's run measures
                replicas = replace(replicas, wants_profile=False)
        infos.append(
            ShardInfo(
                file=shard_file(shard_idx),
                num_groups=len(groups),
                num_requests=groups.num_prompts,
                num_rows=int(requests.num_rows[groups.member_idxs].sum()),
                num_parts=num_parts,
                num_prefill_tokens=num_prefill_tokens[shard_idx],
                predicted_gpu_s=None if gpu_s is None else float(gpu_s[shard_idx]),
                replicas=placement,
            )
        )
    return WrittenShards(tuple(infos), estimate)


def _write_files(
    spec: JobSpec,
    requests: Requests,
    arrangement: Arrangement,
    shards: Sequence[PrefixGroups],
    scratch: Path,
    take_out: TakeOut | None,
    first_id: int,
) -> list[int]:
    """Write the groups of each shard to its file; returns the number of parts of each."""
    cut, first_groups = arrangement.cut, arrangement.group_bounds
    one_at_a_time, stopped = Lock(), Event()

    def written(num_requests: int) -> None:
        if stopped.is_set():
            raise CancelledError
        with one_at_a_time:
            progress.advance(num_requests)

    def write(shard_idx: int) -> int:
        shard = shards[shard_idx]
        return write_shard(
            scratch / shard_file(shard_idx),
            requests,
            request_idx_start=first_id + int(cut.bounds[shard_idx]),
            request_idxs=shard.member_idxs,
            group_ids=first_id
            + np.repeat(np.arange(len(shard)) + first_groups[shard_idx], shard.sizes),
            num_prefix_tokens=np.repeat(shard.num_prefix_tokens, shard.sizes),
            num_output_tokens=arrangement.output_tokens[shard.member_idxs],
            part_rows=spec.planner.part_rows,
            take_out=take_out,
            written=written,
        )

    with (
        Progress("write shards", len(requests), unit="requests", announce=False) as progress,
        ThreadPoolExecutor(_AT_ONCE, "batchllm-shards") as threads,
    ):
        files = [threads.submit(write, shard_idx) for shard_idx in range(len(shards))]
        try:
            ended, _ = wait(files, return_when=FIRST_EXCEPTION)
            for file in ended:
                file.result()
        except BaseException:
            stopped.set()  # the other one ends with its part
            threads.shutdown(wait=False, cancel_futures=True)
            raise
        return [file.result() for file in files]
