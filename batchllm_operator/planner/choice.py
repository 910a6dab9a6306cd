"""Which level of prefixes becomes the groups: Algorithm 1's choice or the exact one."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from batchllm_operator.errors import PlanError
from batchllm_operator.planner.algorithm1 import PrefixGroups, maximize_reuse
from batchllm_operator.planner.exact import cut_exactly
from batchllm_operator.planner.prefixes.prefix_tree import PrefixTree

Method = Literal["auto", "algorithm_1", "exact"]


@dataclass(frozen=True, slots=True, eq=False)
class PrefixChoice:
    """Groups, and what either way of choosing them saves.

    Attributes:
        groups: the groups that were chosen.
        method: whose they are.
        algorithm_1_saved_tokens: logical - processed prefill tokens by Algorithm 1.
        exact_saved_tokens: the same for the best choice that there is; never less.
    """

    groups: PrefixGroups
    method: Literal["algorithm_1", "exact"]
    algorithm_1_saved_tokens: int
    exact_saved_tokens: int


def choose_prefixes(tree: PrefixTree, method: Method = "auto") -> PrefixChoice:
    """Reduces the tree's many levels of prefixes to one.

    Both ways are always worked out, so that both savings can be reported.

    Args:
        tree: the prompts' tree.
        method: "algorithm_1", the paper's (`maximize_reuse`); "exact", the largest saving
            (`cut_exactly`); "auto", the exact choice where it saves more and the paper's
            where they save the same.

    Raises:
        PlanError: there is no such method.
    """
    if method not in ("auto", "algorithm_1", "exact"):
        raise PlanError(f"prefixes are chosen by auto, algorithm_1 or exact, not {method!r}")
    groups = maximize_reuse(tree)
    exact = cut_exactly(tree)
    saved = int(((groups.sizes - 1) * groups.num_prefix_tokens).sum())
    if method == "algorithm_1" or (method == "auto" and saved == exact.num_saved_tokens):
        return PrefixChoice(groups, "algorithm_1", saved, exact.num_saved_tokens)
    return PrefixChoice(exact.groups(), "exact", saved, exact.num_saved_tokens)
