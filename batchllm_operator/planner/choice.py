"""Which level of prefixes becomes the groups: Algorithm 1's choice or the exact one."""

from __future__ import annotations

from dataclasses import dataclass

from batchllm_operator.planner.algorithm1 import PrefixGroups, maximize_reuse
from batchllm_operator.planner.exact import cut_exactly
from batchllm_operator.planner.prefixes.prefix_tree import PrefixTree


@dataclass(frozen=True, slots=True, eq=False)
class PrefixChoice:
    """Groups, and what either way of choosing them saves.

    Attributes:
        groups: the groups that were chosen.
        algorithm_1_saved_tokens: logical - processed prefill tokens by Algorithm 1.
        exact_saved_tokens: the same for the best choice that there is; never less.
    """

    groups: PrefixGroups
    algorithm_1_saved_tokens: int
    exact_saved_tokens: int


def choose_prefixes(tree: PrefixTree) -> PrefixChoice:
    """Reduces the tree's many levels of prefixes to one.

    The exact choice (`cut_exactly`) where it saves more, and the paper's (`maximize_reuse`) where
    they save the same. Both are always worked out, so that both savings can be reported.
    """
    groups, exact = maximize_reuse(tree), cut_exactly(tree)
    saved = int(((groups.sizes - 1) * groups.num_prefix_tokens).sum())
    chosen = groups if saved == exact.num_saved_tokens else exact.groups()
    return PrefixChoice(chosen, saved, exact.num_saved_tokens)
