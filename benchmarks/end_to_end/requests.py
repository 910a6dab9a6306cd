"""From made-up prompts to an engine's requests, in a policy's order; ours by the real planner."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from batchllm_operator.engine import EngineRequest
from batchllm_operator.prefixes import (
    PrefixGroups,
    PromptStore,
    RankedPrompts,
    TokenTable,
    choose_prefixes,
    order_groups_by_subtree,
    sort_prompts,
)
from batchllm_operator.simulate.workload import Shape
from benchmarks.end_to_end.policies import Order

_BATCH = 4096  # prompts


@dataclass(frozen=True, slots=True)
class PlannedRequests:
    """What an engine is given, and what it took to know it."""

    requests: tuple[EngineRequest, ...]
    """`request_idx` is a prompt's place in the workload as given, whatever the order."""
    plan_s: float
    """Seconds from prompts to groups in order; 0 without a plan."""
    num_prompt_tokens: int
    num_output_tokens: int
    """Of all requests together."""


def prompts_as_given(shape: Shape, vocabulary: int, seed: int) -> TokenTable:
    """A workload's prompts in random order: rows as a table happens to have them."""
    workload = shape.make(seed, vocabulary)
    order = np.random.default_rng(seed).permutation(len(workload))
    return TokenTable.from_lists([workload.tokens.prompt(idx) for idx in order.tolist()])


def make_requests(
    prompts: TokenTable, order: Order, output_tokens: int, block_size: int
) -> PlannedRequests:
    """Requests for all prompts.

    Args:
        prompts: in the order of the table.
        order: that of the requests; `sorted` by token ids costs nothing here, as if the table
            had been sorted already.
        output_tokens: that each generates.
        block_size: of the KV cache, whose whole blocks can be shared.
    """
    if order == "plan":
        few = prompts.take(range(min(200, len(prompts))))
        find_groups(few, output_tokens, block_size)  # compiles
        started_at = time.perf_counter()
        groups = find_groups(prompts, output_tokens, block_size)
        plan_s = time.perf_counter() - started_at
        requests = tuple(_planned(prompts, groups, output_tokens))
    else:
        idxs = list(range(len(prompts)))
        if order == "sorted":
            idxs.sort(key=lambda idx: prompts.prompt(idx).tolist())
        plan_s = 0.0
        requests = tuple(_request(prompts, idx, output_tokens) for idx in idxs)
    return PlannedRequests(requests, plan_s, prompts.num_tokens, output_tokens * len(prompts))


def find_groups(prompts: TokenTable, output_tokens: int, block_size: int) -> PrefixGroups:
    """The plan of these prompts: groups of whole blocks, in order."""
    with (
        tempfile.TemporaryDirectory(prefix="batchllm-bench-") as folder,
        PromptStore(Path(folder) / "prompts.bin") as store,
    ):
        for begin in range(0, len(prompts), _BATCH):
            store.append(prompts.take(range(begin, min(begin + _BATCH, len(prompts)))))
        ranked = sort_prompts(store)
        in_blocks = ranked.num_shared_tokens // block_size * block_size
        tree = RankedPrompts(ranked.prompt_idxs, in_blocks).tree(store.lengths)
    groups = choose_prefixes(tree).groups
    outputs = np.full(len(prompts), output_tokens, dtype=np.int64)
    return groups.take(order_groups_by_subtree(groups, tree, outputs))


def warm_up_requests(
    requests: Sequence[EngineRequest], most: int = 64
) -> tuple[EngineRequest, ...]:
    """The first few of some requests, whole groups as far as they go."""
    chosen = requests[: max(1, min(most, len(requests) // 4))]
    sizes: dict[int, int] = {}
    for request in chosen:
        sizes[request.group_id] = sizes.get(request.group_id, 0) + 1
    return tuple(replace(each, group_size=sizes[each.group_id]) for each in chosen)


def _planned(
    prompts: TokenTable, groups: PrefixGroups, output_tokens: int
) -> Iterator[EngineRequest]:
    for group_id, prefix in enumerate(groups.num_prefix_tokens.tolist()):
        members: NDArray[np.int64] = groups.members(group_id)
        for idx in members.tolist():
            yield EngineRequest(
                request_idx=idx,
                prompt_token_ids=prompts.prompt(idx).tolist(),
                group_id=group_id,
                num_prefix_tokens=prefix,
                group_size=len(members),
                num_output_tokens=output_tokens,
            )


def _request(prompts: TokenTable, idx: int, output_tokens: int) -> EngineRequest:
    return EngineRequest(
        request_idx=idx,
        prompt_token_ids=prompts.prompt(idx).tolist(),
        group_id=idx,
        num_prefix_tokens=0,
        num_output_tokens=output_tokens,
    )
