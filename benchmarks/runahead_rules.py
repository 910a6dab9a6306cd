"""How far KV-Runahead's rules are from the best of all splits, and of all sets of groups.

    python -m benchmarks.runahead_rules
    python -m benchmarks.runahead_rules --cases 200 --seed 1

Chains are drawn at random: 1 to 80 layers, from matrices alone to attention alone, links from free
to hopeless, with and without limits on a chunk. `closed_form`, `chosen` (the closed form where the
rule trusts it, else a searched split) and `even` are the worst shares by which a split takes longer
than the best of all, overall and where the rule trusts the closed form. `placement` is that of the
groups that are spread, against all sets of up to six groups. The last line is a JSON object; the
exit code is 1 if a closed form that the rule trusts takes over 1 % longer, or if over 2 % of the
chosen splits do, or over 2 % of the placements miss more than the least gain that is asked for.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from itertools import chain as concatenated
from itertools import combinations
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from batchllm_operator.runahead.placement import MARGIN, GroupLoads, Makespans, choose_placement
from batchllm_operator.runahead.prediction import Chain, ReplicaCost
from batchllm_operator.runahead.split import (
    closed_form,
    even_split,
    is_closed_form_near,
    split_prefixes,
)
from benchmarks.provenance import provenance

MOST_LONGER: Final = 0.01
MOST_MISSED: Final = 0.02
_BLOCKS: Final = {2: 4000, 3: 300, 4: 70, 5: 36}
"""Most blocks of a prefix, by the number of replicas: some 50,000 splits."""


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
    latency_s = token_s * one_of(0, 1, 100)
    num_tokens = num_blocks * block_size - int(generator.integers(block_size))
    return Chain(cost, p, rate, latency_s, block_size, limit), num_tokens


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
    chosen = choose_placement(loads, chain)
    lengths = loads.prefix_tokens.astype(int).tolist()
    chainable = [idx for idx, length in enumerate(lengths) if chain.can_split(length)]
    by_length = split_prefixes(chain, [lengths[idx] for idx in chainable])
    splits = {idx: by_length[lengths[idx]] for idx in chainable}
    makespans = Makespans(loads, chain, 1024, splits)
    best_s = min(
        makespans.seconds(idxs, chained=chained)
        for chained, candidates in ((True, chainable), (False, range(len(loads))))
        for idxs in all_subsets(candidates)
    )
    return chosen.makespan_s / best_s - 1


def all_subsets(idxs: Any) -> Any:
    """All sets of some groups."""
    return concatenated.from_iterable(combinations(idxs, num) for num in range(len(idxs) + 1))


def measure(num_cases: int, seed: int) -> dict[str, Any]:
    """All cases; shares are of the best's time."""
    generator = np.random.default_rng(seed)
    rows: list[list[float]] = []
    is_near: list[bool] = []
    times: list[float] = []
    regrets: list[float] = []
    cpu = ReplicaCost(12, 9e-6, 2.1e-5, 1.7e-8, 4096.0, weights_s=2e-4, step_overhead_s=4e-3)
    for _ in range(num_cases):
        chain, num_tokens = draw_chain(generator)
        started_at = time.perf_counter()
        chosen = split_prefixes(chain, [num_tokens])[num_tokens]
        times.append(time.perf_counter() - started_at)
        splits = [closed_form(chain, num_tokens), chosen, even_split(chain, num_tokens)]
        seconds: NDArray[np.float64] = chain.seconds(np.array(splits))
        rows.append((seconds / least_seconds(chain, num_tokens) - 1).tolist())
        is_near.append(is_closed_form_near(chain, num_tokens))
        replicas = Chain(cpu, int(generator.integers(2, 4)), 10.0 ** generator.uniform(6, 9))
        regrets.append(placement_regret(replicas, draw_loads(generator)))
    shares, near = np.array(rows), np.array(is_near)
    names = ("closed_form", "chosen", "even")
    return {
        "num_cases": num_cases,
        "num_closed_form": int(near.sum()),
        "worst_share_longer": dict(zip(names, shares.max(axis=0).round(5).tolist(), strict=True)),
        "worst_closed_form_by_rule": round(float(shares[near, 0].max(initial=0.0)), 5),
        "num_chosen_over_limit": int((shares[:, 1] > MOST_LONGER).sum()),
        "median_split_s": round(statistics.median(times), 6),
        "worst_placement": round(max(regrets), 4),
        "mean_placement": round(statistics.mean(regrets), 4),
        "num_placements_over_margin": sum(regret > MARGIN / (1 - MARGIN) for regret in regrets),
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
    missed = max(report["num_chosen_over_limit"], report["num_placements_over_margin"])
    is_near = report["worst_closed_form_by_rule"] <= MOST_LONGER
    return 0 if is_near and missed <= MOST_MISSED * args.cases else 1


if __name__ == "__main__":
    sys.exit(main())
