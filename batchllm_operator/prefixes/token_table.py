"""Token ids of all prompts as one ragged table: the planner's only input."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from batchllm_operator.errors import PlanError
from batchllm_operator.prefixes.jit import compiled

MAX_TOKEN_ID = 2**31 - 1


@dataclass(frozen=True, slots=True, eq=False)
class TokenTable:
    """Prompts as consecutive slices of one array; a prompt may be empty.

    Prompt `idx` is `token_ids[offsets[idx]:offsets[idx + 1]]`. The arrays are held, not
    copied: the caller must not write to them afterwards.

    Attributes:
        token_ids: [num_tokens] int32, C-contiguous, none negative.
        offsets: [num_prompts + 1] int64, C-contiguous, from 0 to num_tokens, never falling.

    Raises:
        PlanError: an array has another dtype or shape, the offsets don't describe
            `token_ids`, or a token id is negative (names the prompt).
    """

    token_ids: NDArray[np.int32]
    offsets: NDArray[np.int64]

    def __post_init__(self) -> None:
        for name, dtype in (("token_ids", np.dtype(np.int32)), ("offsets", np.dtype(np.int64))):
            array = getattr(self, name)
            if array.ndim != 1 or array.dtype != dtype or not array.flags.c_contiguous:
                raise PlanError(
                    f"{name} of a token table must be a contiguous 1-d {dtype} array, "
                    f"not {array.ndim}-d {array.dtype}"
                )
        if not len(self.offsets) or (self.offsets[0], self.offsets[-1]) != (0, len(self.token_ids)):
            raise PlanError(
                f"offsets of a token table must lead from 0 to its {len(self.token_ids)} token ids"
            )
        if np.any(self.lengths < 0):
            raise PlanError(f"offsets fall after prompt {int(np.argmax(self.lengths < 0))}")
        if self.token_ids.min(initial=0) < 0:
            position = int(np.argmax(self.token_ids < 0))
            idx = int(np.searchsorted(self.offsets, position, side="right")) - 1
            raise PlanError(f"prompt {idx} has the negative token id {self.token_ids[position]}")

    @classmethod
    def unchecked(cls, token_ids: NDArray[np.int32], offsets: NDArray[np.int64]) -> TokenTable:
        """A table of arrays that are known to be valid, without checks."""
        table = object.__new__(cls)
        object.__setattr__(table, "token_ids", token_ids)
        object.__setattr__(table, "offsets", offsets)
        return table

    @classmethod
    def from_lists(cls, prompts: Iterable[Sequence[int] | NDArray[Any]]) -> TokenTable:
        """Copies prompts given as sequences of integers.

        Raises:
            PlanError: a prompt isn't a flat sequence of integers, or holds a token id
                below 0 or above 2**31 - 1. The message names the prompt's index.
        """
        arrays = [_as_token_ids(idx, prompt) for idx, prompt in enumerate(prompts)]
        offsets = np.zeros(len(arrays) + 1, dtype=np.int64)
        np.cumsum([len(array) for array in arrays], out=offsets[1:])
        token_ids = np.concatenate(arrays) if arrays else np.empty(0, dtype=np.int32)
        return cls(token_ids=token_ids, offsets=offsets)

    def __len__(self) -> int:
        """Number of prompts."""
        return len(self.offsets) - 1

    @property
    def num_tokens(self) -> int:
        """Logical prefill tokens: all tokens of all prompts."""
        return len(self.token_ids)

    @property
    def lengths(self) -> NDArray[np.int64]:
        """Tokens per prompt: [num_prompts]."""
        return np.diff(self.offsets)

    def prompt(self, idx: int) -> NDArray[np.int32]:
        """Token ids of one prompt, as a view."""
        return self.token_ids[self.offsets[idx] : self.offsets[idx + 1]]

    def to_lists(self) -> list[list[int]]:
        """The prompts as lists of Python's integers, for small tables."""
        return [self.prompt(idx).tolist() for idx in range(len(self))]

    def slices(
        self,
        idxs: NDArray[np.int64],
        begins: NDArray[np.int64] | int,
        num_tokens: NDArray[np.int64] | int,
    ) -> TokenTable:
        """Up to `num_tokens[i]` tokens of each prompt `idxs[i]`, from `begins[i]` on.

        Args:
            idxs: [n] int64 in [0, num_prompts).
            begins: [n] int64 >= 0, or one for all; at most the prompt's length.
            num_tokens: [n] int64 >= 0, or one for all.
        """
        sources = self.offsets[idxs] + begins
        offsets = slice_offsets(self.offsets[idxs + 1] - sources, num_tokens)
        token_ids = np.empty(offsets[-1], dtype=np.int32)
        _copy(self.token_ids, sources, offsets, token_ids)
        return TokenTable.unchecked(token_ids, offsets)

    def take(self, idxs: NDArray[np.integer[Any]] | Sequence[int]) -> TokenTable:
        """A new table with the prompts at `idxs`, in that order; repeats are allowed."""
        wanted = np.asarray(idxs, dtype=np.int64)
        return self.slices(wanted, 0, self.lengths[wanted])


def _as_token_ids(idx: int, prompt: Sequence[int] | NDArray[Any]) -> NDArray[np.int32]:
    """One prompt as int32; refuses values that numpy would round, wrap or truncate."""
    try:
        array = np.asarray(prompt)
    except ValueError as error:
        raise PlanError(f"prompt {idx} is not a flat sequence of token ids") from error
    if array.ndim != 1:
        raise PlanError(f"prompt {idx} is not a flat sequence of token ids")
    if len(array) == 0:
        return np.empty(0, dtype=np.int32)
    if array.dtype.kind not in "iu":  # integers beyond 64 bits arrive as objects or floats
        raise PlanError(f"prompt {idx} has token ids that are not integers below 2**31")
    low, high = int(array.min()), int(array.max())
    if low < 0 or high > MAX_TOKEN_ID:
        raise PlanError(
            f"prompt {idx} has the token id {low if low < 0 else high}, outside [0, {MAX_TOKEN_ID}]"
        )
    return array.astype(np.int32)


def slice_offsets(
    num_left: NDArray[np.int64], num_tokens: NDArray[np.int64] | int
) -> NDArray[np.int64]:
    """Offsets of `num_tokens` tokens each, or of as many as are left: [n + 1]."""
    offsets = np.zeros(len(num_left) + 1, dtype=np.int64)
    np.cumsum(np.minimum(num_tokens, num_left), out=offsets[1:])
    return offsets


@compiled
def _copy(
    source: NDArray[np.int32],
    begins: NDArray[np.int64],
    offsets: NDArray[np.int64],
    target: NDArray[np.int32],
) -> None:
    for item in range(len(begins)):
        start, end = offsets[item], offsets[item + 1]
        target[start:end] = source[begins[item] : begins[item] + end - start]
