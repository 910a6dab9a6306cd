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
that it covers by a flat start, with two new points at its end. Points are added and removed at both
ends only, in a pair of mergeable heaps, and each is removed once. The time is O(n log n) for n
nodes of any depth; memory holds the points, and the sums of the nodes on one path.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from batchllm_operator.prefixes.algorithm1 import PrefixGroups, maximize_reuse
from batchllm_operator.prefixes.jit import compiled
from batchllm_operator.prefixes.prefix_tree import ROOT, PrefixTree

_NONE = -1

# Columns of a function on the stack; its heaps hold the same points.
_NODE, _VALUE, _SLOPE, _RISE, _MOMENT, _LOWEST, _HIGHEST = range(7)
# Columns of a point: where the slope rises, by how much (0: removed), and the heaps' links.
_AT, _BY, _LOW_LEFT, _HIGH_LEFT = 0, 1, 2, 4
_POINT_COLUMNS = 6


def cut_exactly(tree: PrefixTree) -> tuple[NDArray[np.int64], int]:
    """Finds the single-level prefixes that save most, without recursion.

    Returns:
        [num_nodes] int64, the deepest cut at or above each node, `ROOT` for none; and the logical -
        processed prefill tokens. A leaf is never a cut, each cut is the deepest one above at least
        two leaves, and none of them is superfluous.
    """
    threshold, num_saved_tokens = _thresholds(tree.parent, tree.depth)
    return _descend(tree.parent, tree.depth, threshold), int(num_saved_tokens)


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
    groups = maximize_reuse(tree)
    saved = int(((groups.sizes - 1) * groups.num_prefix_tokens).sum())
    cut, exact_saved = cut_exactly(tree)
    if exact_saved > saved:
        cut_of_rank = cut[tree.leaves]
        groups = PrefixGroups.below(tree, np.where(cut_of_rank == ROOT, tree.leaves, cut_of_rank))
    return PrefixChoice(groups, saved, exact_saved)


@compiled
def _descend(
    parent: NDArray[np.int64], depth: NDArray[np.int64], threshold: NDArray[np.int64]
) -> NDArray[np.int64]:
    cut = np.full(len(parent), ROOT, dtype=np.int64)
    for node in range(1, len(parent)):
        above = cut[parent[node]]
        cut[node] = node if depth[above] <= threshold[node] else above
    return cut


@compiled
def _thresholds(
    parent: NDArray[np.int64], depth: NDArray[np.int64]
) -> tuple[NDArray[np.int64], int]:
    """The largest depth of the cut above at which cutting each node pays, -1 for never.

    In reverse preorder, the nodes with only some children seen are on one path, so their sums G
    are a stack.
    """
    threshold = np.full(len(parent), _NONE, dtype=np.int64)
    sums = np.zeros((64, 7), dtype=np.int64)
    points = np.zeros((64, _POINT_COLUMNS), dtype=np.int64)
    num_points, top = 0, -1
    for node in range(len(parent) - 1, ROOT, -1):
        above = parent[node]
        if top >= 0 and sums[top, _NODE] == node:
            if num_points + 2 > len(points):
                points = _doubled(points)
            threshold[node], num_points = _close_node(
                sums[top], points, num_points, depth[node], depth[above]
            )
            if top > 0 and sums[top - 1, _NODE] == above:
                _add_function(sums[top - 1], sums[top], points)
                top -= 1
            else:
                sums[top, _NODE] = above
        elif top >= 0 and sums[top, _NODE] == above:  # a leaf: the line of slope 1
            sums[top, _SLOPE] += 1
        else:
            top += 1
            if top == len(sums):
                sums = _doubled(sums)
            _set_constant(sums[top], 0)
            sums[top, _NODE], sums[top, _SLOPE] = above, 1
    return threshold, sums[0, _VALUE]


@compiled
def _close_node(
    function: NDArray[np.int64],
    points: NDArray[np.int64],
    num_points: int,
    depth: int,
    depth_above: int,
) -> tuple[int, int]:
    """Turns G of a node into its F in place; returns its threshold and the number of points."""
    if_cut = _value_at_end(function, depth) - depth
    _drop_points_from(function, points, depth_above)
    if function[_VALUE] >= if_cut:
        return _NONE, num_points
    if _value_at_end(function, depth_above) < if_cut:
        _set_constant(function, if_cut)
        return depth_above, num_points

    position, value, slope = 0, function[_VALUE], function[_SLOPE]
    while True:
        point = _end_point(function, _LOWEST, points)
        if point == _NONE:
            break
        value_there = value + slope * (points[point, _AT] - position)
        if value_there >= if_cut:
            break
        position, value = points[point, _AT], value_there
        slope += points[point, _BY]
        _remove_point(function, points, point)
    last = position + (if_cut - value - 1) // slope  # the last position below the constant
    first_rise = value + slope * (last + 1 - position) - if_cut
    function[_VALUE], function[_SLOPE] = if_cut, 0
    num_points = _add_point(function, points, num_points, last, first_rise)
    num_points = _add_point(function, points, num_points, last + 1, slope - first_rise)
    return last, num_points


