"""Requests: distinct prompts, each for one or more rows."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from batchllm_operator.prefixes.algorithm1 import saving_ratio
from batchllm_operator.prefixes.prefix_tree import RankedPrompts
from batchllm_operator.prefixes.prompt_sort import sort_prompts
from batchllm_operator.prefixes.prompt_store import Prompts
from batchllm_operator.prefixes.token_table import TokenTable


@dataclass(frozen=True, slots=True, eq=False)
class Requests:
    """Requests in the order of their first rows.

    Attributes:
        prompts: the prompts of all rows that can be prompted.
        prompt_idxs: [num_requests] int64, each request's prompt.
        lengths: [num_requests] int64, its tokens.
        row_idxs: [num_prompts] int64, the rows of request 0, of request 1, ..., each ascending.
        offsets: [num_requests + 1] int64 into `row_idxs`.
        output_tokens: [num_requests] int64, the largest estimate of its rows, where a column
            holds them.
    """

    prompts: Prompts
    prompt_idxs: NDArray[np.int64]
    lengths: NDArray[np.int64]
    row_idxs: NDArray[np.int64]
    offsets: NDArray[np.int64]
    output_tokens: NDArray[np.int64] | None = None

    def __len__(self) -> int:
        """Number of requests."""
        return len(self.prompt_idxs)

    @property
    def num_rows(self) -> NDArray[np.int64]:
        """Rows of each request: [num_requests]."""
        return np.diff(self.offsets)

    def rows_of(self, idxs: NDArray[np.int64]) -> NDArray[np.int64]:
        """Rows of some requests, one request after the other."""
        begins = self.offsets[idxs]
        num_rows = self.offsets[idxs + 1] - begins
        ends = np.cumsum(num_rows)
        first = np.repeat(begins - (ends - num_rows), num_rows)
        rows: NDArray[np.int64] = self.row_idxs[first + np.arange(len(first))]
        return rows


def make_requests(
    prompts: Prompts,
    ranked: RankedPrompts,
    row_idxs: NDArray[np.int64],
    output_tokens: NDArray[np.int64] | None = None,
    *,
    merge: bool,
) -> tuple[Requests, RankedPrompts]:
    """One request per distinct prompt if `merge`, else one per prompt.

    Args:
        prompts: the prompts.
        ranked: the same prompts, sorted.
        row_idxs: [num_prompts] int64, the row of each prompt, ascending.
        output_tokens: [num_prompts] int64, estimates, if any.
        merge: whether equal prompts have equal outputs.

    Returns:
        The requests, and their sorted prompts by request index.
    """
    lengths = prompts.lengths
    ranked_lengths = lengths[ranked.prompt_idxs]
    is_repeat = ranked.num_shared_tokens == ranked_lengths  # of the prompt before
    is_repeat[1:] &= ranked_lengths[1:] == ranked_lengths[:-1]
    is_repeat[:1] = False
    if not merge or not is_repeat.any():
        everyone = np.arange(len(prompts) + 1)
        return Requests(prompts, everyone[:-1], lengths, row_idxs, everyone, output_tokens), ranked
    distinct = ranked.prompt_idxs[~is_repeat]
    kept = np.sort(distinct)  # the first of equal prompts
    number = np.searchsorted(kept, distinct)
    request_of_prompt = np.empty(len(prompts), dtype=np.int64)
    request_of_prompt[ranked.prompt_idxs] = number[np.cumsum(~is_repeat) - 1]
    by_request = np.argsort(request_of_prompt, kind="stable")
    offsets = np.zeros(len(kept) + 1, dtype=np.int64)
    np.cumsum(np.bincount(request_of_prompt), out=offsets[1:])
    if output_tokens is not None:
        output_tokens = np.maximum.reduceat(output_tokens[by_request], offsets[:-1])
    requests = Requests(prompts, kept, lengths[kept], row_idxs[by_request], offsets, output_tokens)
    return requests, RankedPrompts(number, ranked.num_shared_tokens[~is_repeat])


def optimal_saving_ratio(tokens: TokenTable, block_size: int, *, merge: bool) -> float:
    """Eq. 2 for one engine with unbounded memory.

    Args:
        tokens: the prompts of all rows.
        block_size: tokens per block of its KV cache.
        merge: whether equal prompts are one request.

    Raises:
        PlanError: `block_size` is below 1.
    """
    rows = np.arange(len(tokens))
    requests, ranked = make_requests(tokens, sort_prompts(tokens), rows, merge=merge)
    cached = ranked.cached_tokens(requests.lengths, block_size)
    return saving_ratio(int(requests.lengths.sum() - cached.sum()), tokens.num_tokens)
