"""How good the searched splits of KV-Runahead are, and how long the search takes.

    python -m benchmarks.runahead_search
    python -m benchmarks.runahead_search --chains 200 --seed 1

Chains are drawn at random: 1 to 12 layers, from matrices alone to attention alone, hops from free
to hopeless, with and without limits on a chunk. Each searched split is compared with the best of
all, for both goals. The last line is a JSON object; the exit code is 1 if a split takes over 2 %
longer.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import statistics
import sys
import time
from collections.abc import Sequence
from typing import Any, Final

import numpy as np

from batchllm_operator.runahead.planning import (
    Chain,
    Goal,
    Link,
    ReplicaCost,
    search_split,
)
from benchmarks.exhaustive_split import exhaustive_split
from benchmarks.provenance import provenance

MOST_LONGER: Final = 0.02
"""By what share a searched split may take longer than the best."""
_BLOCKS: Final = {2: (4100, 20_000), 3: (100, 350), 4: (35, 72), 5: (23, 36)}
"""By the number of replicas, from and to: more splits than the search's first grid has, which would
try all of them, and some 60,000 at most."""
_GOALS: Final[tuple[Goal, ...]] = ("first_token", "whole_prefix")
_MANY: Final = (8, 32_768)
"""Replicas and tokens of the search that is timed alone: too many splits to try."""


@dataclasses.dataclass(frozen=True, slots=True)
class Case:
    """What a split is searched for."""

    chain: Chain
    num_tokens: int
    num_replicas: int


def draw(generator: np.random.Generator) -> Case:
    """A case of which all splits can be tried."""

    def one_of(*values: float) -> float:
        return float(generator.choice(values))

    token_s, qkv_share = one_of(1e-7, 1e-6, 1e-4), one_of(0.05, 0.25, 0.5)
    cost = ReplicaCost(
        num_layers=int(generator.integers(1, 13)),
        qkv_s_per_token=token_s * qkv_share,
        other_s_per_token=token_s * (1 - qkv_share),
        s_per_pair=token_s * one_of(0.0, 1e-5, 1e-4, 1e-3, 1e-2),
        kv_bytes_per_token=one_of(512, 4096, 16384),
        weights_s=token_s * one_of(0, 50, 300),
        kv_copy_s_per_token=token_s * one_of(0.0, 0.02),
        overhead_s=token_s * one_of(0, 100, 800),
        step_overhead_s=one_of(0.0, 1e-3),
        sampled_token_s=token_s * one_of(0.0, 1.0),
        computes_masked_pairs=bool(generator.integers(2)),
    )
    link = Link(
        one_of(1e6, 1e8, 1e9, 1e10, 1e11, 1e13),
        one_of(0.0, 1e-5, 1e-3),
        prefetches=bool(generator.integers(2)),
    )
    block_size, p = int(one_of(1, 16, 32)), int(generator.choice(list(_BLOCKS)))
    num_blocks = int(generator.integers(*_BLOCKS[p], endpoint=True))
    num_tokens = num_blocks * block_size - int(generator.integers(block_size))
    even = -(-num_blocks // p)
    longest = int(generator.integers(even, 2 * even + 1)) * block_size
    limit = longest if generator.integers(2) else None
    return Case(Chain(cost, link, block_size, limit), num_tokens, p)


def longer(case: Case, until: Goal) -> tuple[float, float]:
    """By what share the searched split takes longer than the best, and seconds of the search."""
    started_at = time.perf_counter()
    found = search_split(case.chain, case.num_tokens, case.num_replicas, until)
    search_s = time.perf_counter() - started_at
    best = exhaustive_split(case.chain, case.num_tokens, case.num_replicas, until)
    reached, least = case.chain.seconds(np.array([found, best], dtype=np.int64), until)
    return float(reached / least - 1), search_s


def measure(num_chains: int, seed: int) -> dict[str, Any]:
    """All cases, both goals each; and the time of one search with many replicas."""
    generator = np.random.default_rng(seed)
    shares, times = [], []
    worst: tuple[float, Case, Goal] | None = None
    for _ in range(num_chains):
        case = draw(generator)
        for until in _GOALS:
            share, search_s = longer(case, until)
            shares.append(share)
            times.append(search_s)
            if worst is None or share > worst[0]:
                worst = share, case, until
    assert worst is not None  # there is at least one chain
    many, num_tokens = _MANY
    chain = Chain(ReplicaCost(32, 2e-6, 6e-6, 2e-9, 4096.0), Link(1e10), 16)
    started_at = time.perf_counter()
    search_split(chain, num_tokens, many, "whole_prefix")
    return {
        "num_searches": len(shares),
        "worst_share_longer": round(max(shares), 5),
        "num_over_half_a_percent": sum(share > 0.005 for share in shares),
        "num_over_limit": sum(share > MOST_LONGER for share in shares),
        "median_search_s": round(statistics.median(times), 5),
        "search_of_many_s": round(time.perf_counter() - started_at, 3),
        "many": {"replicas": many, "tokens": num_tokens},
        "worst": {"until": worst[2], **dataclasses.asdict(worst[1])},
    }


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__.partition("\n\n")[0], prog="python -m benchmarks.runahead_search"
    )
    parser.add_argument("--chains", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args(argv)
    if args.chains < 1:
        parser.error("it takes a chain at least")
    return args


def main() -> int:
    """0 if all searched splits are within 2 % of the best, else 1."""
    args = parse_args()
    longer(draw(np.random.default_rng(args.seed)), "first_token")  # compiles what is timed
    found = measure(args.chains, args.seed)
    report = {"benchmark": "runahead_search", **found, "seed": args.seed, **provenance()}
    print(json.dumps(report))
    return 0 if report["num_over_limit"] == 0 else 1


if __name__ == "__main__":
    sys.exit(main())
