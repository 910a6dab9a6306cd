"""Prompts shaped like the paper's case 1, any of which can be made at any time.

An instruction that all share, a document that `share_degree` prompts share, and a distinct part
each, in random order. Tokens are hashes of what they belong to and of their position, so a set
of millions of prompts needs no memory, and any part of it is the same whenever it is made.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from batchllm_operator.prefixes import TokenTable
from batchllm_operator.prefixes.jit import compiled

VOCABULARY = 50_000
_BATCH = 4096  # prompts made at a time


@dataclass(frozen=True, slots=True)
class Shape:
    """Sizes in tokens, but `num_prompts` and `share_degree` (prompts per document)."""

    num_prompts: int
    share_degree: int
    instruction_tokens: int
    prefix_tokens: int
    distinct_tokens: int
    seed: int

    @classmethod
    def from_args(cls, args: argparse.Namespace, num_prompts: int) -> Shape:
        """As the flags of `add_flags` say."""
        names = ("share_degree", "instruction_tokens", "prefix_tokens", "distinct_tokens", "seed")
        return cls(num_prompts, *(getattr(args, name) for name in names))

    @property
    def tokens_per_prompt(self) -> int:
        return self.instruction_tokens + self.prefix_tokens + self.distinct_tokens

    @property
    def num_tokens(self) -> int:
        return self.num_prompts * self.tokens_per_prompt

    def numbers(self) -> NDArray[np.int64]:
        """The number of the prompt at each index; its document is number // share_degree."""
        return np.random.default_rng(self.seed).permutation(self.num_prompts)

    def prompts(self, numbers: NDArray[np.int64]) -> TokenTable:
        """Prompts by number."""
        rows = np.empty((len(numbers), self.tokens_per_prompt), dtype=np.int32)
        document_end = self.instruction_tokens + self.prefix_tokens
        _fill(rows, numbers, self.share_degree, self.instruction_tokens, document_end, self.seed)
        offsets = np.arange(len(numbers) + 1, dtype=np.int64) * self.tokens_per_prompt
        return TokenTable(rows.reshape(-1), offsets)

    def batches(self) -> Iterator[TokenTable]:
        """All prompts in the order of their indexes."""
        numbers = self.numbers()
        for begin in range(0, self.num_prompts, _BATCH):
            yield self.prompts(numbers[begin : begin + _BATCH])


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Flags for all but the number of prompts."""
    parser.add_argument("--share-degree", type=int, default=7, help="prompts per document")
    parser.add_argument("--prefix-tokens", type=int, default=1100, help="tokens of a document")
    parser.add_argument("--distinct-tokens", type=int, default=400)
    parser.add_argument("--instruction-tokens", type=int, default=32)
    parser.add_argument("--seed", type=int, default=0)


@compiled
def _fill(
    rows: NDArray[np.int32],
    numbers: NDArray[np.int64],
    share_degree: int,
    instruction_end: int,
    document_end: int,
    seed: int,
) -> None:
    for row in range(len(rows)):
        for position in range(rows.shape[1]):
            if position < instruction_end:
                owner = 0
            elif position < document_end:
                owner = 1 + 2 * (numbers[row] // share_degree)
            else:
                owner = 2 + 2 * numbers[row]
            value = np.uint64(owner) * np.uint64(0x9E3779B97F4A7C15)
            value ^= np.uint64(position + (seed << 32)) * np.uint64(0xD1B54A32D192ED03)
            value = (value ^ (value >> np.uint64(29))) * np.uint64(0xBF58476D1CE4E5B9)
            rows[row, position] = (value >> np.uint64(32)) % np.uint64(VOCABULARY)
