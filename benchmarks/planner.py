"""Prefix search, choice of prefixes and order of groups: time, memory, and what they save.

Prompts have the shape of the paper's case 1: an instruction that all share, a document that seven
of them share, and a part of their own, in random order. A plan of prompts on disk is timed in a
process of its own, within `--memory-budget-bytes`. Making and writing prompts isn't timed: in a
job, that is part of tokenizing. There are no figures unless the plan has every prompt once, and the
members of a sample of its groups share their prefixes.

`choices` compares both ways of choosing prefixes on prompts of other shapes, and `orders` what
Eq. 4 and the order by subtree leave to find in a block cache.

    python -m benchmarks.planner --num-prompts 100000
    python -m benchmarks.planner --num-prompts 3000000 --repetitions 1
"""

import argparse
import multiprocessing
import os
import statistics
import sys
import tempfile
import time
from functools import cache
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from batchllm_operator.plan.memory import MemoryBudget
from batchllm_operator.prefixes import (
    BY_RATIO,
    PrefixGroups,
    PromptStore,
    TokenTable,
    build_prefix_tree,
    choose_prefixes,
    group_prefill_tokens,
    order_groups_by_subtree,
    saving_ratio,
    sort_prompts,
)
from benchmarks.block_cache import cached_tokens
from benchmarks.memory import peak_rss_bytes
from benchmarks.provenance import print_last_line, provenance

VOCABULARY: Final = 50_000
SHARE_DEGREE: Final = 7
INSTRUCTION_TOKENS, DOCUMENT_TOKENS, OWN_TOKENS = 32, 1100, 400
OUTPUT_TOKENS: Final = 64
BLOCK_SIZE: Final = 16
CACHE_BLOCKS: Final = (1_000, 8_000)
"""Of the caches that orders are compared by."""
_BATCH: Final = 4096
_SETTLED_BATCHES: Final = 16  # some 200 MB
_CHECKED_GROUPS: Final = 2000
_SAMPLE: Final = 1400
"""Prompts of case 1 that choices and orders are compared on."""

Tokens = NDArray[np.int32]


@cache
def _instruction() -> Tokens:
    return _tokens_of(0, INSTRUCTION_TOKENS)


def _tokens_of(owner: int, count: int) -> Tokens:
    return np.random.default_rng(owner).integers(0, VOCABULARY, count, dtype=np.int32)


