"""KV-Runahead against placing whole groups and against recomputing, on replicas of one core each.

Groups with a prefix of 4,096 tokens and eight members each, in fp32 with vLLM on a CPU. In every
run all replicas begin at the same time with empty caches:

    whole_group  each group on one replica, one after another
    recompute    every replica computes every prefix, and has its share of the members
    runahead     chains of all replicas compute the prefixes, one after another; then as above
    chosen       what `choose_placement` chooses, by steps that were timed before; left out
                 where it is one of the above

`makespan_s` ends with the last output of all replicas, `ttft_s` with the first token of a member of
group 0; medians over repetitions, in which policies take turns. `tokens_equal`: all outputs are
those of one replica that has done all groups alone. That says something if prompts have outputs of
their own: `num_distinct_outputs`, of `num_outputs`.

    python -m benchmarks.runahead
    python -m benchmarks.runahead --groups 1 3 --repetitions 5
"""

import argparse
import json
import multiprocessing
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Final

import numpy as np

from batchllm_operator.cost import GPU, model_shape
from batchllm_operator.errors import PlanError
from batchllm_operator.runahead.placement import GroupLoads, Placement, choose_placement
from batchllm_operator.runahead.prediction import Chain, ReplicaCost, Split
from benchmarks.provenance import print_last_line, provenance
from benchmarks.runahead.replica import BLOCK_SIZE, ENVIRONMENT, MODEL, serve_timed
from benchmarks.runahead.work import ReplicaWork, Sizes, place

POLICIES: Final = ("whole_group", "recompute", "runahead")
_START_S: Final = 0.2
"""From the last preparation to the common start."""
_ONE_CORE: Final = GPU("one core", 8e9, 8e9, 5e10, 1.0, 1.0, 1.0, 4e-3, 0.0)
"""What isn't timed: reading weights and KV in decoding."""
_MOST_TIMINGS: Final = 48
"""Of a step, until a longer one must take longer."""
_TARGETS: Final = (
    ("TTFT, one group, runahead over whole_group", 0.65),
    ("makespan, one group, runahead over the better of the others", 0.75),
    ("makespan, three groups, runahead over the better of the others", 0.95),
    ("makespan, the choice over the best, the worst number of groups", 1.05),
)


class Replicas:
    """Processes that work at the same time, one on each core.

    Raises:
        RuntimeError: one of them fails.
    """

    def __init__(self, connections: Sequence[Connection]) -> None:
        self._connections = connections
        self._answers()

    def run(self, works: Sequence[ReplicaWork]) -> list[dict[str, Any]]:
        """Have all do their work; returns what each says of it."""
        self.ask("prepare", *works)
        return self.ask("go", *[(time.monotonic() + _START_S,)] * len(works))

    def ask(self, method: str, *arguments: Sequence[Any]) -> list[Any]:
        """Call a method of all, with the arguments of each; returns their results."""
        for connection, given in zip(self._connections, arguments, strict=True):
            connection.send((method, tuple(given), {}))
        return self._answers()

    def _answers(self) -> list[Any]:
        answers = [connection.recv() for connection in self._connections]
        for rank, (kind, *what) in enumerate(answers):
            if kind == "error":
                raise RuntimeError(f"replica {rank}: {': '.join(what)}")
        return [result for _, result in answers]


@contextmanager
def started(num_replicas: int, sizes: Sizes, max_groups: int) -> Iterator[Replicas]:
    """Replicas, which end with the context."""
    os.environ.update(ENVIRONMENT)
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) < num_replicas:
        sys.exit(f"{num_replicas} replicas need a core each; there are {len(cores)}")
    shape = model_shape(MODEL, "runahead", bytes_per_kv_element=4.0)
    room = (max_groups + 1) * (sizes.prefix + sizes.members * (sizes.distinct + sizes.output + 64))
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory(prefix="batchllm-bench-") as folder:
        Path(folder, "config.json").write_text(json.dumps(MODEL), encoding="utf-8")
        processes, connections = [], []
        for rank in range(num_replicas):
            here, there = context.Pipe()
            settings = {
                "place": (rank, num_replicas, f"{folder}/store"),
                "core": cores[rank],
                "sizes": sizes,
                "model": folder,
                "max_num_batched_tokens": sizes.prefix + 16 * BLOCK_SIZE,
                "kv_cache_memory_bytes": int(room * shape.kv_bytes_per_token),
            }
            process = context.Process(target=serve_timed, args=(there, settings), daemon=True)
            process.start()
            there.close()
            processes.append(process)
            connections.append(here)
        try:
            yield Replicas(connections)
        finally:
            for connection in connections:
                connection.close()
            for process in processes:
                process.join(30)
                if process.is_alive():
                    process.kill()


