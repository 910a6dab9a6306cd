"""Prefix search, Algorithm 1 and ordering, against a plain Python radix tree.

The prompts are synthetic and shaped like the paper's case 1: an instruction that all
share, a document that `--share-degree` prompts share, and a distinct part each, in random
order. Groups and savings are checked against the Python tree before anything is timed.
What is timed is what a plan does by default: the better of Algorithm 1 and the exact choice,
ordered by subtree.

Beside that, `choices` compares both ways of choosing prefixes on prompts of other shapes, and
`orders` what Eq. 4 and the order by subtree leave to find in a block cache.

    python -m benchmarks.planner --num-prompts 100000
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import platform
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numba
import numpy as np
from numpy.typing import NDArray

from batchllm_operator.planner import (
    TokenTable,
    build_prefix_tree,
    cached_tokens,
    choose_prefixes,
    maximize_reuse,
    num_processed_tokens,
    order_groups,
    order_groups_by_subtree,
    saving_ratio,
)

VOCABULARY = 50_000
CHUNK = 512  # documents or prompts generated at a time, to keep the generator out of the peak
OUTPUT_TOKENS = 64  # per prompt; a constant, as in the paper
BLOCK_SIZE = 16  # tokens
CACHE_BLOCKS = (1_000, 8_000)  # of the caches that orders are compared by


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


def plan_in_arrays(tokens: TokenTable, by_paper: bool = False) -> Callable[[], Result]:
    """The planner; the returned function puts its arrays into the baseline's shape.

    By the paper means Algorithm 1 and Eq. 4, as the baseline does it.
    """
    tree = build_prefix_tree(tokens)
    lengths = tokens.lengths
    outputs = np.full(len(tokens), OUTPUT_TOKENS)
    if by_paper:
        groups = maximize_reuse(tree)
        order = order_groups(groups, lengths, outputs)
    else:
        groups = choose_prefixes(tree).groups
        order = order_groups_by_subtree(groups, tree, outputs)

    def result() -> Result:
        listed = [(int(groups.num_prefix_tokens[g]), groups.members(g).tolist()) for g in order]
        num_processed = num_processed_tokens(groups, lengths)
        return Result(listed, num_processed, tree.num_distinct_prefix_tokens)

    return result


def generate(args: argparse.Namespace, num_prompts: int) -> tuple[TokenTable, NDArray[np.int64]]:
    """The table, and its prompt indexes listed document after document."""
    generator = np.random.default_rng(args.seed)
    document_begin = args.instruction_tokens
    document_end = document_begin + args.prefix_tokens
    length = document_end + args.distinct_tokens
    rows = np.empty((num_prompts, length), dtype=np.int32)
    rows[:, :document_begin] = generator.integers(0, VOCABULARY, document_begin, dtype=np.int32)
    by_document = generator.permutation(num_prompts)
    step = CHUNK * args.share_degree
    for begin in range(0, num_prompts, step):
        members = by_document[begin : begin + step]
        shape = (CHUNK, args.prefix_tokens)
        documents = generator.integers(0, VOCABULARY, shape, dtype=np.int32)
        for number, document in enumerate(documents):
            at = members[number * args.share_degree : (number + 1) * args.share_degree]
            rows[at, document_begin:document_end] = document
    for begin in range(0, num_prompts, CHUNK):
        part = rows[begin : begin + CHUNK, document_end:]
        part[:] = generator.integers(0, VOCABULARY, part.shape, dtype=np.int32)
    offsets = np.arange(num_prompts + 1, dtype=np.int64) * length
    return TokenTable(rows.reshape(-1), offsets), by_document


def some_tokens(generator: np.random.Generator, low: int, high: int) -> NDArray[np.int32]:
    """Between `low` and `high` random tokens."""
    return generator.integers(0, VOCABULARY, generator.integers(low, high + 1), dtype=np.int32)


def sites(generator: np.random.Generator) -> list[NDArray[np.int32]]:
    """Instruction, site, document and question; few documents for most sites, as by Zipf."""
    instruction = some_tokens(generator, 64, 64)
    prompts = []
    for num_documents in np.minimum(generator.zipf(1.6, 200), 40):
        site = some_tokens(generator, 100, 600)
        for share_degree in np.minimum(generator.zipf(2.0, num_documents), 20):
            document = some_tokens(generator, 200, 1200)
            questions = [some_tokens(generator, 10, 60) for _ in range(share_degree)]
            prompts += [np.concatenate([instruction, site, document, q]) for q in questions]
    return prompts


def conversations(generator: np.random.Generator) -> list[NDArray[np.int32]]:
    """Each of the 40 turns of a conversation with all turns before it, then a question."""
    prompts = []
    for _ in range(40):
        history = some_tokens(generator, 50, 50)
        for _ in range(40):
            history = np.concatenate([history, some_tokens(generator, 20, 200)])
            prompts.append(np.concatenate([history, some_tokens(generator, 10, 30)]))
    return prompts


def revisions(generator: np.random.Generator) -> list[NDArray[np.int32]]:
    """Each prompt goes on from somewhere in an earlier one."""
    prompts = [some_tokens(generator, 500, 500)]
    for _ in range(2_000):
        base = prompts[generator.integers(len(prompts))]
        begin = base[: generator.integers(len(base) // 2, len(base) + 1)]
        prompts.append(np.concatenate([begin, some_tokens(generator, 20, 400)]))
    return prompts


def compare_choices(tokens: TokenTable) -> dict[str, float]:
    """Eq. 2 for Algorithm 1, the exact choice and the multi-level optimum."""
    tree = build_prefix_tree(tokens)
    choice = choose_prefixes(tree)
    return {
        "num_prompts": len(tokens),
        "algorithm_1": choice.algorithm_1_saved_tokens / tokens.num_tokens,
        "exact": choice.exact_saved_tokens / tokens.num_tokens,
        "optimal": saving_ratio(tree.num_distinct_prefix_tokens, tokens.num_tokens),
    }


def compare_orders(tokens: TokenTable) -> dict[str, float]:
    """Share of the prompt tokens that an LRU cache of blocks finds, one prompt at a time."""
    tree = build_prefix_tree(tokens)
    groups = choose_prefixes(tree).groups
    outputs = np.full(len(tokens), OUTPUT_TOKENS)
    orders = {
        "eq_4": order_groups(groups, tokens.lengths, outputs),
        "by_subtree": order_groups_by_subtree(groups, tree, outputs),
    }
    return {
        f"{name}_{num_blocks}_blocks": cached_tokens(
            tree, groups.take(order).member_idxs, BLOCK_SIZE, num_blocks
        )
        / tokens.num_tokens
        for num_blocks in CACHE_BLOCKS
        for name, order in orders.items()
    }


def check_sample(sample: TokenTable) -> None:
    """Exits with a message if the planner and the Python tree disagree on the sample."""
    prompts = [sample.prompt(idx).tolist() for idx in range(len(sample))]
    ours, theirs = plan_in_arrays(sample, by_paper=True)(), plan_in_python(prompts)
    expected = [(cut, sorted(members)) for cut, members in theirs.groups]
    if [(cut, sorted(members)) for cut, members in ours.groups] != expected:
        sys.exit("the planner's groups differ from the Python tree's")
    if (ours.num_processed, ours.num_distinct) != (theirs.num_processed, theirs.num_distinct):
        sys.exit("the planner's token counts differ from the Python tree's")
    default = plan_in_arrays(sample)()
    if sorted(i for _, members in default.groups for i in members) != list(range(len(sample))):
        sys.exit("the default plan doesn't hold every prompt exactly once")
    if default.num_processed > ours.num_processed:
        sys.exit("the default plan saves less than Algorithm 1")


def check_in_child(tokens: TokenTable, idxs: NDArray[np.int64]) -> None:
    """Runs the check in a process of its own, so that its lists don't count as our peak."""
    context = multiprocessing.get_context("fork")
    child = context.Process(target=lambda: check_sample(tokens.take(idxs)))
    child.start()
    child.join()
    if child.exitcode != 0:
        sys.exit("correctness gate failed; nothing was timed")


