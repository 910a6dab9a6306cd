"""Describes the sharing of prefixes for people: distributions, and the groups that save most."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Annotated, Any, Final

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field, model_validator

from batchllm_operator.prefixes.algorithm1 import PrefixGroups
from batchllm_operator.prefixes.jit import Int64s
from batchllm_operator.prefixes.prefix_tree import ROOT, PrefixTree
from batchllm_operator.prefixes.requests import Requests

_NUM_GROUPS: Final = 10
_NUM_WORD_TOKENS: Final = 40
_MAX_CHARS: Final = 160
_HALF: Final = "\N{REPLACEMENT CHARACTER} "
_LONGEST_COMMON: Final = 4096
"""Most tokens of the LCP of all largest groups."""

_NUM_NODES: Final = 128
_MOST_EDGES: Final = 65

_Count = Annotated[int, Field(ge=0, lt=1 << 63)]
Decode = Callable[[Sequence[int]], str]


class _Frozen(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Histogram(_Frozen):
    """Counts by size, in half-open bins; each ends where the next begins."""

    edges: tuple[_Count, ...]
    """Ascending, one more than bins; empty without counts."""
    counts: tuple[_Count, ...]

    @model_validator(mode="after")
    def _check_bins(self) -> Histogram:
        if len(self.counts) != max(0, len(self.edges) - 1) or len(self.edges) == 1:
            raise ValueError("a histogram has one more edge than bins")
        if len(self.edges) > _MOST_EDGES or any(a >= b for a, b in pairwise(self.edges)):
            raise ValueError("edges of a histogram ascend, and are few")
        return self

    @classmethod
    def of(cls, sizes: Int64s, weights: Int64s | None = None) -> Histogram:
        """Count sizes of at least 1 in bins between powers of two.

        Args:
            sizes: int64 [num_sizes].
            weights: int64 [num_sizes], how often each counts; once by default.
        """
        if len(sizes) == 0:
            return cls(edges=(), counts=())
        # frexp is exact, log2 is rounded: 2**k - 1 must stay below 2**k.
        exponents = np.frexp(sizes.astype(np.float64))[1] - 1
        low, high = int(exponents.min()), int(exponents.max())
        counts = np.zeros(high - low + 1, dtype=np.int64)
        np.add.at(counts, exponents - low, 1 if weights is None else weights)
        edges = tuple(1 << exponent for exponent in range(low, high + 2))
        return cls(edges=edges, counts=tuple(counts.tolist()))


class LargeGroup(_Frozen):
    """One of the groups that save most."""

    num_requests: _Count
    num_prefix_tokens: _Count
    num_saved_tokens: _Count
    """Prefix tokens that all requests after the first needn't compute."""
    first_words: str
    """The beginning of its prefix, decoded and clipped. An ellipsis stands for the LCP of all
    these groups (mostly an instruction)."""


class TreeNode(_Frozen):
    """A node of the prefix tree: tokens that several requests have in the same place."""

    level: _Count
    """Nodes above it; 0 for the root, which has no tokens."""
    num_requests: _Count
    num_tokens: _Count
    """Its own, after those of the nodes above it."""
    num_saved_tokens: _Count
    """Of it and all nodes below it, drawn or not: each token once for each request but one."""

    @property
    def num_own_saved_tokens(self) -> int:
        return max(0, self.num_requests - 1) * self.num_tokens


class PlanSharing(_Frozen):
    """The sharing in a plan."""

    prefix_lengths: Histogram
    """Groups of at least two requests, by the tokens of their prefix."""
    share_degrees: Histogram
    """Requests, by how many share their group's prefix; 1 for those that share none."""
    largest_groups: tuple[LargeGroup, ...]
    """The most saved tokens first; at most ten."""
    tree: tuple[TreeNode, ...] = Field(default=(), max_length=_NUM_NODES)
    """The 128 nodes at and below which most is saved, each after the one above it."""

    @model_validator(mode="after")
    def _check_tree(self) -> PlanSharing:
        levels = [node.level for node in self.tree]
        if any(levels[:1]) or any(not 0 < low <= high + 1 for high, low in pairwise(levels)):
            raise ValueError("nodes of a tree follow the one above them")
        return self


def merged(parts: Sequence[PlanSharing]) -> PlanSharing:
    """The sharing of a plan from that of its parts, which have no group in common."""
    largest = [group for part in parts for group in part.largest_groups]
    largest.sort(key=lambda group: -group.num_saved_tokens)  # stable: of equals, the first
    return PlanSharing(
        prefix_lengths=_added([part.prefix_lengths for part in parts]),
        share_degrees=_added([part.share_degrees for part in parts]),
        largest_groups=tuple(largest[:_NUM_GROUPS]),
        tree=_merged_trees([part.tree for part in parts if part.tree]),
    )


