"""Divides each shard between the replicas of a run: groups to spread, and groups to begin first.

ADR 23 has the predictions and the choice; ADR 24 says how a run uses them.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from batchllm_operator.errors import PlanError, SpecError
from batchllm_operator.plan.estimate import Target, rounded
from batchllm_operator.prefixes import PrefixGroups
from batchllm_operator.runahead.placement import MARGIN, GroupLoads, choose_placement
from batchllm_operator.runahead.prediction import Chain, ReplicaCost
from batchllm_operator.runahead.profile import chain_subject
from batchllm_operator.spec import JobSpec
from batchllm_operator.stored_plan.manifest import ReplicaPlacement, SpreadGroup
from batchllm_operator.stored_plan.profiles import StoredProfiles, profiles_folder

_log = logging.getLogger(__name__)
_BLOCK_SIZE: Final = 64
"""Chunks end with such blocks if the spec names no size: a multiple of the engines' defaults."""
_SPARE_STEP_TOKENS: Final = 16
"""Tokens of a step left free beside a chunk, so that another request doesn't cut the chunk."""
_IDEAL_BYTES_PER_S: Final = 1e15
"""Rate of an unmeasured link, to find out whether measuring would be worth it."""
_MOST_APART: Final = 512
"""Largest groups of a shard, placed one by one; smaller ones are lumped together."""
_LUMPS: Final = 64
_MOST_FIRST: Final = 64
"""Most whole groups to begin first."""


@dataclass(frozen=True, slots=True)
class ReplicaPlanner:
    """Places the groups of shards on the replicas of a run.

    Attributes:
        chain: the replicas.
        max_num_seqs: most requests that run at a time on a replica.
        can_chain: whether replicas may compute prefixes together.
        is_measured: whether the link's rate is known; else the chain's is ideal.
        wants_profile: whether a run should measure if a chain could pay.
    """

    chain: Chain
    max_num_seqs: int
    can_chain: bool
    is_measured: bool
    wants_profile: bool

    @classmethod
    def of(cls, spec: JobSpec, target: Target | None) -> ReplicaPlanner | None:
        """The planner for a spec with several replicas; None if nothing can be predicted.

        Raises:
            SpecError: `planner.runahead` is on, and the link's rate or the GPU isn't known.
        """
        engine, planner = spec.engine, spec.planner
        if target is None:
            if planner.runahead == "on":
                raise SpecError(
                    "planner.runahead is on, but what a chain gains can't be predicted: it takes"
                    " planner.target_gpu, and a model whose config.json says its shape"
                )
            return None
        block_size = engine.block_size or _BLOCK_SIZE
        chunk_blocks = (target.limits.max_num_batched_tokens - _SPARE_STEP_TOKENS) // block_size
        can_chain = planner.runahead != "off" and spec.reason_against_chains is None
        cost, measured = ReplicaCost.of(target.model, target.gpu), None
        if can_chain:
            cost, measured = _measured(spec, cost)
        bytes_per_s = planner.link_bytes_per_s or measured
        if planner.runahead == "on" and bytes_per_s is None:
            raise SpecError(
                "planner.runahead is on, but the rate between replicas isn't known: no run with"
                f" {engine.replicas} replicas on {target.gpu.name} has measured it; give"
                " planner.link_bytes_per_s, or leave runahead at auto, with which runs measure"
            )
        return cls(
            Chain(
                cost,
                engine.replicas,
                bytes_per_s or _IDEAL_BYTES_PER_S,
                block_size=block_size,
                max_chunk_blocks=max(chunk_blocks, 1),
            ),
            target.limits.max_num_seqs,
            can_chain=can_chain and chunk_blocks > 0,
            is_measured=bytes_per_s is not None,
            wants_profile=can_chain and measured is None,
        )

    def place(
        self,
        groups: PrefixGroups,
        lengths: npt.NDArray[np.int64],
        output_tokens: npt.NDArray[np.int64],
        costs: npt.NDArray[np.float64],
        group_ids: npt.NDArray[np.int64],
    ) -> ReplicaPlacement | None:
        """Place the groups of a shard; None if their order is good enough.

        Args:
            groups: the shard's groups, over all prompts.
            lengths: int64 [num_prompts], tokens.
            output_tokens: int64 [num_prompts], estimates.
            costs: float64 [num_groups], cost of each on one engine, in any one unit.
            group_ids: int64 [num_groups], the plan's ids.
        """
        least_cost = MARGIN * float(costs.sum()) / self.chain.num_replicas
        if len(groups) == 0 or float(costs.max()) <= least_cost:
            return None
        large = np.sort(np.argsort(-costs, kind="stable")[:_MOST_APART])
        loads = _loads(groups, lengths, output_tokens, large)
        self._warn_of_long_prefix(int(loads.prefix_tokens.max()))
        placement = choose_placement(
            loads, self.chain, max_num_seqs=self.max_num_seqs, can_chain=self.can_chain
        )
        splits, makespan_s = placement.splits, placement.makespan_s
        if not (self.is_measured and splits):
            splits, makespan_s = dict.fromkeys(placement.recompute_idxs, ()), placement.without_s
        spread = {int(group_ids[large[idx]]): split for idx, split in splits.items()}
        slow = large[costs[large] > least_cost]
        longest_first = group_ids[slow[np.argsort(-costs[slow], kind="stable")]].tolist()
        whole = [group_id for group_id in longest_first if group_id not in spread]
        return ReplicaPlacement(
            num_replicas=self.chain.num_replicas,
            spread=tuple(SpreadGroup(group_id=idx, split=split) for idx, split in spread.items()),
            whole_first=tuple(whole[:_MOST_FIRST]),
            makespan_s=rounded(makespan_s),
            without_chains_s=rounded(placement.without_s),
            measure=self.wants_profile and bool(placement.splits),
        )

    def _warn_of_long_prefix(self, longest: int) -> None:
        """Warn that a shard's longest prefix doesn't fit into the replicas' steps."""
        most = self.chain.max_chunk_blocks * self.chain.block_size
        if self.can_chain and longest > most * self.chain.num_replicas:
            _log.info(
                "a prefix of %d tokens isn't computed by all replicas together: each computes at"
                " most %d in a step; raise engine.max_num_batched_tokens",
                longest,
                most,
            )


