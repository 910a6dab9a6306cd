"""The prefix tree as nested boxes, and the work of workers over time."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Final

from batchllm_operator.amounts import clipped, counted, first_of
from batchllm_operator.prefixes.sharing import TreeNode
from batchllm_operator.report.pages import count, duration, ratio
from batchllm_operator.stored_plan.timeline import WorkBar

_TABLE_NODES: Final = 24
_MOST_NAMED: Final = 5
_DEEPEST: Final = 0.4
"""Share of the colour in the box that saves most; with more, its text would be hard to read."""
WIDTH: Final = 1000.0
"""Of the chart of workers, in its own units."""


@dataclass(frozen=True, slots=True)
class Box:
    """A node of the prefix tree, drawn above the nodes below it."""

    node: TreeNode
    share: str
    """Of all saved tokens, those of this node itself."""
    depth: float
    """Of its colour, 0 to 1."""
    rests: Sequence[int]
    """Boxes that end here, the innermost first: in each, requests that no box in it has."""


def boxes(tree: Sequence[TreeNode]) -> Iterator[Box]:
    """The boxes of a tree's nodes, in the same order."""
    above = list[list[int]]()
    """Requests that no box below has yet, and boxes below."""
    most = max((node.num_own_saved_tokens for node in tree), default=0)
    levels = [*(node.level for node in tree[1:]), 0]
    for node, next_level in zip(tree, levels, strict=bool(tree)):
        if above:
            above[-1][0] -= node.num_requests
            above[-1][1] += 1
        above.append([node.num_requests, 0])
        ended = [above.pop() for _ in range(node.level + 1 - next_level)]
        rests = [max(0, num_left) if num_below else 0 for num_left, num_below in ended]
        own = node.num_own_saved_tokens
        share = ratio(min(1.0, own / max(1, tree[0].num_saved_tokens)))
        yield Box(node, share, round(_DEEPEST * own / max(1, most), 3), rests)


def tree_rows(tree: Sequence[TreeNode]) -> list[tuple[str, ...]]:
    """The nodes that save most, for a table."""
    total = max(1, tree[0].num_saved_tokens)
    chosen = sorted(tree[1:], key=lambda node: -node.num_own_saved_tokens)[:_TABLE_NODES]
    return [
        (
            counted(node.num_tokens, "token"),
            count(node.num_requests),
            count(node.level),
            count(node.num_own_saved_tokens),
            ratio(min(1.0, node.num_own_saved_tokens / total)),
        )
        for node in chosen
    ]


@dataclass(frozen=True, slots=True)
class DrawnBar:
    x: float
    width: float
    colour: str
    text: str


@dataclass(frozen=True, slots=True)
class Gantt:
    """Bars of workers over time."""

    lanes: Sequence[tuple[str, Sequence[DrawnBar]]]
    """Name of the worker, and its bars."""
    rows: Sequence[Sequence[str]]
    """The same in words, a row for each worker."""
    num_taken_over: int
    end: str


def gantt(bars: Sequence[WorkBar]) -> Gantt | None:
    """The chart of some bars, which lie by worker and time; None without bars."""
    if not bars:
        return None
    end_s = max(1e-3, *(bar.end_s for bar in bars))
    hosts = {(bar.worker, bar.host) for bar in bars}
    has_doubles = len({worker for worker, _ in hosts}) < len(hosts)
    lanes, rows = [], []
    for (worker, host), own in groupby(bars, key=lambda bar: (bar.worker, bar.host)):
        made = list(own)
        took_over = [f"{bar.shard_idx}" for bar in made if bar.took_over]
        ended_before = [f"{b.shard_idx} {b.ending}" for b in made if b.ending != "finished"]
        name = f"worker {worker}" + (f" on {clipped(host, 20)}" if has_doubles else "")
        lanes.append((name, [_drawn(bar, WIDTH / end_s) for bar in made]))
        rows.append(
            (
                name,
                host,
                count(sum(bar.num_shards for bar in made)),
                duration(sum(max(0.0, bar.end_s - bar.start_s) for bar in made)),
                duration(max(bar.end_s for bar in made)),
                first_of(took_over, _MOST_NAMED) or "none",
                first_of(ended_before, _MOST_NAMED) or "none",
            )
        )
    return Gantt(lanes, rows, sum(bar.took_over for bar in bars), duration(end_s))


def _drawn(bar: WorkBar, per_s: float) -> DrawnBar:
    shards = f"shard {bar.shard_idx}"
    if bar.num_shards > 1:
        shards = f"{bar.num_shards} shards, the first of them {bar.shard_idx}"
    colour, how = "decode", bar.ending
    if bar.took_over:
        colour, shards = "distinct", f"{shards}, attempt {bar.attempt}"
    if bar.ending != "finished":
        colour = "limit"
    lasted = f"{duration(bar.start_s)} to {duration(bar.end_s)}"
    length = max(2.0, (bar.end_s - bar.start_s) * per_s)
    x = min(bar.start_s * per_s, WIDTH - length)
    return DrawnBar(round(x, 1), round(length, 1), colour, f"{shards}: {lasted}, {how}")
