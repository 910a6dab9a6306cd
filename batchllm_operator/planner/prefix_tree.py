"""Compact prefix tree over all prompts of a job (paper, Sec. 4.2 and Fig. 4a).

The tree is grown from the root down. A node's prompts are neighbours in one array of
prompt indexes; the node ends where they stop agreeing, and a stable sort by the next
token puts each child's prompts side by side. A prompt is read about once, and only as far
as it is shared, so the work is linear in the number of shared tokens, however deep the
tree is, plus one small sort per inner node.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from batchllm_operator.errors import PlanError
from batchllm_operator.planner.jit import compiled
from batchllm_operator.planner.token_table import TokenTable

ROOT = 0
_INSERTION_SORT_BELOW = 48  # prompts; a radix pass over 256 counters costs more below this
_FIRST_WINDOW = 16  # tokens
_COMPARE_STRIDE = 16  # tokens compared per branch, so that the compiler can use vectors


@dataclass(frozen=True, slots=True, eq=False)
class PrefixTree:
    """Radix tree in preorder: a parent precedes its children, children ascend by token.

    Node 0 is the root, a dummy without tokens. Each prompt is a leaf: one that ends where
    an inner node ends, and each of several equal prompts, is a leaf without tokens of its
    own. Each inner node but the root has at least two children and at least one token.

    A *rank* is a prompt's position in lexicographic order of token ids, a prompt before
    its extensions, equal prompts by index. Node v covers ranks
    [leaf_begin[v], leaf_end[v]), and v is a leaf if it isn't the root and covers one.

    Attributes:
        prompt_idxs: [num_prompts] int64, the prompt at each rank.
        parent: [num_nodes] int64, -1 for the root.
        depth: [num_nodes] int64, tokens from the root to the node's end.
        leaf_begin: [num_nodes] int64.
        leaf_end: [num_nodes] int64.

    Raises:
        PlanError: the node arrays differ in length, or there is no root.
    """

    prompt_idxs: NDArray[np.int64]
    parent: NDArray[np.int64]
    depth: NDArray[np.int64]
    leaf_begin: NDArray[np.int64]
    leaf_end: NDArray[np.int64]

    def __post_init__(self) -> None:
        sizes = {len(self.parent), len(self.depth), len(self.leaf_begin), len(self.leaf_end)}
        if len(sizes) != 1 or 0 in sizes:
            raise PlanError(f"node arrays of a prefix tree have lengths {sorted(sizes)}")

    @property
    def num_nodes(self) -> int:
        """Nodes, the root and the leaves included: at most 2 * num_prompts + 1."""
        return len(self.parent)

    @property
    def num_prompts(self) -> int:
        return len(self.prompt_idxs)

    @property
    def num_leaves(self) -> NDArray[np.int64]:
        """Prompts below each node: [num_nodes]."""
        return self.leaf_end - self.leaf_begin

    @property
    def leaves(self) -> NDArray[np.int64]:
        """The leaf node of each rank: [num_prompts]."""
        return np.flatnonzero(self.num_leaves[1:] == 1) + 1

    @property
    def num_node_tokens(self) -> NDArray[np.int64]:
        """Tokens of each node itself, without those of its ancestors: [num_nodes]."""
        tokens = self.depth.copy()
        tokens[1:] -= self.depth[self.parent[1:]]
        return tokens

    @property
    def num_shared_with_previous(self) -> NDArray[np.int64]:
        """Tokens that each rank's prompt shares with the one before: [num_prompts]."""
        shared = np.zeros(self.num_prompts + 1, dtype=np.int64)
        # The topmost node that begins at a rank has the parent of this rank and the one
        # before; of several values for one rank, the last is kept.
        shared[self.leaf_begin[:ROOT:-1]] = self.depth[self.parent[:ROOT:-1]]
        return shared[:-1]

    @property
    def num_distinct_prefix_tokens(self) -> int:
        """Tokens to process if every shared token is computed once, on all levels.

        It equals the number of different non-empty prefixes of the prompts, and no plan
        can process fewer: with it, `saving_ratio` gives the multi-level optimum.
        """
        return int(self.num_node_tokens.sum())


