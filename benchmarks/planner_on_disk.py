"""The planner over prompts on disk, within a memory budget, for `benchmarks.planner`.

Prompts are made batch by batch and written to the prompt store, which isn't timed: in a job that
is part of tokenizing. Timed are the sort, which compares what prompts share token by token, the
tree, Algorithm 1 and the exact choice, and the order. Prefixes of a sample of groups are compared
in the end.
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
    PromptStore,
    choose_prefixes,
    group_prefill_tokens,
    order_groups_by_subtree,
    saving_ratio,
    sort_prompts,
)
from benchmarks.memory import peak_rss_bytes
from benchmarks.synthetic_prompts import Shape

OUTPUT_TOKENS = 64  # per prompt
CHECKED_GROUPS = 2000
SETTLED_BATCHES = 16  # of prompts, some 200 MB


def plan(shape: Shape) -> dict[str, Any]:
    """One plan: its seconds by step, and what it saves."""
    with (
        tempfile.TemporaryDirectory(prefix="batchllm-bench-") as folder,
        PromptStore(Path(folder) / "prompts.bin") as prompts,
    ):
        for number, batch in enumerate(shape.batches(), start=1):
            prompts.append(batch)
            if number % SETTLED_BATCHES == 0:
                _settle(Path(folder) / "prompts.bin")
        _settle(Path(folder) / "prompts.bin")
        laps = [time.perf_counter()]
        ranked = sort_prompts(prompts)
        laps.append(time.perf_counter())
        tree = ranked.tree(prompts.lengths)
        groups = choose_prefixes(tree).groups
        laps.append(time.perf_counter())
        outputs = np.full(shape.num_prompts, OUTPUT_TOKENS)
        groups = groups.take(order_groups_by_subtree(groups, tree, outputs))
        laps.append(time.perf_counter())
        _check(prompts, groups)
        num_processed = int(group_prefill_tokens(groups, prompts.lengths).sum())
    return {
        "total_s": laps[-1] - laps[0],
        **dict(zip(("sort_s", "choose_s", "order_s"), np.diff(laps).tolist(), strict=True)),
        "saving_ratio": saving_ratio(num_processed, shape.num_tokens),
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
        prefixes = prompts.slices(members, 0, cut)
        if np.any(prefixes.lengths != cut):
            sys.exit(f"group {group_idx} has a prompt shorter than its prefix")
        if np.any(np.diff(prefixes.token_ids.reshape(len(members), -1), axis=0)):
            sys.exit(f"group {group_idx} doesn't share its prefix")


def measure(shape: Shape, budget_bytes: int, repetitions: int) -> dict[str, Any]:
    """Median figures of some plans, and the peak of this process."""
    plan(replace(shape, num_prompts=200))  # compiles
    base_peak = peak_rss_bytes()
    MemoryBudget.from_now(budget_bytes).check(shape.num_prompts)
    plans = sorted(
        (plan(shape) for _ in range(repetitions)), key=lambda figures: figures["total_s"]
    )
    peak = peak_rss_bytes()
    total_s = [figures["total_s"] for figures in plans]
    return {
        "prompts_per_s": round(shape.num_prompts / statistics.median(total_s)),
        **plans[len(plans) // 2],
        "spread_s": total_s[-1] - total_s[0],
        "peak_rss_bytes": peak,
        "bytes_per_prompt": round((peak - base_peak) / shape.num_prompts, 1),
        "within_budget": peak <= budget_bytes,
    }