def _merged_trees(trees: Sequence[tuple[TreeNode, ...]]) -> tuple[TreeNode, ...]:
    """The nodes that save most of several trees, under one root."""
    if not trees:
        return ()
    root = TreeNode(
        level=0,
        num_requests=sum(tree[0].num_requests for tree in trees),
        num_tokens=0,
        num_saved_tokens=sum(tree[0].num_saved_tokens for tree in trees),
    )
    nodes = [root, *(node for tree in trees for node in tree[1:])]
    # A node saves less than the one above it, which is therefore among those that save most.
    chosen = sorted(range(1, len(nodes)), key=lambda idx: -nodes[idx].num_saved_tokens)
    return tuple(nodes[idx] for idx in sorted([0, *chosen[: _NUM_NODES - 1]]))


def largest_nodes(tree: PrefixTree) -> tuple[TreeNode, ...]:
    """The inner nodes at and below which most is saved, in preorder; none if nothing is shared."""
    inner = np.flatnonzero(tree.num_leaves > 1)
    if len(inner) < 2:
        return ()
    begin, end, sizes = tree.leaf_begin[inner], tree.leaf_end[inner], tree.num_leaves[inner]
    tokens = tree.depth[inner] - tree.depth[np.maximum(tree.parent[inner], ROOT)]
    saved = np.append(0, np.cumsum((sizes - 1) * tokens))
    below = np.searchsorted(begin, end)  # inner nodes until the first one that isn't below
    saved = saved[below] - saved[:-1]
    # The root comes first: all others save less, or as much if it has a single one below it.
    chosen = np.sort(np.argsort(-saved, kind="stable")[:_NUM_NODES])
    nodes, open_ends = list[TreeNode](), list[int]()
    for idx in chosen.tolist():
        while open_ends and open_ends[-1] <= begin[idx]:
            open_ends.pop()
        nodes.append(
            TreeNode(
                level=len(open_ends),
                num_requests=int(sizes[idx]),
                num_tokens=int(tokens[idx]),
                num_saved_tokens=int(saved[idx]),
            )
        )
        open_ends.append(int(end[idx]))
    return tuple(nodes)


def _added(histograms: Sequence[Histogram]) -> Histogram:
    """The sum of histograms between powers of two."""
    counts: dict[int, int] = {}
    for histogram in histograms:
        for edge, count in zip(histogram.edges, histogram.counts, strict=False):
            counts[edge] = counts.get(edge, 0) + count
    if not counts:
        return Histogram(edges=(), counts=())
    low, high = min(counts).bit_length(), max(counts).bit_length()
    edges = tuple(1 << (bits - 1) for bits in range(low, high + 2))
    return Histogram(edges=edges, counts=tuple(counts.get(edge, 0) for edge in edges[:-1]))


def describe_sharing(
    requests: Requests,
    groups: PrefixGroups,
    decode: Decode,
    tree: tuple[TreeNode, ...] = (),
) -> PlanSharing:
    """Describe the groups of a plan; `decode` turns token ids into text."""
    sizes, lengths = groups.sizes, groups.num_prefix_tokens
    saved = (sizes - 1) * lengths
    # Of equal savings, the first in the plan: equal input gives an equal plan.
    chosen = np.argsort(-saved, kind="stable")[:_NUM_GROUPS]
    chosen = chosen[saved[chosen] > 0]
    prompt_idxs = requests.prompt_idxs[groups.member_idxs[groups.offsets[chosen]]]
    num_shown = np.minimum(lengths[chosen], _LONGEST_COMMON + _NUM_WORD_TOKENS)
    shown = requests.prompts.slices(prompt_idxs, 0, num_shown)
    prefixes = [shown.prompt(number) for number in range(len(shown))]
    num_common = _num_common(prefixes)
    largest = (
        LargeGroup(
            num_requests=int(sizes[group_idx]),
            num_prefix_tokens=int(lengths[group_idx]),
            num_saved_tokens=int(saved[group_idx]),
            first_words=_first_words(prefix, num_common, decode),
        )
        for group_idx, prefix in zip(chosen.tolist(), prefixes, strict=True)
    )
    return PlanSharing(
        prefix_lengths=Histogram.of(lengths[sizes > 1]),
        share_degrees=Histogram.of(sizes, weights=sizes),
        largest_groups=tuple(largest),
        tree=tree,
    )


def _num_common(prefixes: Sequence[NDArray[Any]]) -> int:
    """LCP of several prefixes; 0 if one of them is no longer than that."""
    if len(prefixes) < 2:
        return 0
    shortest = min(map(len, prefixes))
    first = prefixes[0][:shortest]
    differs = np.zeros(shortest, dtype=bool)
    for prefix in prefixes[1:]:
        differs |= prefix[:shortest] != first
    num_common = int(np.argmax(differs)) if differs.any() else shortest
    return num_common if num_common < shortest else 0


def _first_words(prefix: NDArray[Any], num_common: int, decode: Decode) -> str:
    text = decode(prefix[num_common : num_common + _NUM_WORD_TOKENS].tolist())
    # Line breaks and control characters would hide text, and half a surrogate pair isn't storable.
    words = " ".join("".join(c if c.isprintable() else " " for c in text).split())
    words = words.strip(_HALF)  # a token at either end may be half a character
    if len(words) > _MAX_CHARS:
        words = words[: _MAX_CHARS - 1] + "…"
    return f"… {words}" if num_common else words
