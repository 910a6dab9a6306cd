"""Prefix search, Algorithm 1 and ordering, against a plain Python radix tree.

The prompts are synthetic and shaped like the paper's case 1 (`synthetic_prompts`): an instruction
that all share, a document that `--share-degree` prompts share, and a distinct part each, in
random order. Groups and savings are checked against the Python tree before anything is timed.
What is timed is what a plan does: the better of Algorithm 1 and the exact choice, ordered by
subtree, for prompts that lie on disk, within `--memory-budget-bytes` (`planner_on_disk`, in a
process of its own).

`choices` compares both ways of choosing prefixes on prompts of other shapes, and `orders` what
Eq. 4 and the order by subtree leave to find in a block cache.

    python -m benchmarks.planner --num-prompts 100000
    python -m benchmarks.planner --num-prompts 3000000 --repetitions 1
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from batchllm_operator.prefixes import (
    BY_RATIO,
    TokenTable,
    build_prefix_tree,
    choose_prefixes,
    group_prefill_tokens,
    maximize_reuse,
    order_groups_by_subtree,
    saving_ratio,
)
from benchmarks.block_cache import cached_tokens
from benchmarks.planner_on_disk import measure
from benchmarks.provenance import provenance
from benchmarks.python_tree import OUTPUT_TOKENS, Result, plan_in_python
from benchmarks.synthetic_prompts import VOCABULARY, Shape, add_flags

BLOCK_SIZE = 16  # tokens
CACHE_BLOCKS = (1_000, 8_000)  # of the caches that orders are compared by


def plan_in_arrays(tokens: TokenTable, by_paper: bool = False) -> Callable[[], Result]:
    """The planner; the returned function puts its arrays into the baseline's shape.

    By the paper means Algorithm 1 and Eq. 4, as the baseline does it.
    """
    tree = build_prefix_tree(tokens)
    lengths = tokens.lengths
    outputs = np.full(len(tokens), OUTPUT_TOKENS)
    if by_paper:
        groups = maximize_reuse(tree)
        order = order_groups_by_subtree(groups, tree, outputs, BY_RATIO)
    else:
        groups = choose_prefixes(tree).groups
        order = order_groups_by_subtree(groups, tree, outputs)

    def result() -> Result:
        listed = [(int(groups.num_prefix_tokens[g]), groups.members(g).tolist()) for g in order]
        num_processed = int(group_prefill_tokens(groups, lengths).sum())
        return Result(listed, num_processed, tree.num_distinct_prefix_tokens)

    return result


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
        "eq_4": order_groups_by_subtree(groups, tree, outputs, BY_RATIO),
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


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--num-prompts", type=int, default=20_000)
    add_flags(parser)
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--gate-prompts", type=int, default=1400, help="checked before timing")
    parser.add_argument(
        "--python-prompts", type=int, default=4200, help="subset on which the Python tree is timed"
    )
    parser.add_argument("--memory-budget-bytes", type=int, default=2 << 30)
    args = parser.parse_args()
    if min(args.num_prompts, args.share_degree, args.repetitions, args.python_prompts) < 1:
        parser.error("prompts, share degree and repetitions must be at least 1")
    return args


def time_python_tree(args: argparse.Namespace, shape: Shape) -> dict[str, Any]:
    """The baseline on whole documents of the same prompts."""
    subset = shape.prompts(np.arange(min(args.python_prompts, shape.num_prompts)))
    prompts = [subset.prompt(idx).tolist() for idx in range(len(subset))]
    times = []
    for _ in range(min(args.repetitions, 3)):
        start = time.perf_counter()
        plan_in_python(prompts)
        times.append(time.perf_counter() - start)
    return {
        "python_tree_num_prompts": len(prompts),
        "python_tree_prompts_per_s": round(len(prompts) / statistics.median(times)),
        "python_tree_median_s": statistics.median(times),
        "python_tree_spread_s": max(times) - min(times),
        "python_tree_repetitions": len(times),
    }


def main() -> None:
    args = parse_args()
    shape = Shape.from_args(args, args.num_prompts)
    check_sample(shape.prompts(np.arange(min(100, shape.num_prompts))))  # compiles everything
    sample = shape.prompts(np.arange(min(args.gate_prompts, shape.num_prompts)))
    check_sample(sample)
    print(f"gate passed on {len(sample)} prompts", flush=True)
    with multiprocessing.get_context("spawn").Pool(1) as pool:  # its peak is its own
        on_disk = pool.apply(measure, (shape, args.memory_budget_bytes, args.repetitions))
    python_tree = time_python_tree(args, shape)
    speedup = on_disk["prompts_per_s"] / python_tree["python_tree_prompts_per_s"]
    shapes = {
        make.__name__: TokenTable.from_lists(make(np.random.default_rng(args.seed)))
        for make in (sites, conversations, revisions)
    }
    shapes["documents"] = sample
    report = {
        "benchmark": "planner",
        "num_prompts": shape.num_prompts,
        "num_tokens": shape.num_tokens,
        "speedup_vs_python_tree": round(speedup, 2),
        **on_disk,
        **python_tree,
        "choices": {name: compare_choices(shape) for name, shape in shapes.items()},
        "orders": {name: compare_orders(shape) for name, shape in shapes.items()},
        **vars(args),
        "warm_up": "planned 100 prompts",
        **provenance(),
    }
    print(json.dumps(report))


if __name__ == "__main__":
    main()
