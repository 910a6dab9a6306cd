"""The baseline of `benchmarks.planner`: a plain Python radix tree and Algorithm 1 by recursion."""

from __future__ import annotations

from dataclasses import dataclass, field

OUTPUT_TOKENS = 64  # per prompt; a constant, as in the paper


@dataclass(frozen=True, slots=True)
class Result:
    """A plan as (prefix tokens, prompt indexes) in scheduling order, and its prefill tokens."""

    groups: list[tuple[int, list[int]]]
    num_processed: int
    num_distinct: int


@dataclass(slots=True)
class PythonNode:
    """A radix tree's node as one would write it first: an edge, and children by first token."""

    tokens: list[int]
    children: dict[int, PythonNode] = field(default_factory=dict)
    ending: list[int] = field(default_factory=list)
    num_leaves: int = 0


def insert(root: PythonNode, prompt: list[int], idx: int) -> None:
    """Adds one prompt, splitting the edge at which it leaves the tree."""
    node, start = root, 0
    while True:
        node.num_leaves += 1
        if start == len(prompt):
            node.ending.append(idx)
            return
        child = node.children.get(prompt[start])
        if child is None:
            node.children[prompt[start]] = PythonNode(prompt[start:], {}, [idx], 1)
            return
        edge = child.tokens
        if prompt[start : start + len(edge)] != edge:
            shared = 0
            for ours, theirs in zip(prompt[start:], edge, strict=False):
                if ours != theirs:
                    break
                shared += 1
            upper = PythonNode(edge[:shared], {edge[shared]: child}, [], child.num_leaves)
            child.tokens = edge[shared:]
            node.children[prompt[start]] = upper
            child = upper
        start += len(child.tokens)
        node = child


def first_level(node: PythonNode) -> list[tuple[int, list[int]]]:
    """Algorithm 1 for `node`: its first-level prefixes as (tokens, members), recursively."""
    items = [(0, [idx]) for idx in node.ending]
    for child in node.children.values():
        num_tokens = len(child.tokens)
        if child.num_leaves == 1:
            items.append((num_tokens, child.ending))
            continue
        kept = []
        for below, members in first_level(child):
            if (len(members) - 1) * below > num_tokens:
                items.append((num_tokens + below, members))
            else:
                kept.append((below, members))
        if len(kept) == 1:
            items.append((num_tokens + kept[0][0], kept[0][1]))
        elif kept:
            items.append((num_tokens, [idx for _, members in kept for idx in members]))
    return items


def count_tokens(node: PythonNode) -> int:
    return len(node.tokens) + sum(count_tokens(child) for child in node.children.values())


def plan_in_python(prompts: list[list[int]]) -> Result:
    """The baseline: tree by insertion, recursive Algorithm 1, sort by Eq. 4."""
    root = PythonNode([])
    for idx, prompt in enumerate(prompts):
        insert(root, prompt, idx)
    keyed = []
    num_processed = 0
    for num_tokens, members in first_level(root):
        cut = num_tokens if len(members) > 1 else 0
        prefill = cut + sum(len(prompts[idx]) - cut for idx in members)
        ratio = OUTPUT_TOKENS / prefill if prefill else float("inf")
        first = min(members, key=lambda idx: (prompts[idx], idx))
        keyed.append((-ratio, prompts[first], first, cut, members))
        num_processed += prefill
    keyed.sort()
    groups = [(cut, members) for _, _, _, cut, members in keyed]
    return Result(groups, num_processed, count_tokens(root))