def calibrate(replicas: Replicas, num_replicas: int, sizes: Sizes) -> ReplicaCost:
    """Rates of a replica while the others work too: the slowest one's.

    A busy machine can hide that longer steps take longer; then more of them are timed.

    Raises:
        PlanError: it does so even with `_MOST_TIMINGS` of each step.
    """
    part = sizes.prefix // 4 // BLOCK_SIZE * BLOCK_SIZE
    steps = [(part, 0), (2 * part, 0), (sizes.prefix, 0), (part, part), (2 * part, 2 * part)]
    shape = model_shape(MODEL, "runahead", bytes_per_weight=4.0, bytes_per_kv_element=4.0)
    cost = ReplicaCost.of(shape, _ONE_CORE)
    repetitions = 3
    while True:
        timed = replicas.ask("time_steps", *[(steps, repetitions)] * num_replicas)
        slowest = [max(each) for each in zip(*timed, strict=True)]
        try:
            return cost.calibrated([(*step, s) for step, s in zip(steps, slowest, strict=True)])
        except PlanError:
            repetitions *= 4
            if repetitions > _MOST_TIMINGS:
                raise


@dataclass(frozen=True, slots=True)
class Outcome:
    """Of one run."""

    makespan_s: float
    ttft_s: float
    tokens: Mapping[str, Sequence[int]]
    failures: tuple[str, ...]


def run_once(replicas: Replicas, works: Sequence[ReplicaWork]) -> Outcome:
    """A run of all replicas."""
    results = replicas.run(works)
    return Outcome(
        makespan_s=max(each["end_s"] for each in results),
        ttft_s=min(each["first_s"]["0"] for each in results if "0" in each["first_s"]),
        tokens={name: tokens for each in results for name, tokens in each["tokens"].items()},
        failures=tuple(each["failure"] for each in results if each["failure"]),
    )


def works_of(
    policy: str, sizes: Sizes, num_groups: int, num_replicas: int, split: Split, chosen: Placement
) -> list[ReplicaWork]:
    """What each replica does under a policy."""
    everything = range(num_groups)
    spread: dict[str, tuple[Sequence[int], Split | None]] = {
        "whole_group": ((), None),
        "recompute": (everything, None),
        "runahead": (everything, split),
        "chosen": (list(chosen.splits), split),
    }
    idxs, chain_split = spread[policy]
    return place(sizes, num_groups, num_replicas, spread=idxs, split=chain_split)


def chosen_policy(placement: Placement, num_groups: int) -> str:
    """The policy that a placement is; `chosen` if it is a mixture."""
    if not placement.splits:
        return "whole_group"
    return "chosen" if len(placement.splits) < num_groups else "runahead"


def measure(args: argparse.Namespace, replicas: Replicas, sizes: Sizes) -> dict[str, Any]:
    """All rows, and what was chosen."""
    num_replicas = args.replicas
    cost = calibrate(replicas, num_replicas, sizes)
    measured = min(replicas.ask("link_bytes_per_s", *[()] * num_replicas))
    chain = Chain(
        cost,
        num_replicas,
        args.link_bytes_per_s or measured,
        block_size=BLOCK_SIZE,
        max_chunk_blocks=sizes.prefix // BLOCK_SIZE + 16,
    )
    split = chain.split(sizes.prefix)
    prefix_s = cost.step_seconds(sizes.prefix)
    print(f"{prefix_s:.2f} s a prefix; {measured:.3g} bytes/s a link; split {split}", flush=True)
    alone = place(sizes, max(args.groups), 1, spread=(), split=None)
    idle = [ReplicaWork([], [])] * (num_replicas - 1)
    expected = run_once(replicas, [*alone, *idle]).tokens
    members = sizes.members
    load = (sizes.prefix, members, members * sizes.distinct, members * sizes.output)
    rows, choices = [], {}
    for num_groups in args.groups:
        loads = GroupLoads(*np.full((num_groups, 4), load, dtype=np.float64).T)
        chosen = choose_placement(loads, chain)
        choice = chosen_policy(chosen, num_groups)
        policies = [*POLICIES, *(["chosen"] if choice == "chosen" else [])]
        outcomes: dict[str, list[Outcome]] = {policy: [] for policy in policies}
        for _ in range(args.repetitions):
            for policy in policies:
                works = works_of(policy, sizes, num_groups, num_replicas, split, chosen)
                outcomes[policy].append(run_once(replicas, works))
        wanted = {name: tokens for name, tokens in expected.items() if _group(name) < num_groups}
        for policy, repeated in outcomes.items():
            row = {"groups": num_groups, "policy": policy, **summary(repeated, wanted)}
            rows.append(row)
            print(" ".join(f"{name}={value}" for name, value in row.items()), flush=True)
        choices[str(num_groups)] = {
            "policy": choice,
            "runahead_idxs": list(chosen.splits),
            "predicted_s": round(chosen.makespan_s, 4),
            "predicted_without_s": round(chosen.without_s, 4),
        }
    return {
        "rows": rows,
        "choices": choices,
        "split": split,
        "measured_link_bytes_per_s": measured,
        "num_outputs": len(expected),
        "num_distinct_outputs": len({tuple(tokens) for tokens in expected.values()}),
    }


