"""Token ids of all prompts as one ragged table: the planner's only input."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from batchllm_operator.errors import PlanError
from batchllm_operator.prefixes.jit import Int32s, Int64s, compiled

MAX_TOKEN_ID = 2**31 - 1


@dataclass(frozen=True, slots=True, eq=False)
class TokenTable:
    """Prompts as consecutive slices of one array; a prompt may be empty.

    Prompt `idx` is `token_ids[offsets[idx]:offsets[idx + 1]]`. The arrays are held, not copied,
    and not checked: the caller must not write to them afterwards.

    Attributes:
        token_ids: [num_tokens] int32, C-contiguous, none negative.
        offsets: [num_prompts + 1] int64, C-contiguous, from 0 to num_tokens, never falling.
    """

    token_ids: Int32s
    offsets: Int64s

    @classmethod
    def from_lists(cls, prompts: Iterable[Sequence[int] | NDArray[Any]]) -> TokenTable:
        """Copies prompts given as sequences of integers.

        Raises:
            OverflowError: a token id needs more than 31 bits.
            PlanError: one is negative.
        """
        arrays = [np.asarray(prompt, dtype=np.int32) for prompt in prompts]
        offsets = np.zeros(len(arrays) + 1, dtype=np.int64)
        np.cumsum([len(array) for array in arrays], out=offsets[1:])
        token_ids = np.concatenate([np.empty(0, dtype=np.int32), *arrays])
        if token_ids.min(initial=0) < 0:
            raise PlanError(f"a prompt has the negative token id {token_ids.min()}")
        return cls(token_ids, offsets)

    def __len__(self) -> int:
        """Number of prompts."""
        return len(self.offsets) - 1

    @property
    def num_tokens(self) -> int:
        """Logical prefill tokens: all tokens of all prompts."""
        return len(self.token_ids)

    @property
    def lengths(self) -> Int64s:
        """Tokens per prompt: [num_prompts]."""
        return np.diff(self.offsets)

    def prompt(self, idx: int) -> Int32s:
        """Token ids of one prompt, as a view."""
        return self.token_ids[self.offsets[idx] : self.offsets[idx + 1]]

    def to_lists(self) -> list[list[int]]:
        """The prompts as lists of Python's integers, for small tables."""
        return [self.prompt(idx).tolist() for idx in range(len(self))]

    def slices(self, idxs: Int64s, begins: Int64s | int, num_tokens: Int64s | int) -> TokenTable:
        """Up to `num_tokens[i]` tokens of each prompt `idxs[i]`, from `begins[i]` on.

        Args:
            idxs: [n] int64 in [0, num_prompts).
            begins: [n] int64 >= 0, or one for all; at most the prompt's length.
            num_tokens: [n] int64 >= 0, or one for all.
        """
        sources = self.offsets[idxs] + begins
        sliced = empty_slices(self.offsets[idxs + 1] - sources, num_tokens)
        _copy(self.token_ids, sources, sliced.offsets, sliced.token_ids)
        return sliced

    def take(self, idxs: NDArray[np.integer[Any]] | Sequence[int]) -> TokenTable:
        """A new table with the prompts at `idxs`, in that order; repeats are allowed."""
        wanted = np.asarray(idxs, dtype=np.int64)
        return self.slices(wanted, 0, self.lengths[wanted])


def empty_slices(num_left: Int64s, num_tokens: Int64s | int) -> TokenTable:
    """A table to fill, with `num_tokens` tokens of each prompt, or as many as are left."""
    offsets = np.zeros(len(num_left) + 1, dtype=np.int64)
    np.cumsum(np.minimum(num_tokens, num_left), out=offsets[1:])
    return TokenTable(np.empty(offsets[-1], dtype=np.int32), offsets)


@compiled
def _copy(source: Int32s, begins: Int64s, offsets: Int64s, target: Int32s) -> None:
    for item in range(len(begins)):
        start, end = offsets[item], offsets[item + 1]
        target[start:end] = source[begins[item] : begins[item] + end - start]