@compiled
def _value_at_end(function: NDArray[np.int64], position: int) -> int:
    """Value at a position after all points."""
    slope = function[_SLOPE] + function[_RISE]
    value: int = function[_VALUE] + slope * position - function[_MOMENT]
    return value


@compiled
def _set_constant(function: NDArray[np.int64], value: int) -> None:
    function[_VALUE], function[_SLOPE] = value, 0
    function[_RISE], function[_MOMENT] = 0, 0
    function[_LOWEST], function[_HIGHEST] = _NONE, _NONE


@compiled
def _add_function(
    target: NDArray[np.int64], other: NDArray[np.int64], points: NDArray[np.int64]
) -> None:
    """Adds another function to `target`, which takes its points."""
    target[_VALUE] += other[_VALUE]
    target[_SLOPE] += other[_SLOPE]
    target[_RISE] += other[_RISE]
    target[_MOMENT] += other[_MOMENT]
    for heap in (_LOWEST, _HIGHEST):
        target[heap] = _merged(points, heap, target[heap], other[heap])


@compiled
def _add_point(
    function: NDArray[np.int64], points: NDArray[np.int64], point: int, position: int, rise: int
) -> int:
    """Makes `point`, the next unused one, a rise of the slope; returns the next unused one."""
    if rise == 0:
        return point
    points[point, _AT], points[point, _BY] = position, rise
    points[point, _LOW_LEFT:] = _NONE
    function[_RISE] += rise
    function[_MOMENT] += rise * position
    for heap in (_LOWEST, _HIGHEST):
        function[heap] = _merged(points, heap, function[heap], point)
    return point + 1


@compiled
def _remove_point(function: NDArray[np.int64], points: NDArray[np.int64], point: int) -> None:
    """Removes a point's rise; its heaps drop it once it is at their end."""
    function[_RISE] -= points[point, _BY]
    function[_MOMENT] -= points[point, _BY] * points[point, _AT]
    points[point, _BY] = 0


@compiled
def _drop_points_from(
    function: NDArray[np.int64], points: NDArray[np.int64], position: int
) -> None:
    """Removes all points from `position` on: the function ends there."""
    while True:
        point = _end_point(function, _HIGHEST, points)
        if point == _NONE or points[point, _AT] < position:
            return
        _remove_point(function, points, point)


@compiled
def _end_point(function: NDArray[np.int64], heap: int, points: NDArray[np.int64]) -> int:
    """The lowest or highest point, -1 if there is none."""
    left = _LOW_LEFT if heap == _LOWEST else _HIGH_LEFT
    while function[heap] != _NONE and points[function[heap], _BY] == 0:
        removed = function[heap]
        function[heap] = _merged(points, heap, points[removed, left], points[removed, left + 1])
    point: int = function[heap]
    return point


@compiled
def _merged(points: NDArray[np.int64], heap: int, one: int, other: int) -> int:
    """Root of two merged skew heaps, in O(log n) amortized: merges the right edges, swapping."""
    left = _LOW_LEFT if heap == _LOWEST else _HIGH_LEFT
    sign = 1 if heap == _LOWEST else -1
    root, hook = _NONE, _NONE
    while one != _NONE and other != _NONE:
        if sign * points[other, _AT] < sign * points[one, _AT]:
            one, other = other, one
        if hook == _NONE:
            root = one
        else:
            points[hook, left] = one
        rest = points[one, left + 1]
        points[one, left + 1] = points[one, left]
        hook, one = one, rest
    last = other if one == _NONE else one
    if hook == _NONE:
        return last
    points[hook, left] = last
    return root


@compiled
def _doubled(rows: NDArray[np.int64]) -> NDArray[np.int64]:
    """The rows, with room for as many more."""
    larger = np.zeros((2 * len(rows), rows.shape[1]), dtype=np.int64)
    larger[: len(rows)] = rows
    return larger