def case_1(number: int) -> Tokens:
    """A prompt by its number: millions of them need no memory."""
    document = _tokens_of(1 + 2 * (number // SHARE_DEGREE), DOCUMENT_TOKENS)
    return np.concatenate([_instruction(), document, _tokens_of(2 + 2 * number, OWN_TOKENS)])


def some_tokens(generator: np.random.Generator, low: int, high: int) -> Tokens:
    """Between `low` and `high` random tokens."""
    return generator.integers(0, VOCABULARY, generator.integers(low, high + 1), dtype=np.int32)


def sites(generator: np.random.Generator) -> list[Tokens]:
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


def conversations(generator: np.random.Generator) -> list[Tokens]:
    """Each of the 40 turns of a conversation with all turns before it, then a question."""
    prompts = []
    for _ in range(40):
        history = some_tokens(generator, 50, 50)
        for _ in range(40):
            history = np.concatenate([history, some_tokens(generator, 20, 200)])
            prompts.append(np.concatenate([history, some_tokens(generator, 10, 30)]))
    return prompts


def revisions(generator: np.random.Generator) -> list[Tokens]:
    """Each prompt goes on from somewhere in an earlier one."""
    prompts = [some_tokens(generator, 500, 500)]
    for _ in range(2_000):
        base = prompts[generator.integers(len(prompts))]
        begin = base[: generator.integers(len(base) // 2, len(base) + 1)]
        prompts.append(np.concatenate([begin, some_tokens(generator, 20, 400)]))
    return prompts


def compare_choices(tokens: TokenTable) -> dict[str, float]:
    """Eq. 2 for Algorithm 1, the exact choice and the multi-level optimum."""
    ranked = sort_prompts(tokens)
    choice = choose_prefixes(ranked.tree(tokens.lengths))
    return {
        "num_prompts": len(tokens),
        "algorithm_1": choice.algorithm_1_saved_tokens / tokens.num_tokens,
        "exact": choice.exact_saved_tokens / tokens.num_tokens,
        "optimal": int(ranked.num_shared_tokens.sum()) / tokens.num_tokens,
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


def plan(num_prompts: int) -> dict[str, Any]:
    """One plan: its seconds by step, and what it saves."""
    numbers = np.random.default_rng(0).permutation(num_prompts).tolist()
    with tempfile.TemporaryDirectory(prefix="batchllm-bench-") as folder:
        path = Path(folder) / "prompts.bin"
        with PromptStore(path) as prompts:
            for begin in range(0, num_prompts, _BATCH):
                batch = map(case_1, numbers[begin : begin + _BATCH])
                prompts.append(TokenTable.from_lists(list(batch)))
                if begin // _BATCH % _SETTLED_BATCHES == 0:
                    _settle(path)
            _settle(path)
            laps = [time.perf_counter()]
            ranked = sort_prompts(prompts)
            laps.append(time.perf_counter())
            tree = ranked.tree(prompts.lengths)
            groups = choose_prefixes(tree).groups
            laps.append(time.perf_counter())
            outputs = np.full(num_prompts, OUTPUT_TOKENS)
            groups = groups.take(order_groups_by_subtree(groups, tree, outputs))
            laps.append(time.perf_counter())
            _check(prompts, groups)
            num_processed = int(group_prefill_tokens(groups, prompts.lengths).sum())
            num_tokens = int(prompts.lengths.sum())
    return {
        "total_s": laps[-1] - laps[0],
        **dict(zip(("sort_s", "choose_s", "order_s"), np.diff(laps).tolist(), strict=True)),
        "num_tokens": num_tokens,
        "saving_ratio": saving_ratio(num_processed, num_tokens),
        "optimal_saving_ratio": int(ranked.num_shared_tokens.sum()) / num_tokens,
        "num_groups": len(groups),
    }


def _settle(path: Path) -> None:
    """Waits until the file is on disk: writing goes on by itself and would slow down the rest."""
    with path.open("rb") as file:
        os.fsync(file.fileno())


def _check(prompts: PromptStore, groups: PrefixGroups) -> None:
    if not np.array_equal(np.sort(groups.member_idxs), np.arange(len(prompts))):
        sys.exit("the plan doesn't hold every prompt exactly once; no figures")
    for group_idx in range(0, len(groups), max(1, len(groups) // _CHECKED_GROUPS)):
        members = groups.members(group_idx)[:16]
        cut = np.full(len(members), groups.num_prefix_tokens[group_idx])
        prefixes = prompts.slices(members, 0, cut)
        is_whole = np.array_equal(prefixes.lengths, cut)
        if not is_whole or np.diff(prefixes.token_ids.reshape(len(members), -1), axis=0).any():
            sys.exit(f"group {group_idx} doesn't share its prefix; no figures")


def measure(num_prompts: int, budget_bytes: int, repetitions: int) -> dict[str, Any]:
    """Median figures of some plans, and the peak of this process."""
    plan(200)  # compiles
    base_peak = peak_rss_bytes()
    MemoryBudget.from_now(budget_bytes).check(num_prompts)
    plans = sorted((plan(num_prompts) for _ in range(repetitions)), key=lambda row: row["total_s"])
    peak = peak_rss_bytes()
    total_s = [row["total_s"] for row in plans]
    return {
        "prompts_per_s": round(num_prompts / statistics.median(total_s)),
        **plans[len(plans) // 2],
        "spread_s": total_s[-1] - total_s[0],
        "peak_rss_bytes": peak,
        "bytes_per_prompt": round((peak - base_peak) / num_prompts, 1),
        "within_budget": peak <= budget_bytes,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--num-prompts", type=int, default=20_000)
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--memory-budget-bytes", type=int, default=2 << 30)
    args = parser.parse_args()
    if min(args.num_prompts, args.repetitions) < 1:
        parser.error("prompts and repetitions must be at least 1")
    with multiprocessing.get_context("spawn").Pool(1) as pool:  # its peak is its own
        wanted = (args.num_prompts, args.memory_budget_bytes, args.repetitions)
        on_disk = pool.apply(measure, wanted)
    shapes = {
        make.__name__: TokenTable.from_lists(make(np.random.default_rng(0)))
        for make in (sites, conversations, revisions)
    }
    shapes["documents"] = TokenTable.from_lists(list(map(case_1, range(_SAMPLE))))
    report = {
        "benchmark": "planner",
        **on_disk,
        "choices": {name: compare_choices(tokens) for name, tokens in shapes.items()},
        "orders": {name: compare_orders(tokens) for name, tokens in shapes.items()},
        **vars(args),
        **provenance(),
    }
    print_last_line(report)


if __name__ == "__main__":
    main()