def _loads(
    groups: PrefixGroups,
    lengths: npt.NDArray[np.int64],
    output_tokens: npt.NDArray[np.int64],
    large: npt.NDArray[np.int64],
) -> GroupLoads:
    """Loads of the large groups, then of lumps of the others, which have no prefix.

    A group of one request has a prefix, too: its prompt without the last token.
    """
    starts, sizes = groups.offsets[:-1], groups.sizes
    prompts = np.add.reduceat(lengths[groups.member_idxs], starts)
    outputs = np.add.reduceat(output_tokens[groups.member_idxs].astype(np.int64), starts)
    prefix = np.where(sizes == 1, np.maximum(prompts - 1, 0), groups.num_prefix_tokens)
    distinct = prompts - sizes * prefix
    small = np.setdiff1d(np.arange(len(groups)), large)
    distinct[small] += prefix[small]
    prefix[small] = 0
    load_of = np.empty(len(groups), dtype=np.int64)
    load_of[large] = np.arange(len(large))
    load_of[small] = len(large) + np.arange(len(small)) % _LUMPS
    per_load = [np.bincount(load_of, weights) for weights in (prefix, sizes, distinct, outputs)]
    return GroupLoads(*(counts.astype(np.float64) for counts in per_load))


def _measured(spec: JobSpec, cost: ReplicaCost) -> tuple[ReplicaCost, float | None]:
    """Rates of replicas and link that a run has measured; `cost` and None if none has."""
    profile = StoredProfiles(profiles_folder(spec)).find_chain(chain_subject(spec))
    if profile is None:
        return cost, None
    try:
        return cost.calibrated(profile.steps), profile.link_bytes_per_s
    except PlanError as error:  # perhaps from a noisy machine
        _log.warning("the measured profile of replicas doesn't count: %s", error)
        return cost, None