def build_prefix_tree(tokens: TokenTable) -> PrefixTree:
    """Finds every common prefix of the prompts.

    The tree doesn't depend on the order of the prompts, except that equal prompts are
    ranked by index. Needs about 110 bytes per prompt beside the table.
    """
    prompt_idxs, parent, depth, leaf_begin, leaf_end = _grow(tokens.token_ids, tokens.offsets)
    return PrefixTree(prompt_idxs, parent, depth, leaf_begin, leaf_end)


@compiled
def _grow(
    token_ids: NDArray[np.int32], offsets: NDArray[np.int64]
) -> tuple[
    NDArray[np.int64], NDArray[np.int64], NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]
]:
    """Preorder walk with a stack of (begin, end, parent) ranges that aren't nodes yet."""
    num_prompts = len(offsets) - 1
    ranked = np.arange(num_prompts)
    branch_keys = np.empty(num_prompts, dtype=np.uint32)
    scratch_idxs = np.empty(num_prompts, dtype=np.int64)
    scratch_keys = np.empty(num_prompts, dtype=np.uint32)
    stack = np.empty((num_prompts + 1, 3), dtype=np.int64)  # ranges on it are disjoint
    parent = np.empty(2 * num_prompts + 1, dtype=np.int64)
    depth = np.empty(2 * num_prompts + 1, dtype=np.int64)
    leaf_begin = np.empty(2 * num_prompts + 1, dtype=np.int64)
    leaf_end = np.empty(2 * num_prompts + 1, dtype=np.int64)

    num_nodes = 0
    stack[0, 0], stack[0, 1], stack[0, 2] = 0, num_prompts, -1
    num_stacked = 1
    while num_stacked > 0:
        num_stacked -= 1
        begin, end, above = stack[num_stacked]
        node = num_nodes
        num_nodes += 1
        parent[node], leaf_begin[node], leaf_end[node] = above, begin, end
        if node == ROOT:
            depth[node] = 0
        elif end - begin == 1:
            depth[node] = offsets[ranked[begin] + 1] - offsets[ranked[begin]]
            continue
        else:  # children of one parent differ in the token after it: one more is shared
            depth[node] = _common_depth(token_ids, offsets, ranked[begin:end], depth[above] + 1)
        keys = branch_keys[begin:end]
        _read_keys(token_ids, offsets, ranked[begin:end], depth[node], keys)
        _sort_by_key(keys, ranked[begin:end], scratch_keys, scratch_idxs)
        num_stacked = _push_children(stack, num_stacked, keys, begin, node)
    return (
        ranked,
        parent[:num_nodes],
        depth[:num_nodes],
        leaf_begin[:num_nodes],
        leaf_end[:num_nodes],
    )


@compiled
def _common_depth(
    token_ids: NDArray[np.int32],
    offsets: NDArray[np.int64],
    idxs: NDArray[np.int64],
    known_depth: int,
) -> int:
    """Tokens that all prompts of `idxs` share, given that they share `known_depth`.

    Looks ahead by windows that double, so that a pair of prompts with much in common costs
    little where a third one has to leave them soon.
    """
    first = offsets[idxs[0]]
    common, window_end = known_depth, known_depth
    window = _FIRST_WINDOW
    while common == window_end:
        window_end = min(common + window, int(offsets[idxs[0] + 1] - first))
        if window_end == common:  # the first prompt ends here
            break
        shared_end = window_end
        for position in range(1, len(idxs)):
            begin = offsets[idxs[position]]
            shared_end = min(shared_end, int(offsets[idxs[position] + 1] - begin))
            shared_end = common + num_equal(
                token_ids[first + common : first + shared_end],
                token_ids[begin + common : begin + shared_end],
            )
            if shared_end == common:
                break
        common = shared_end
        window *= 2
    return common


