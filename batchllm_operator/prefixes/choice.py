"""Chooses the level of prefixes for the groups: by Algorithm 1 or exactly."""

from __future__ import annotations

from dataclasses import dataclass

from batchllm_operator.prefixes.algorithm1 import PrefixGroups, maximize_reuse
from batchllm_operator.prefixes.exact import cut_exactly
from batchllm_operator.prefixes.search.prefix_tree import PrefixTree


@dataclass(frozen=True, slots=True, eq=False)
class PrefixChoice:
    """The chosen groups, and the savings of both ways to choose.

    Attributes:
        groups: the chosen groups.
        algorithm_1_saved_tokens: logical - processed prefill tokens by Algorithm 1.
        exact_saved_tokens: the same for the best choice; never less.
    """

    groups: PrefixGroups
    algorithm_1_saved_tokens: int
    exact_saved_tokens: int


def choose_prefixes(tree: PrefixTree) -> PrefixChoice:
    """Reduces the tree's many levels of prefixes to one.

    Takes the exact choice (`cut_exactly`) if it saves more, else the paper's (`maximize_reuse`).
    Both are always computed, so that both savings can be reported.
    """
    groups, exact = maximize_reuse(tree), cut_exactly(tree)
    saved = int(((groups.sizes - 1) * groups.num_prefix_tokens).sum())
    chosen = groups if saved == exact.num_saved_tokens else exact.groups()
    return PrefixChoice(chosen, saved, exact.num_saved_tokens)
