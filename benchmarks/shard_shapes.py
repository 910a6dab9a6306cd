"""Prompts of random tokens that share prefixes on several levels, for `benchmarks.shards`.

All begin with the same 60 tokens. Lengths vary around those given.

    sites           200 sites (220 tokens) x 10 documents (380) x 5 questions (40)
    few_shot        8 tasks with examples (800), 1,250 inputs (200) each
    conversations   the turns (115) of conversations of 1 to 11, each with those before
    documents       1,000 documents (1,500) with 2 to 18 questions (40)
    two_kinds       half of the prompts are short (200) and have long outputs, half are long (2,000)
                    and have short ones: in lexicographic order, the worst case for a mix of both
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final

import numpy as np
from numpy.typing import NDArray

Prompts = list[NDArray[np.int32]]


class Tokens:
    """Random tokens."""

    def __init__(self, seed: int) -> None:
        self.numbers = np.random.default_rng(seed)
        self.instruction = self(60, 60)

    def __call__(self, low: int, high: int) -> NDArray[np.int32]:
        size = self.numbers.integers(low, high + 1)
        return self.numbers.integers(0, 32_000, size, dtype=np.int32)

    def behind(self, prefix: NDArray[np.int32], low: int, high: int) -> NDArray[np.int32]:
        return np.concatenate([prefix, self(low, high)])


def sites(tokens: Tokens, num_prompts: int) -> Prompts:
    prompts = []
    for _ in range(num_prompts // 50):
        site = tokens.behind(tokens.instruction, 180, 260)
        for _ in range(10):
            document = tokens.behind(site, 320, 440)
            prompts += [tokens.behind(document, 20, 60) for _ in range(5)]
    return prompts


def few_shot(tokens: Tokens, num_prompts: int) -> Prompts:
    examples = [tokens.behind(tokens.instruction, 700, 900) for _ in range(8)]
    return [tokens.behind(each, 100, 300) for each in examples for _ in range(num_prompts // 8)]


def conversations(tokens: Tokens, num_prompts: int) -> Prompts:
    prompts: Prompts = []
    while len(prompts) < num_prompts:
        turns = tokens.instruction
        for _ in range(tokens.numbers.integers(1, 12)):
            turns = tokens.behind(turns, 30, 200)
            prompts.append(turns)
    return prompts


def documents(tokens: Tokens, num_prompts: int) -> Prompts:
    prompts = []
    for _ in range(num_prompts // 10):
        document = tokens.behind(tokens.instruction, 500, 2500)
        prompts += [tokens.behind(document, 20, 60) for _ in range(tokens.numbers.integers(2, 19))]
    return prompts


def two_kinds(tokens: Tokens, num_prompts: int) -> Prompts:
    """Behind the instruction one token tells the kinds apart."""
    short, long = (np.append(tokens.instruction, np.int32(kind)) for kind in (0, 1))
    prompts = [tokens.behind(short, 100, 300) for _ in range(num_prompts // 2)]
    return prompts + [tokens.behind(long, 1500, 2500) for _ in range(num_prompts // 2)]


SHAPES: Final[Mapping[str, Callable[[Tokens, int], Prompts]]] = {
    shape.__name__: shape for shape in (sites, few_shot, conversations, documents)
}


def outputs_of(name: str, prompts: Prompts, seed: int) -> NDArray[np.int64]:
    """Outputs around a mean that the prompts of a site, task or document have in common."""
    numbers = np.random.default_rng(seed)
    if name == "two_kinds":
        return np.where(np.arange(len(prompts)) < len(prompts) // 2, 512, 8)
    means: dict[bytes, float] = {}
    outputs = []
    for prompt in prompts:
        mean = means.setdefault(prompt[60:120].tobytes(), 2 ** numbers.uniform(3, 9))
        outputs.append(max(1, round(mean * numbers.uniform(0.7, 1.3))))
    return np.array(outputs, dtype=np.int64)
