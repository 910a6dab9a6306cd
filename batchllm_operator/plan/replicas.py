"""Divides each shard between the replicas of a run: groups to spread, and groups to begin first.

Predictions and choice are those of `planner.runahead` (ADR 23). ADR 24 says how a run uses them.
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
from batchllm_operator.runahead.planning import (
    Chain,
    GroupLoad,
    Link,
    Placement,
    PlacementSettings,
    ReplicaCost,
    choose_placement,
)
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
        chain: replicas and links.
        settings: how many replicas, and when a chain is worth it.
        is_measured: whether the link's rate is known; else the chain's is ideal.
        wants_profile: whether a run should measure if a chain could pay.
    """

    chain: Chain
    settings: PlacementSettings
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
        limits = target.limits
        step = max(limits.max_num_batched_tokens - _SPARE_STEP_TOKENS, 1)
        block_size = engine.block_size or _BLOCK_SIZE
        settings = PlacementSettings(engine.replicas, max_num_seqs=limits.max_num_seqs)
        if not can_chain or step < block_size:
            settings = PlacementSettings(
                engine.replicas, min_prefix_tokens=1 << 62, max_num_seqs=limits.max_num_seqs
            )
            step = max(step, block_size)
        return cls(
            Chain(cost, Link(bytes_per_s or _IDEAL_BYTES_PER_S), block_size, step),
            settings,
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
        settings = self.settings
        even_share = float(costs.sum()) / settings.num_replicas
        if len(groups) == 0 or float(costs.max()) <= settings.margin * even_share:
            return None
        apart = np.sort(np.argsort(-costs, kind="stable")[:_MOST_APART])
        loads = _loads(groups, lengths, output_tokens)
        named = [loads.group(at) for at in apart.tolist()]
        self._warn_of_long_prefix(max(group.prefix_tokens for group in named))
        rest = np.setdiff1d(np.arange(len(groups)), apart)
        placement = choose_placement([*named, *loads.lumps(rest)], self.chain, settings)
        splits: dict[int, tuple[int, ...]] = {}
        if self.is_measured:
            splits = dict(zip(placement.runahead_idxs, placement.splits, strict=True))
        makespan_s = placement.makespan_s
        if not splits:
            recomputed, makespan_s = self._recomputed(placement)
            idxs = (idx for idx in recomputed if idx < len(apart) and named[idx].num_members > 1)
            splits = dict.fromkeys(idxs, ())
        spread = {int(group_ids[apart[idx]]): split for idx, split in splits.items()}
        large = apart[costs[apart] > settings.margin * even_share]
        longest_first = group_ids[large[np.argsort(-costs[large], kind="stable")]].tolist()
        whole = [each for each in longest_first if each not in spread]
        return ReplicaPlacement(
            num_replicas=settings.num_replicas,
            spread=tuple(SpreadGroup(group_id=each, split=spread[each]) for each in spread),
            whole_first=tuple(whole[:_MOST_FIRST]),
            makespan_s=rounded(makespan_s),
            without_chains_s=rounded(placement.without_s),
            measure=self.wants_profile and bool(placement.runahead_idxs),
        )

    def _warn_of_long_prefix(self, longest: int) -> None:
        """Warn that a shard's longest prefix doesn't fit into the replicas' steps."""
        chain, p = self.chain, self.settings.num_replicas
        most = (chain.max_chunk_blocks or 0) * p * chain.block_size
        if self.settings.min_prefix_tokens <= longest and longest > most:
            _log.info(
                "a prefix of %d tokens isn't computed by all replicas together: each computes at"
                " most %d in a step; raise engine.max_num_batched_tokens",
                longest,
                most // p,
            )

    def _recomputed(self, placement: Placement) -> tuple[tuple[int, ...], float]:
        """Groups to spread without a chain, if that gains enough, and the makespan."""
        if placement.without_s > placement.whole_group_s * (1 - self.settings.margin):
            return (), placement.whole_group_s
        return placement.recompute_idxs, placement.without_s


@dataclass(frozen=True, slots=True, eq=False)
class _Loads:
    """Token and member counts, each [num_groups]."""

    prefix: npt.NDArray[np.int64]
    """Tokens of the prefix; in a group of one, of the prompt without its last token."""
    members: npt.NDArray[np.int64]
    distinct: npt.NDArray[np.int64]
    """Tokens of all members after the prefix."""
    outputs: npt.NDArray[np.int64]
    """Output tokens of all members."""

    def group(self, at: int) -> GroupLoad:
        members = int(self.members[at])
        return GroupLoad(
            prefix_tokens=max(int(self.prefix[at]), 1),
            num_members=members,
            distinct_tokens=round(int(self.distinct[at]) / members),
            output_tokens=round(int(self.outputs[at]) / members),
        )

    def lumps(self, idxs: npt.NDArray[np.int64]) -> list[GroupLoad]:
        """Many small groups as a few loads with as many tokens."""
        lumps = []
        for lump in (idxs[at::_LUMPS] for at in range(min(_LUMPS, len(idxs)))):
            members = int(self.members[lump].sum())
            tokens = int((self.prefix[lump] + self.distinct[lump]).sum())
            outputs = int(self.outputs[lump].sum())
            lumps.append(GroupLoad(1, members, round(tokens / members), round(outputs / members)))
        return lumps


def _loads(
    groups: PrefixGroups, lengths: npt.NDArray[np.int64], output_tokens: npt.NDArray[np.int64]
) -> _Loads:
    starts, sizes = groups.offsets[:-1], groups.sizes
    prompts = np.add.reduceat(lengths[groups.member_idxs], starts)
    outputs = np.add.reduceat(output_tokens[groups.member_idxs].astype(np.int64), starts)
    prefix = np.where(sizes == 1, np.maximum(prompts - 1, 0), groups.num_prefix_tokens)
    return _Loads(prefix, sizes, prompts - sizes * prefix, outputs)


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
