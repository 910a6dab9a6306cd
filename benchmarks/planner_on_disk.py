"""The planner over prompts on disk, within a memory budget, for `benchmarks.planner`.

Prompts are made batch by batch and written to the prompt store, which isn't timed: in a job that
is part of tokenizing. Timed are hashing them as they come, and then all of the prefix search (with
its comparing of what prompts share, token by token), Algorithm 1 and the exact choice, and the
order, over KV blocks or tokens. Prefixes of a sample of groups are compared in the end.
"""

from __future__ import annotations

import os
import statistics
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from batchllm_operator.plan.memory import MemoryBudget
from batchllm_operator.prefixes import (
    PrefixGroups,
    PrefixSearch,
    PromptStore,
    choose_prefixes,
    group_prefill_tokens,
    order_groups_by_subtree,
    saving_ratio,
)
from benchmarks.memory import peak_rss_bytes
from benchmarks.synthetic_prompts import Shape

OUTPUT_TOKENS = 64  # per prompt
CHECKED_GROUPS = 2000
SETTLED_BATCHES = 16  # of prompts, some 200 MB


def plan(shape: Shape, budget: MemoryBudget, block_size: int) -> dict[str, Any]:
    """One plan: its seconds by step, and what it saves."""
    times: dict[str, float] = dict.fromkeys(
        ("write_prompts_s", "hash_s", "search_s", "choose_s", "order_s"), 0.0
    )
    last = 0.0

    def lap(name: str) -> None:
        nonlocal last
        now = time.perf_counter()
        times[name] = times.get(name, 0.0) + now - last
        last = now

    with tempfile.TemporaryDirectory(prefix="batchllm-bench-") as folder:
        search = PrefixSearch(budget.row_bytes(shape.num_prompts))
        with PromptStore(Path(folder) / "prompts.bin") as prompts:
            for number, batch in enumerate(shape.batches(), start=1):
                last = time.perf_counter()
                prompts.append(batch)
                if number % SETTLED_BATCHES == 0:
                    _settle(Path(folder) / "prompts.bin")
                lap("write_prompts_s")
                search.add(batch)
                lap("hash_s")
            _settle(Path(folder) / "prompts.bin")
            last = time.perf_counter()
            ranked = search.finish(prompts)
            tree = ranked.in_blocks(block_size).tree(prompts.lengths)
            lap("search_s")
            groups = choose_prefixes(tree).groups
            lap("choose_s")
            outputs = np.full(shape.num_prompts, OUTPUT_TOKENS)
            groups = groups.take(order_groups_by_subtree(groups, tree, outputs))
            lap("order_s")
            _check(prompts, groups)
        lengths = prompts.lengths
    return {
        "total_s": sum(seconds for name, seconds in times.items() if name != "write_prompts_s"),
        **times,
        "saving_ratio": saving_ratio(
            int(group_prefill_tokens(groups, lengths).sum()), shape.num_tokens
        ),
        "optimal_saving_ratio": saving_ratio(tree.num_distinct_prefix_tokens, shape.num_tokens),
        "num_groups": len(groups),
    }


def _settle(path: Path) -> None:
    """Waits until the file is on disk: writing goes on by itself and would slow down the rest."""
    descriptor = os.open(path, os.O_RDONLY)
    os.fsync(descriptor)
    os.close(descriptor)


def _check(prompts: PromptStore, groups: PrefixGroups) -> None:
    """Exits if a prompt is missing or twice, or a sampled group doesn't share its prefix."""
    if not np.array_equal(np.sort(groups.member_idxs), np.arange(len(prompts))):
        sys.exit("the plan doesn't hold every prompt exactly once")
    step = max(1, len(groups) // CHECKED_GROUPS)
    for group_idx in range(0, len(groups), step):
        members = groups.members(group_idx)[:16]
        cut = np.full(len(members), groups.num_prefix_tokens[group_idx])
        prefixes = prompts.prefixes(members, cut)
        if np.any(prefixes.lengths != cut):
            sys.exit(f"group {group_idx} has a prompt shorter than its prefix")
        if np.any(np.diff(prefixes.token_ids.reshape(len(members), -1), axis=0)):
            sys.exit(f"group {group_idx} doesn't share its prefix")


def measure(shape: Shape, budget_bytes: int, block_size: int, repetitions: int) -> dict[str, Any]:
    """Median figures of some plans, and the peak of this process."""
    few = replace(shape, num_prompts=200)
    plan(few, MemoryBudget.from_now(1 << 40), block_size)  # compiles
    base_peak = peak_rss_bytes()
    budget = MemoryBudget.from_now(budget_bytes)
    budget.check(shape.num_prompts)
    plans = [plan(shape, budget, block_size) for _ in range(repetitions)]
    peak = peak_rss_bytes()
    total_s = [each["total_s"] for each in plans]
    middle = sorted(plans, key=lambda each: each["total_s"])[len(plans) // 2]
    return {
        "prompts_per_s": round(shape.num_prompts / statistics.median(total_s)),
        **middle,
        "spread_s": max(total_s) - min(total_s),
        "peak_rss_bytes": peak,
        "bytes_per_prompt": round((peak - base_peak) / shape.num_prompts, 1),
        "within_budget": peak <= budget_bytes,
    }