def summary(outcomes: Sequence[Outcome], tokens: Mapping[str, Sequence[int]]) -> dict[str, Any]:
    """Of a policy's repetitions; `tokens` are those that each should have made."""
    makespans = [outcome.makespan_s for outcome in outcomes]
    return {
        "makespan_s": round(statistics.median(makespans), 4),
        "ttft_s": round(statistics.median(outcome.ttft_s for outcome in outcomes), 4),
        "tokens_equal": all(outcome.tokens == tokens for outcome in outcomes),
        "least_makespan_s": round(min(makespans), 4),
        "most_makespan_s": round(max(makespans), 4),
        "failures": sorted({reason for outcome in outcomes for reason in outcome.failures}),
    }


def _group(request_id: str) -> int:
    return int(request_id.partition("-")[0])


def targets(rows: Sequence[Mapping[str, Any]], choices: Mapping[str, Any]) -> list[dict[str, Any]]:
    """What was to be reached, and what was; null where it wasn't measured."""
    makespans = {(row["groups"], row["policy"]): row["makespan_s"] for row in rows}
    ttfts = {(row["groups"], row["policy"]): row["ttft_s"] for row in rows}

    def over_others(num_groups: int) -> float | None:
        if (num_groups, "runahead") not in makespans:
            return None
        others = [makespans[num_groups, policy] for policy in POLICIES[:2]]
        ours = "chosen" if (num_groups, "chosen") in makespans else "runahead"
        return float(makespans[num_groups, ours] / min(others))

    ttft = ttfts[1, "runahead"] / ttfts[1, "whole_group"] if (1, "runahead") in ttfts else None
    regrets = [
        makespans[int(groups), choice["policy"]]
        / min(makespans[int(groups), policy] for policy in POLICIES)
        for groups, choice in choices.items()
    ]
    reached = (ttft, over_others(1), over_others(3), max(regrets, default=None))
    return [
        {
            "measure": name,
            "at_most": most,
            "measured": None if value is None else round(value, 3),
            "is_met": None if value is None else value <= most,
        }
        for (name, most), value in zip(_TARGETS, reached, strict=True)
    ]


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__.partition("\n\n")[0], prog="python -m benchmarks.runahead"
    )
    parser.add_argument("--groups", type=int, nargs="+", default=[1, 2, 3, 4, 5, 6])
    parser.add_argument("--replicas", type=int, default=2)
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--prefix-tokens", type=int, default=Sizes().prefix)
    parser.add_argument("--members", type=int, default=Sizes().members, help="of each group")
    parser.add_argument("--link-bytes-per-s", type=float, help="predict with it, not as measured")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, help="also write the last line here")
    args = parser.parse_args(argv)
    if args.replicas < 2 or min(args.groups) < 1 or args.repetitions < 1:
        parser.error("it takes two replicas, a group and a repetition at least")
    return args


def main() -> int:
    """0 if all tokens are equal and no chain failed, else 1."""
    args = parse_args()
    sizes = Sizes(prefix=args.prefix_tokens, members=args.members, seed=args.seed)
    with started(args.replicas, sizes, max(args.groups)) as replicas:
        report = measure(args, replicas, sizes)
    judged = targets(report["rows"], report["choices"])
    for each in judged:
        print(f"{each['measure']}: {each['measured']}, at most {each['at_most']}")
    report = {
        "benchmark": "runahead",
        **report,
        "targets": judged,
        "replicas": args.replicas,
        "prefix_tokens": sizes.prefix,
        "members": sizes.members,
        "distinct_tokens": sizes.distinct,
        "output_tokens": sizes.output,
        "repetitions": args.repetitions,
        "seed": args.seed,
        **provenance(),
    }
    print_last_line(report, args.json)
    has_all = all(row["tokens_equal"] and not row["failures"] for row in report["rows"])
    return 0 if has_all else 1


if __name__ == "__main__":
    sys.exit(main())
