"""From made-up prompts to an engine's requests, in a policy's order; ours by the real planner."""

from __future__ import annotations

import tempfile
import time
from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

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
    """Of all requests together."""
    output_tokens: int
    """Of each request."""

    @property
    def num_output_tokens(self) -> int:
        """Of all requests together."""
        return self.output_tokens * len(self.requests)

    def warm_up(self, most: int, output_tokens: int) -> PlannedRequests:
        """The first few, whole groups as far as they go.

        Args:
            most: requests, of which at most a quarter is taken.
            output_tokens: of each request, at most.
        """
        chosen = self.requests[: max(1, min(most, len(self.requests) // 4))]
        sizes = Counter(request.group_id for request in chosen)
        requests = tuple(replace(each, group_size=sizes[each.group_id]) for each in chosen)
        output_tokens = min(output_tokens, self.output_tokens)
        return replace(self, requests=requests, output_tokens=output_tokens)


def prompts_as_given(shape: Shape, vocabulary: int) -> TokenTable:
    """A workload's prompts in random order: rows as a table happens to have them."""
    workload = shape.make(0, vocabulary)
    order = np.random.default_rng(0).permutation(len(workload))
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
    plan_s = 0.0
    if order == "plan":
        few = prompts.take(range(min(200, len(prompts))))
        find_groups(few, output_tokens, block_size)  # compiles
        started_at = time.perf_counter()
        groups = find_groups(prompts, output_tokens, block_size)
        plan_s = time.perf_counter() - started_at
        members = [groups.members(group_id).tolist() for group_id in range(len(groups))]
        prefixes = groups.num_prefix_tokens.tolist()
    else:
        idxs = list(range(len(prompts)))
        if order == "sorted":
            idxs.sort(key=lambda idx: prompts.prompt(idx).tolist())
        members, prefixes = [[idx] for idx in idxs], [0] * len(idxs)
    requests = tuple(
        EngineRequest(
            request_idx=idx,
            prompt_token_ids=prompts.prompt(idx).tolist(),
            group_id=group_id,
            num_prefix_tokens=prefix,
            group_size=len(group),
            num_output_tokens=output_tokens,
        )
        for group_id, (prefix, group) in enumerate(zip(prefixes, members, strict=True))
        for idx in group
    )
    return PlannedRequests(requests, plan_s, prompts.num_tokens, output_tokens)


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
