"""Marks the groups of each shard whose prefixes the replicas of a run compute together.

ADR 23 has the predictions and the choice; ADR 24 says how a run uses them.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Final

import numpy as np

from batchllm_operator.engine.device_profile import StoredProfiles
from batchllm_operator.errors import PlanError, SpecError
from batchllm_operator.plan.estimate import Target, rounded
from batchllm_operator.prefixes import PrefixGroups
from batchllm_operator.prefixes.jit import Int64s
from batchllm_operator.runahead.groups import ChainProfile, chain_subject
from batchllm_operator.runahead.placement import GroupLoads, choose_placement
from batchllm_operator.runahead.prediction import Chain, ReplicaCost
from batchllm_operator.spec import JobSpec
from batchllm_operator.stored_plan.manifest import ReplicaPlacement, SpreadGroup

_log = logging.getLogger(__name__)
_BLOCK_SIZE: Final = 64
"""Chunks end with such blocks if the spec names no size: a multiple of the engines' defaults."""
_SPARE_STEP_TOKENS: Final = 16
"""Tokens of a step left free beside a chunk, so that another request doesn't cut the chunk."""
_IDEAL_BYTES_PER_S: Final = 1e15
"""Rate of an unmeasured link, to find out whether measuring would be worth it."""


@dataclass(frozen=True, slots=True)
class ReplicaPlanner:
    """Marks groups of shards for the replicas of a run.

    Attributes:
        chain: the replicas.
        max_num_seqs: most requests that run at a time on a replica.
        is_measured: whether the link's rate is known; else the chain's is ideal.
        wants_profile: whether a run should measure if a chain could pay.
    """

    chain: Chain
    max_num_seqs: int
    is_measured: bool
    wants_profile: bool

    @classmethod
    def of(cls, spec: JobSpec, target: Target | None) -> ReplicaPlanner | None:
        """The planner for a spec with several replicas; None if they can't form a chain, or its
        gain can't be predicted.

        Raises `SpecError`: `planner.runahead` is on, and the link's rate or the GPU isn't known.
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
        if planner.runahead == "off" or spec.reason_against_chains is not None or chunk_blocks < 1:
            return None
        cost, measured = _measured(spec, ReplicaCost.of(target.model, target.gpu))
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
                max_chunk_blocks=chunk_blocks,
            ),
            target.limits.max_num_seqs,
            is_measured=bytes_per_s is not None,
            wants_profile=measured is None,
        )

    def place(
        self, groups: PrefixGroups, lengths: Int64s, output_tokens: Int64s, group_ids: Int64s
    ) -> ReplicaPlacement | None:
        """Mark groups of a shard; None if no chain pays.

        Args:
            groups: the shard's groups, over all prompts.
            lengths: int64 [num_prompts], tokens.
            output_tokens: int64 [num_prompts], estimates.
            group_ids: int64 [num_groups], the plan's ids.
        """
        if len(groups) == 0:
            return None
        loads = _loads(groups, lengths, output_tokens)
        longest, most = int(loads.prefix_tokens.max()), self.chain.longest_chunk
        if longest > most * self.chain.num_replicas:
            _log.info(
                "a prefix of %d tokens isn't computed by all replicas together: each computes at"
                " most %d in a step; raise engine.max_num_batched_tokens",
                longest,
                most,
            )
        placement = choose_placement(loads, self.chain, max_num_seqs=self.max_num_seqs)
        if not placement.splits:
            return None
        splits = placement.splits if self.is_measured else {}
        return ReplicaPlacement(
            num_replicas=self.chain.num_replicas,
            spread=tuple(
                SpreadGroup(group_id=int(group_ids[idx]), split=split)
                for idx, split in splits.items()
            ),
            makespan_s=rounded(placement.makespan_s if splits else placement.without_s),
            without_chains_s=rounded(placement.without_s),
            measure=self.wants_profile,
        )


def _loads(groups: PrefixGroups, lengths: Int64s, output_tokens: Int64s) -> GroupLoads:
    """A group of one request has a prefix, too: its prompt without the last token."""
    starts, sizes = groups.offsets[:-1], groups.sizes
    prompts = np.add.reduceat(lengths[groups.member_idxs], starts)
    outputs = np.add.reduceat(output_tokens[groups.member_idxs].astype(np.int64), starts)
    prefix = np.where(sizes == 1, np.maximum(prompts - 1, 0), groups.num_prefix_tokens)
    counts = (prefix, sizes, prompts - sizes * prefix, outputs)
    return GroupLoads(*(count.astype(np.float64) for count in counts))


def _measured(spec: JobSpec, cost: ReplicaCost) -> tuple[ReplicaCost, float | None]:
    """Rates of replicas and link that a run has measured; `cost` and None if none has."""
    profile = StoredProfiles.of(spec).find(ChainProfile, chain_subject(spec))
    if profile is None:
        return cost, None
    try:
        return cost.calibrated(profile.steps), profile.link_bytes_per_s
    except PlanError as error:  # perhaps from a noisy machine
        _log.warning("the measured profile of replicas doesn't count: %s", error)
        return cost, None
