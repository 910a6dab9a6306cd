"""How far KV-Runahead's rules are from the best of all splits, and of all sets of groups.

    python -m benchmarks.runahead_rules
    python -m benchmarks.runahead_rules --cases 200 --seed 1

Chains are drawn at random: 1 to 80 layers, from matrices alone to attention alone, links from free
to hopeless, with and without limits on a chunk. `chosen` and `even` are the worst shares by which
our split and even chunks take longer than the best of all splits: overall, and for long chunks of
many layers. `placement` is the choice of groups to chain, against all sets of up to six groups. The
last line is a JSON object; the exit code is 1 if a split of long chunks takes over 1 % longer than
the best, or if over 2 % of all splits do so by more than the least gain that is asked of a chain,
or if over 2 % of the placements do.
"""

import argparse
import json
import statistics
import sys
from collections.abc import Iterable
from itertools import chain as concatenated
from itertools import combinations
from typing import Any, Final

import numpy as np

from batchllm_operator.runahead.placement import MARGIN, GroupLoads, Makespans, choose_placement
from batchllm_operator.runahead.prediction import Chain, ReplicaCost, Split
from benchmarks.provenance import provenance

MOST_LONGER: Final = 0.01
MOST_MISSED: Final = 0.02
_BLOCKS: Final = {2: 4000, 3: 300, 4: 70, 5: 36}
"""Most blocks of a prefix, by the number of replicas: some 50,000 splits."""
_CPU: Final = ReplicaCost(12, 9e-6, 2.1e-5, 1.7e-8, 4096.0, weights_s=2e-4, step_overhead_s=4e-3)


def draw_chain(generator: np.random.Generator) -> tuple[Chain, int]:
    """A chain and a prefix of which all splits can be tried."""

    def one_of(*values: float) -> float:
        return float(generator.choice(values))

    p, block_size = int(generator.choice(list(_BLOCKS))), int(one_of(1, 16, 64))
    num_blocks = int(p * (_BLOCKS[p] / p) ** generator.random())
    token_s, qkv_share = one_of(1e-7, 1e-6, 1e-4), one_of(0.05, 0.25, 0.5)
    cost = ReplicaCost(
        num_layers=int(generator.integers(1, 81)),
        qkv_s_per_token=token_s * qkv_share,
        other_s_per_token=token_s * (1 - qkv_share),
        s_per_pair=token_s * one_of(0.0, 1e-5, 1e-4, 1e-3, 1e-2),
        kv_bytes_per_token=one_of(512, 4096, 16384),
        weights_s=token_s * one_of(0, 0, 50, 300),
        kv_copy_s_per_token=token_s * one_of(0.0, 0.02),
        step_overhead_s=one_of(0.0, 1e-3),
    )
    rate = cost.kv_bytes_per_token / token_s * 10.0 ** generator.uniform(-1, 4)
    even = -(-num_blocks // p)
    limit = int(generator.integers(even, 2 * even + 1)) if generator.integers(2) else num_blocks
    num_tokens = num_blocks * block_size - int(generator.integers(block_size))
    return Chain(cost, p, rate, block_size, limit), num_tokens


def has_long_chunks(chain: Chain, num_tokens: int) -> bool:
    """Whether neither whole blocks, nor reading the weights, nor the first layer's transfers decide
    where the best split is.
    """
    mean_chunk, cost = num_tokens / chain.num_replicas, chain.cost
    return (
        mean_chunk >= 16 * chain.block_size
        and mean_chunk * cost.s_per_token >= 3 * cost.weights_s
        and cost.num_layers >= 12
    )


def even_split(chain: Chain, num_tokens: int) -> Split:
    """Chunks of equal numbers of blocks (the paper's KVR-E)."""
    return chain.split_at(lambda begin, left: begin + (num_tokens - begin) / left, num_tokens)


def least_seconds(chain: Chain, num_tokens: int) -> float:
    """Predicted seconds of the best of all splits."""
    num_blocks, p = -(-num_tokens // chain.block_size), chain.num_replicas
    ends = np.array(list(combinations(range(1, num_blocks), p - 1)), dtype=np.int64)
    bounds = np.zeros((len(ends), p + 1), dtype=np.int64)
    bounds[:, 1:-1], bounds[:, -1] = ends * chain.block_size, num_tokens
    return float(chain.seconds(np.diff(bounds, axis=1)).min())


def draw_loads(generator: np.random.Generator) -> GroupLoads:
    """One to six groups."""
    num = int(generator.integers(1, 7))
    members = generator.choice([1.0, 3, 8, 40], num)
    return GroupLoads(
        generator.choice([64.0, 500, 1024, 4096, 6000], num),
        members,
        members * generator.choice([0.0, 10, 200], num),
        members * generator.choice([0.0, 1, 30], num),
    )


def placement_regret(chain: Chain, loads: GroupLoads) -> float:
    """By what share the chosen placement takes longer than the best set of groups."""
    makespans = Makespans(loads, chain, 1024)
    best_s = min(map(makespans.seconds, all_subsets(makespans.splits)))
    return choose_placement(loads, chain).makespan_s / best_s - 1


def all_subsets(idxs: Iterable[int]) -> Iterable[tuple[int, ...]]:
    """All sets of some groups."""
    some = list(idxs)
    return concatenated.from_iterable(combinations(some, num) for num in range(len(some) + 1))


def measure(num_cases: int, seed: int) -> dict[str, Any]:
    """All cases; shares are of the best's time."""
    generator = np.random.default_rng(seed)
    rows: list[list[float]] = []
    is_long: list[bool] = []
    regrets: list[float] = []
    for _ in range(num_cases):
        chain, num_tokens = draw_chain(generator)
        splits = [chain.split(num_tokens), even_split(chain, num_tokens)]
        seconds = chain.seconds(np.array(splits))
        rows.append((seconds / least_seconds(chain, num_tokens) - 1).tolist())
        is_long.append(has_long_chunks(chain, num_tokens))
        replicas = Chain(_CPU, int(generator.integers(2, 4)), 10.0 ** generator.uniform(6, 9))
        regrets.append(placement_regret(replicas, draw_loads(generator)))
    shares, most = np.array(rows), MARGIN / (1 - MARGIN)
    chosen, even = shares.max(axis=0).round(5).tolist()
    return {
        "num_cases": num_cases,
        "num_long_chunks": sum(is_long),
        "worst_share_longer": {"chosen": chosen, "even": even},
        "worst_of_long_chunks": round(float(shares[is_long, 0].max(initial=0.0)), 5),
        "num_chosen_over_margin": int((shares[:, 0] > most).sum()),
        "worst_placement": round(max(regrets), 4),
        "mean_placement": round(statistics.mean(regrets), 4),
        "num_placements_over_margin": sum(regret > most for regret in regrets),
    }


def main() -> int:
    """0 if no split and no placement takes much longer than the best, else 1."""
    parser = argparse.ArgumentParser(
        description=__doc__.partition("\n\n")[0], prog="python -m benchmarks.runahead_rules"
    )
    parser.add_argument("--cases", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    if args.cases < 1:
        parser.error("it takes a case at least")
    report = measure(args.cases, args.seed)
    print(json.dumps({"benchmark": "runahead_rules", **report, "seed": args.seed, **provenance()}))
    missed = max(report["num_chosen_over_margin"], report["num_placements_over_margin"])
    is_near = report["worst_of_long_chunks"] <= MOST_LONGER
    return 0 if is_near and missed <= MOST_MISSED * args.cases else 1


if __name__ == "__main__":
    sys.exit(main())