def timed(repetitions: int, run: Callable[[], object]) -> list[float]:
    """Seconds of each repetition; what a run returns is freed outside the timing."""
    times = []
    for _ in range(repetitions):
        start = time.perf_counter()
        kept = run()
        times.append(time.perf_counter() - start)
        del kept
    return times


def peak_rss_bytes() -> int:
    """High-water mark of this process; Linux counts in KiB, macOS in bytes."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def git_sha() -> str | None:
    command = ["git", "rev-parse", "HEAD"]
    found = subprocess.run(command, capture_output=True, text=True, check=False)
    return found.stdout.strip() if found.returncode == 0 else None


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--num-prompts", type=int, default=20_000)
    parser.add_argument("--share-degree", type=int, default=7, help="prompts per document")
    parser.add_argument("--prefix-tokens", type=int, default=1100, help="tokens of a document")
    parser.add_argument("--distinct-tokens", type=int, default=400)
    parser.add_argument("--instruction-tokens", type=int, default=32)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--gate-prompts", type=int, default=1400, help="checked before timing")
    parser.add_argument(
        "--python-prompts", type=int, default=4200, help="subset on which the Python tree is timed"
    )
    args = parser.parse_args()
    if min(args.num_prompts, args.share_degree, args.repetitions, args.python_prompts) < 1:
        parser.error("prompts, share degree and repetitions must be at least 1")
    return args


def compare(
    args: argparse.Namespace, tokens: TokenTable, subset: NDArray[np.int64]
) -> dict[str, Any]:
    """Times the planner on the whole table, then the Python tree on the subset."""
    times = timed(args.repetitions, lambda: plan_in_arrays(tokens))
    peak = peak_rss_bytes()
    plan = plan_in_arrays(tokens)()
    if sorted(idx for _, members in plan.groups for idx in members) != list(range(len(tokens))):
        sys.exit("the plan doesn't hold every prompt exactly once")
    prompts = [tokens.prompt(idx).tolist() for idx in subset]
    python_times = timed(min(args.repetitions, 3), lambda: plan_in_python(prompts))
    rate = len(tokens) / statistics.median(times)
    python_rate = len(prompts) / statistics.median(python_times)
    return {
        "num_prompts": len(tokens),
        "num_tokens": tokens.num_tokens,
        "prompts_per_s": round(rate),
        "speedup_vs_python_tree": round(rate / python_rate, 2),
        "saving_ratio": saving_ratio(plan.num_processed, tokens.num_tokens),
        "optimal_saving_ratio": saving_ratio(plan.num_distinct, tokens.num_tokens),
        "peak_rss_bytes": peak,
        "num_groups": len(plan.groups),
        "median_s": statistics.median(times),
        "spread_s": max(times) - min(times),
        "python_tree_num_prompts": len(prompts),
        "python_tree_prompts_per_s": round(python_rate),
        "python_tree_median_s": statistics.median(python_times),
        "python_tree_spread_s": max(python_times) - min(python_times),
        "python_tree_repetitions": len(python_times),
    }


def main() -> None:
    args = parse_args()
    warm_up, _ = generate(args, min(args.num_prompts, 100))
    check_sample(warm_up)  # compiles everything
    base_peak = peak_rss_bytes()
    tokens, by_document = generate(args, args.num_prompts)
    table_peak = peak_rss_bytes()
    check_in_child(tokens, by_document[: args.gate_prompts])
    print(f"gate passed on {min(args.gate_prompts, len(tokens))} prompts", flush=True)
    measured = compare(args, tokens, by_document[: args.python_prompts])
    shapes = {
        make.__name__: TokenTable.from_lists(make(np.random.default_rng(args.seed)))
        for make in (sites, conversations, revisions)
    }
    shapes["documents"] = tokens.take(by_document[: args.gate_prompts])
    bytes_above_base = measured["peak_rss_bytes"] - base_peak
    report = {
        "benchmark": "planner",
        **measured,
        "choices": {name: compare_choices(shape) for name, shape in shapes.items()},
        "orders": {name: compare_orders(shape) for name, shape in shapes.items()},
        # tokens included; the second number is the token table's share of the first
        "bytes_per_prompt": round(bytes_above_base / len(tokens), 1),
        "table_bytes_per_prompt": round((table_peak - base_peak) / len(tokens), 1),
        **vars(args),
        "warm_up": f"planned {len(warm_up)} prompts",
        "versions": {
            "python": platform.python_version(),
            "numpy": np.__version__,
            "numba": numba.__version__,
        },
        "machine": f"{platform.machine()}, {os.cpu_count()} cores",
        "git_sha": git_sha(),
    }
    print(json.dumps(report))


if __name__ == "__main__":
    main()
