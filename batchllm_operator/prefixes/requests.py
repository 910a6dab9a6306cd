"""Requests: distinct prompts, each for one or more rows; and classes of prompts."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from batchllm_operator.errors import PlanError
from batchllm_operator.prefixes.algorithm1 import PrefixGroups, saving_ratio
from batchllm_operator.prefixes.jit import Int64s
from batchllm_operator.prefixes.prefix_tree import RankedPrompts
from batchllm_operator.prefixes.prompt_sort import sort_prompts
from batchllm_operator.prefixes.prompt_store import Prompts
from batchllm_operator.prefixes.token_table import MAX_TOKEN_ID, TokenTable


@dataclass(frozen=True, slots=True, eq=False)
class Requests:
    """Requests in the order of their first rows.

    Attributes:
        prompts: the prompts of all rows that can be prompted.
        prompt_idxs: [num_requests] int64, each request's prompt.
        lengths: [num_requests] int64, its tokens.
        row_idxs: [num_prompts] int64, the rows of request 0, of request 1, ..., each ascending; in
            a job of several prompts the asks (see `JobSpec.questions`), here and wherever the
            requests' rows are counted or numbered.
        offsets: [num_requests + 1] int64 into `row_idxs`.
        output_tokens: [num_requests] int64, the largest estimate of its rows, where a column
            holds them.
    """

    prompts: Prompts
    prompt_idxs: Int64s
    lengths: Int64s
    row_idxs: Int64s
    offsets: Int64s
    output_tokens: Int64s | None = None

    def __len__(self) -> int:
        """Number of requests."""
        return len(self.prompt_idxs)

    @property
    def num_rows(self) -> Int64s:
        """Rows of each request: [num_requests]."""
        return np.diff(self.offsets)

    def questions(self, num_questions: int) -> Int64s:
        """What each request asks: [num_requests] int64, from 0."""
        first_rows: Int64s = self.row_idxs[self.offsets[:-1]]
        return first_rows % num_questions

    def rows_of(self, idxs: Int64s) -> Int64s:
        """Rows of some requests, one request after the other."""
        begins = self.offsets[idxs]
        num_rows = self.offsets[idxs + 1] - begins
        ends = np.cumsum(num_rows)
        first = np.repeat(begins - (ends - num_rows), num_rows)
        rows: Int64s = self.row_idxs[first + np.arange(len(first))]
        return rows


def make_requests(
    prompts: Prompts,
    ranked: RankedPrompts,
    row_idxs: Int64s,
    output_tokens: Int64s | None = None,
    *,
    merge: Sequence[bool],
) -> tuple[Requests, RankedPrompts]:
    """One request per distinct prompt of a question if `merge`, else one per prompt.

    Args:
        row_idxs: [num_prompts] int64, the row of each prompt, ascending.
        output_tokens: [num_prompts] int64, estimates, if any.
        merge: for each question, whether its equal prompts have equal outputs.

    Returns:
        The requests, and their sorted prompts by request index.
    """
    lengths, idxs = prompts.lengths, ranked.prompt_idxs
    ranked_lengths = lengths[idxs]
    is_repeat = ranked.num_shared_tokens == ranked_lengths  # of the prompt before
    is_repeat[1:] &= ranked_lengths[1:] == ranked_lengths[:-1]
    is_repeat[:1] = False
    equal = None
    if len(merge) > 1:
        # Of equal prompts those of one question after the other: LCPs stay as they are.
        asked, equal = row_idxs[idxs] % len(merge), np.cumsum(~is_repeat)
        order = np.lexsort((asked, equal))
        asked, idxs = asked[order], idxs[order]
        is_repeat[1:] &= asked[1:] == asked[:-1]
        is_repeat &= np.array(merge)[asked]
    if not any(merge) or not is_repeat.any():
        everyone = np.arange(len(prompts) + 1)
        return Requests(prompts, everyone[:-1], lengths, row_idxs, everyone, output_tokens), ranked
    distinct = idxs[~is_repeat]
    kept = np.sort(distinct)  # the first of equal prompts
    number = np.searchsorted(kept, distinct)
    request_of_prompt = np.empty(len(prompts), dtype=np.int64)
    request_of_prompt[idxs] = number[np.cumsum(~is_repeat) - 1]
    by_request = np.argsort(request_of_prompt, kind="stable")
    offsets = np.zeros(len(kept) + 1, dtype=np.int64)
    np.cumsum(np.bincount(request_of_prompt), out=offsets[1:])
    if output_tokens is not None:
        output_tokens = np.maximum.reduceat(output_tokens[by_request], offsets[:-1])
    requests = Requests(prompts, kept, lengths[kept], row_idxs[by_request], offsets, output_tokens)
    if equal is not None:
        number = number[np.lexsort((number, equal[~is_repeat]))]
    return requests, RankedPrompts(number, ranked.num_shared_tokens[~is_repeat])


def optimal_saving_ratio(
    tokens: TokenTable, block_size: int, *, merge: Sequence[bool], row_idxs: Int64s | None = None
) -> float:
    """Eq. 2 for one engine with unbounded memory.

    Args:
        tokens: the prompts of all rows.
        block_size: tokens per block of its KV cache.
        merge, row_idxs: see `make_requests`; by default each row has a prompt.

    Raises `PlanError`: `block_size` is below 1.
    """
    rows = np.arange(len(tokens)) if row_idxs is None else row_idxs
    requests, ranked = make_requests(tokens, sort_prompts(tokens), rows, merge=merge)
    cached = ranked.cached_tokens(requests.lengths, block_size)
    return saving_ratio(int(requests.lengths.sum() - cached.sum()), tokens.num_tokens)


@dataclass(frozen=True, slots=True)
class PromptClasses:
    """Classes [0, num_classes) of prompts; two prompts share something only within a class.

    The first token `t` of class `c` is `c * bound + t`, so that sorting, groups and shards keep
    classes apart and side by side without knowing of them. Lengths stay the same.

    Attributes:
        bound: above all token ids of prompts.

    Raises `PlanError`: such tokens don't fit into 31 bits.
    """

    bound: int
    num_classes: int

    def __post_init__(self) -> None:
        if self.bound * self.num_classes - 1 > MAX_TOKEN_ID:
            raise PlanError(
                f"{self.num_classes} classes of prompts with {self.bound} tokens are too many: at"
                f" most {(MAX_TOKEN_ID + 1) // self.bound} can be planned"
            )

    def mark(self, tokens: TokenTable, classes: Int64s) -> TokenTable:
        """The prompts with their classes.

        Args:
            tokens: ids below `bound`; an empty prompt stays so.
            classes: [num_prompts] int64.
        """
        has_token = tokens.lengths > 0
        firsts = tokens.offsets[:-1][has_token]
        token_ids = tokens.token_ids.copy()
        token_ids[firsts] += (classes[has_token] * self.bound).astype(np.int32)
        return TokenTable(token_ids, tokens.offsets)

    def unmark(self, tokens: TokenTable) -> tuple[TokenTable, Int64s]:
        """The prompts as they were before `mark`, and their classes: [num_prompts] int64.

        Args:
            tokens: none of the prompts is empty.
        """
        firsts = tokens.offsets[:-1]
        classes = tokens.token_ids[firsts].astype(np.int64) // self.bound
        token_ids = tokens.token_ids.copy()
        token_ids[firsts] %= self.bound
        return TokenTable(token_ids, tokens.offsets), classes

    def of_groups(self, groups: PrefixGroups, requests: Requests) -> Int64s:
        """The class of each group: [num_groups] int64."""
        prompt_idxs = requests.prompt_idxs[groups.member_idxs[groups.offsets[:-1]]]
        firsts = requests.prompts.slices(prompt_idxs, 0, 1)
        return self.unmark(firsts)[1]