@compiled
def num_equal(left: NDArray[np.int32], right: NDArray[np.int32]) -> int:
    """Length of the common prefix of two arrays of equal length."""
    num_equal = 0
    while num_equal + _COMPARE_STRIDE <= len(left):
        differing = np.int32(0)
        left_chunk = left[num_equal : num_equal + _COMPARE_STRIDE]
        right_chunk = right[num_equal : num_equal + _COMPARE_STRIDE]
        for position in range(_COMPARE_STRIDE):
            differing |= left_chunk[position] ^ right_chunk[position]
        if differing != 0:
            break
        num_equal += _COMPARE_STRIDE
    while num_equal < len(left) and left[num_equal] == right[num_equal]:
        num_equal += 1
    return num_equal


@compiled
def _read_keys(
    token_ids: NDArray[np.int32],
    offsets: NDArray[np.int64],
    idxs: NDArray[np.int64],
    depth: int,
    keys: NDArray[np.uint32],
) -> None:
    """The token after `depth` plus one; 0 for a prompt that ends there, so it sorts first."""
    for position in range(len(idxs)):
        begin = offsets[idxs[position]] + depth
        if begin < offsets[idxs[position] + 1]:
            keys[position] = np.uint32(token_ids[begin]) + np.uint32(1)
        else:
            keys[position] = np.uint32(0)


@compiled
def _push_children(
    stack: NDArray[np.int64], num_stacked: int, keys: NDArray[np.uint32], begin: int, node: int
) -> int:
    """Pushes each run of equal keys, the last run first; prompts that end here one by one."""
    end = len(keys)
    while end > 0:
        run_begin = end - 1
        while keys[end - 1] != 0 and run_begin > 0 and keys[run_begin - 1] == keys[end - 1]:
            run_begin -= 1
        stack[num_stacked, 0] = begin + run_begin
        stack[num_stacked, 1] = begin + end
        stack[num_stacked, 2] = node
        num_stacked += 1
        end = run_begin
    return num_stacked


@compiled
def _sort_by_key(
    keys: NDArray[np.uint32],
    idxs: NDArray[np.int64],
    scratch_keys: NDArray[np.uint32],
    scratch_idxs: NDArray[np.int64],
) -> None:
    """Sorts both arrays by key in place, stable. The scratch arrays are at least as long."""
    differing = np.uint32(0)
    is_sorted = True
    for position in range(1, len(keys)):
        differing |= keys[position] ^ keys[0]
        is_sorted = is_sorted and keys[position - 1] <= keys[position]
    if is_sorted:
        return
    if len(keys) < _INSERTION_SORT_BELOW:
        _insertion_sort(keys, idxs)
        return
    for shift in range(0, 32, 8):
        if (differing >> np.uint32(shift)) & np.uint32(255):
            _radix_pass(keys, idxs, scratch_keys, scratch_idxs, np.uint32(shift))


@compiled
def _insertion_sort(keys: NDArray[np.uint32], idxs: NDArray[np.int64]) -> None:
    for position in range(1, len(keys)):
        key, idx = keys[position], idxs[position]
        slot = position
        while slot > 0 and keys[slot - 1] > key:
            keys[slot], idxs[slot] = keys[slot - 1], idxs[slot - 1]
            slot -= 1
        keys[slot], idxs[slot] = key, idx


@compiled
def _radix_pass(
    keys: NDArray[np.uint32],
    idxs: NDArray[np.int64],
    scratch_keys: NDArray[np.uint32],
    scratch_idxs: NDArray[np.int64],
    shift: np.uint32,
) -> None:
    """One counting sort by the eight bits above `shift`."""
    starts = np.zeros(257, dtype=np.int64)
    for position in range(len(keys)):
        starts[((keys[position] >> shift) & np.uint32(255)) + 1] += 1
    for digit in range(256):
        starts[digit + 1] += starts[digit]
    for position in range(len(keys)):
        digit = (keys[position] >> shift) & np.uint32(255)
        scratch_keys[starts[digit]] = keys[position]
        scratch_idxs[starts[digit]] = idxs[position]
        starts[digit] += 1
    keys[:] = scratch_keys[: len(keys)]
    idxs[:] = scratch_idxs[: len(idxs)]
