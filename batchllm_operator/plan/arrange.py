"""From requests to shards: chooses groups, their shards and their order."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Final

import numpy as np
import numpy.typing as npt

from batchllm_operator.plan.cut import Cut
from batchllm_operator.plan.estimate import Target
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
