"""Finds the single-level prefixes that save most, in trees of any depth.

A choice is a set of *cuts*: inner nodes whose path from the root becomes a group's prefix.
A prompt uses one cut at most, and the deepest above it is its best, so a choice saves

    sum over prompts of depth(deepest cut above) - sum over cuts of depth(cut).

Prefixes that end inside an edge can be ignored: their groups share the whole edge.

Let F_v(d) be the most that the subtree of v contributes if the deepest cut above v has
depth d (0 for none), and G_v(d) the sum of F_c(d) over v's children c. Then

    F_leaf(d) = d
    F_v(d)    = max(G_v(d), G_v(depth(v)) - depth(v))       for d = 0, 1, ..., depth(parent of v)

where the second term, a constant, is for v being cut. By induction each F_v is convex and
non-decreasing: a line is, a sum of such functions is, and so is their maximum with a constant.
Hence each node has a threshold: cutting it pays for all d up to the threshold, and for none
above. From the root down, thresholds give the cuts.

A convex function is stored as its value and slope at 0 and the points where its slope rises. Values
and points are whole numbers, so nothing is rounded: the maximum with a constant replaces all points
that it covers by a flat start, with two new points at its end. The nodes with only some children
seen are on one path, so their functions are a stack, and so are all points: those of a node are the
ones of its children, sorted when it is closed. A node has at most as many as its prefix has tokens.
"""

from typing import NamedTuple

import numpy as np

from batchllm_operator.prefixes.algorithm1 import PrefixGroups, maximize_reuse
from batchllm_operator.prefixes.jit import Int64s, compiled
from batchllm_operator.prefixes.prefix_tree import ROOT, PrefixTree

_NONE = -1

# Columns of a function on the stack, whose points go on to the next one's.
_NODE, _VALUE, _SLOPE, _FIRST = range(4)


def cut_exactly(tree: PrefixTree) -> tuple[Int64s, int]:
    """Finds the single-level prefixes that save most, without recursion.

    Returns:
        [num_nodes] int64, the deepest cut at or above each node, `ROOT` for none; and the logical -
        processed prefill tokens. A leaf is never a cut, each cut is the deepest one above at least
        two leaves, and none of them is superfluous.
    """
    threshold, num_saved_tokens = _thresholds(tree.parent, tree.depth)
    return _descend(tree.parent, tree.depth, threshold), int(num_saved_tokens)


class PrefixChoice(NamedTuple):
    """The chosen groups, and the prefill tokens that both ways to choose save: the best no less."""

    groups: PrefixGroups
    algorithm_1_saved_tokens: int
    exact_saved_tokens: int


def choose_prefixes(tree: PrefixTree) -> PrefixChoice:
    """Reduces the tree's many levels of prefixes to one.

    Takes the exact choice (`cut_exactly`) if it saves more, else the paper's (`maximize_reuse`).
    Both are always computed, so that both savings can be reported.
    """
    groups = maximize_reuse(tree)
    saved = int(((groups.sizes - 1) * groups.num_prefix_tokens).sum())
    cut, exact_saved = cut_exactly(tree)
    if exact_saved > saved:
        cut_of_rank = cut[tree.leaves]
        groups = PrefixGroups.below(tree, np.where(cut_of_rank == ROOT, tree.leaves, cut_of_rank))
    return PrefixChoice(groups, saved, exact_saved)


@compiled
def _descend(parent: Int64s, depth: Int64s, threshold: Int64s) -> Int64s:
    cut = np.full(len(parent), ROOT, dtype=np.int64)
    for node in range(1, len(parent)):
        above = cut[parent[node]]
        cut[node] = node if depth[above] <= threshold[node] else above
    return cut


@compiled
def _thresholds(parent: Int64s, depth: Int64s) -> tuple[Int64s, int]:
    """The largest depth of the cut above at which cutting each node pays, -1 for never.

    Returns:
        [num_nodes] int64; and what the best choice saves.
    """
    threshold = np.full(len(parent), _NONE, dtype=np.int64)
    functions = np.zeros((len(parent), 4), dtype=np.int64)
    at = np.empty(2 * len(parent), dtype=np.int64)  # where slopes rise
    by = np.empty(2 * len(parent), dtype=np.int64)
    num_points, top = 0, -1
    for node in range(len(parent) - 1, ROOT, -1):  # reverse preorder: children first
        above = parent[node]
        if top >= 0 and functions[top, _NODE] == node:
            threshold[node], num_points = _close_node(
                functions[top], at, by, num_points, depth[node], depth[above]
            )
            functions[top, _NODE] = above
            if top > 0 and functions[top - 1, _NODE] == above:
                functions[top - 1, _VALUE] += functions[top, _VALUE]
                functions[top - 1, _SLOPE] += functions[top, _SLOPE]
                top -= 1
        else:  # a leaf: the line of slope 1
            if top < 0 or functions[top, _NODE] != above:
                top += 1
                functions[top, _NODE], functions[top, _FIRST] = above, num_points
                functions[top, _VALUE], functions[top, _SLOPE] = 0, 0
            functions[top, _SLOPE] += 1
    return threshold, functions[0, _VALUE]


@compiled
def _close_node(
    function: Int64s, at: Int64s, by: Int64s, num_points: int, depth: int, depth_above: int
) -> tuple[int, int]:
    """Turns G of the last node into its F; returns its threshold and the number of points left."""
    first = function[_FIRST]
    own_at, own_by = at[first:num_points], by[first:num_points]
    if np.any(own_at[1:] < own_at[:-1]):
        order = np.argsort(own_at)
        own_at[:], own_by[:] = own_at[order], own_by[order]
    if_cut = function[_VALUE] + function[_SLOPE] * depth + (own_by * (depth - own_at)).sum() - depth
    kept = np.searchsorted(own_at, depth_above)  # the function ends there
    position, value, slope = 0, function[_VALUE], function[_SLOPE]
    if value >= if_cut:
        return _NONE, first + kept
    covered = 0
    while covered < kept:
        value_there = value + slope * (own_at[covered] - position)
        if value_there >= if_cut:
            break
        position, value = own_at[covered], value_there
        slope += own_by[covered]
        covered += 1
    function[_VALUE], function[_SLOPE] = if_cut, 0
    if value + slope * (depth_above - position) < if_cut:
        return depth_above, first
    last = position + (if_cut - value - 1) // slope  # the last position below the constant
    first_rise = value + slope * (last + 1 - position) - if_cut
    rest_at, rest_by = own_at[covered:kept].copy(), own_by[covered:kept].copy()
    num_points = first
    for new_at, new_by in ((last, first_rise), (last + 1, slope - first_rise)):
        if new_by > 0:
            at[num_points], by[num_points] = new_at, new_by
            num_points += 1
    end = num_points + len(rest_at)
    at[num_points:end], by[num_points:end] = rest_at, rest_by
    return last, end
