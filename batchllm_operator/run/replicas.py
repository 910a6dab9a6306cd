"""Turns a plan's placement into the replicas' joint work, for the remaining parts."""

from __future__ import annotations

import logging

from batchllm_operator.engine import ChainedGroup, ChainJob
from batchllm_operator.engine.replicas.chain_profile import chain_subject
from batchllm_operator.run.shard_work import ShardWork
from batchllm_operator.spec import JobSpec
from batchllm_operator.stored_plan.manifest import ReplicaPlacement
from batchllm_operator.stored_plan.profiles import StoredProfiles
from batchllm_operator.vllm_plugin.runahead.plan import RunaheadGroup

_log = logging.getLogger(__name__)


def chain_job(
    spec: JobSpec,
    placement: ReplicaPlacement,
    work: ShardWork,
    profiles: StoredProfiles,
) -> ChainJob | None:
    """The prefixes that replicas compute together, and whether to measure the link, or None.

    `spec` has the GPUs of this run. Groups without remaining requests in `work` are left out.
    """
    if not (placement.num_chained or placement.measure):
        return None
    if (reason := spec.reason_against_chains) is not None:
        _log.warning("replicas compute no prefix together: %s", reason)
        return None
    sizes = work.sizes
    groups = tuple(
        ChainedGroup(
            RunaheadGroup(
                group.group_id, work.first_prompt(group.group_id)[: sum(group.split)], group.split
            ),
            sizes[group.group_id],
        )
        for group in placement.spread
        if group.split and group.group_id in sizes
    )
    if not groups and not placement.measure:
        return None
    keep = profiles.keep if placement.measure else None
    return ChainJob(groups, keep, chain_subject(spec))
