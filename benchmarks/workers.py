"""How evenly workers end, whatever happens to them.

    python -m benchmarks.workers                 # a minute or two
    python -m benchmarks.workers --seeds 0 1

A job of 200 shards of about two minutes each is run by eight workers (ADR 33) in
simulated time. Claims, progress, parts and reports are real, on a local lake; engines are fake
(`simulated_machines`). The cases:

    as_given   nothing happens
    slow       one worker takes three times as long for each request
    killed     one worker's machine is gone at half, the time when eight would have done half of it
    joining    two more workers start at half, with `--num-workers 10`; the eight keep theirs

A request stands for a hundred of a real job's. A stretch of the order as long as a shard takes up
to 10 % more or less than planned, drawn by the seed. An engine starts in 60 s. It holds 20 of a
shard's 50 requests, as vLLM does with 2,048 of 5,000, and so the worker claims its next shard that
much earlier. A part is half of a shard.

    makespan        seconds until the last shard is finished / ideal
    num_takeovers   attempts at shards beyond the first
    runs            these for each seed, and `ideal_s`; a row has those of the seed with the
                    longest makespan

The ideal is when the machines would have done the work if it could be cut at any point and nothing
were lost. Each works at its own speed, from the end of its engine's first start until it is
killed. So every makespan contains the engines' starts, but no ratio counts the unavoidable first.

Each run is committed, and the table is compared with the prompts: there are no figures unless every
row is there once, with its own text.
"""

import argparse
import io
import json
import math
import sys
import tempfile
from collections.abc import Sequence
from contextlib import redirect_stderr
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, Final
from unittest.mock import patch

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from batchllm_operator.answers.fakes import fake_text
from batchllm_operator.commit.commit_run import commit_run
from batchllm_operator.engine import EngineRequest
from batchllm_operator.plan.plan_job import plan_job
from batchllm_operator.run.shard_queue import ShardQueue
from batchllm_operator.shards.attempts import attempt_numbers
from batchllm_operator.spec import parse_spec
from batchllm_operator.stored_plan.stored_plan import StoredPlan
from benchmarks.provenance import print_last_line, provenance
from benchmarks.simulated_machines import Machine, Place, Simulation

DS: Final = "2026-01-31"
NUM_WORKERS: Final = 8
NUM_SHARDS: Final = 200
SHARD_REQUESTS: Final = 50
SHARD_S: Final = 120.0
NOISE: Final = 0.1
START_S: Final = 60.0
LOOK_AHEAD: Final = 0.4
"""Requests in an engine: share of a shard's."""
_NUM_PARTS: Final = 2
_SHARE_DEGREE: Final = 5
_DIGITS: Final = 6
"""Of a document's number, with which its prompts begin."""


@dataclass(frozen=True, slots=True)
class Case:
    name: str
    target: float
    slowness: float = 1.0
    """Of worker 3."""
    is_killed: bool = False
    """Worker 3, at half."""
    num_joining: int = 0


CASES: Final = (
    Case("as_given", 1.03),
    Case("slow", 1.10, slowness=3.0),
    Case("killed", 1.15, is_killed=True),
    Case("joining", 1.10, num_joining=2),
)
_ODD_ONE: Final = 3


class Job:
    """The input, what it takes, and the table it should become.

    Attributes:
        work_s: what all of it takes on one machine as given.
        half_s: half of the time that eight need.
    """

    def __init__(self, root: Path, num_shards: int, shard_requests: int, seed: int) -> None:
        self._lake = root / "lake"
        self.num_shards, self._shard_requests = num_shards, shard_requests
        self.look_ahead = math.ceil(LOOK_AHEAD * shard_requests)
        num_requests = num_shards * shard_requests
        stretches = np.random.default_rng(seed).uniform(1 - NOISE, 1 + NOISE, num_shards)
        numbers = np.arange(num_requests) // _SHARE_DEGREE
        of_document = numbers[::_SHARE_DEGREE] * _SHARE_DEGREE // shard_requests
        self._document_s = stretches[of_document] * (SHARD_S / shard_requests)
        self.work_s = float(self._document_s[numbers].sum())
        self.half_s = START_S + self.work_s / NUM_WORKERS / 2
        self._prompts = [
            f"{number:0{_DIGITS}}: a document|{idx % _SHARE_DEGREE}"
            for idx, number in enumerate(numbers.tolist())
        ]
        folder = self._lake / "documents" / f"ds={DS}"
        folder.mkdir(parents=True)
        keys = [str(idx) for idx in range(num_requests)]
        pq.write_table(pa.table({"row_key": keys, "prompt": self._prompts}), folder / "a.parquet")

    def seconds(self, request: EngineRequest) -> float:
        return float(self._document_s[int(bytes(request.prompt_token_ids[:_DIGITS]))])

    def plan(self, name: str) -> StoredPlan:
        """A plan for a table of its own."""
        spec = {
            "spec_version": 1,
            "name": name,
            "input": {"uri": f"{self._lake}/documents", "key": "row_key"},
            "prompt": {"template": "{prompt}"},
            "model": {"path": "no-model"},
            "sampling": {"max_tokens": 8},
            "output": {"uri": f"{self._lake}/{name}"},
            "engine": {"backend": "fake", "extra_args": {"byte_tokens": True}},
            "planner": {
                "num_shards": self.num_shards,
                "part_rows": math.ceil(self._shard_requests / _NUM_PARTS),
            },
        }
        return plan_job(parse_spec(spec, source="benchmark"), DS)

    def commit(self, plan: StoredPlan) -> None:
        """Publish a finished run, and stop unless each row is there once, with its own text."""
        commit_run(plan.folder.uri)
        published = pq.read_table(self._lake / plan.manifest.spec.name / f"ds={DS}")
        texts = {row["row_key"]: row["generated_text"] for row in published.to_pylist()}
        expected = {str(i): fake_text(list(p.encode())) for i, p in enumerate(self._prompts)}
        if published.num_rows != len(expected) or texts != expected:
            sys.exit(f"{plan.folder.uri}: the table isn't what was to be generated; no figures")


def places_of(case: Case, half_s: float) -> list[Place]:
    """Those of the eight workers, then those that join."""
    places = [Place()] * NUM_WORKERS
    dies_at = half_s if case.is_killed else math.inf
    places[_ODD_ONE] = Place(case.slowness, dies_at=dies_at)
    return places + [Place(begins_at=half_s)] * case.num_joining


def ideal_s(work_s: float, places: Sequence[Place]) -> float:
    """When the machines could have done the work, each from the end of its engine's start on."""
    spans = [(p.begins_at + START_S, p.dies_at, 1 / p.slowness) for p in places]
    changes = sorted({at for begin, end, _ in spans for at in (begin, end)} | {math.inf})
    for at, until in pairwise(changes):
        speed = sum(each for begin, end, each in spans if begin <= at < end)
        if work_s <= speed * (until - at):
            return at + work_s / speed
        work_s -= speed * (until - at)
    raise AssertionError("machines without end")


def measure(job: Job, case: Case) -> dict[str, Any]:
    """The figures of a case; its table is published, and checked."""
    places = places_of(case, job.half_s)
    ideal = ideal_s(job.work_s, places)
    plan, simulation = job.plan(f"{case.name}_workers"), Simulation()
    machines = []
    for number, place in enumerate(places):
        # One that joins has the number of all.
        num_workers = len(places) if place.begins_at else NUM_WORKERS
        shards = ShardQueue(plan, number, num_workers, clock=simulation.clock, now=simulation.now)
        machine = Machine(
            *(simulation, plan, shards, job.seconds, place),
            look_ahead=job.look_ahead,
            start_s=START_S,
        )
        machines.append(machine)
    simulation.run()
    for machine in machines:
        machine.discard()
    job.commit(plan)
    attempts = [len(attempt_numbers(plan.run_folder(idx))) for idx in range(job.num_shards)]
    return {
        "makespan": round(simulation.finished_at / ideal, 4),
        "ideal_s": round(ideal, 1),
        "num_takeovers": sum(attempts) - job.num_shards,
    }


def row_of(
    case: Case,
    seeds: Sequence[int],
    num_shards: int = NUM_SHARDS,
    shard_requests: int = SHARD_REQUESTS,
) -> dict[str, Any]:
    """The worst of all seeds for workers, and each one's figures."""
    runs = []
    for seed in seeds:
        with tempfile.TemporaryDirectory(prefix="batchllm-workers-") as root:
            job = Job(Path(root), num_shards, shard_requests, seed)
            runs.append({"seed": seed, **measure(job, case)})
    worst = max(runs, key=lambda run: run["makespan"])
    return {
        "case": case.name,
        "makespan": worst["makespan"],
        "target": case.target,
        "num_takeovers": worst["num_takeovers"],
        "num_shards": num_shards,
        "runs": runs,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    names = [case.name for case in CASES]
    parser.add_argument("--cases", nargs="+", default=names, choices=names)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--json", type=Path, help="a file for the last line, too")
    args = parser.parse_args()
    rows = []
    for case in (case for case in CASES if case.name in args.cases):
        # Progress lines would be of real time, and the lake need not survive a crash.
        with redirect_stderr(io.StringIO()), patch("os.fsync", lambda descriptor: None):
            rows.append(row_of(case, args.seeds))
        print(json.dumps(rows[-1]), flush=True)
    report = {
        "benchmark": "workers",
        "rows": rows,
        "num_workers": NUM_WORKERS,
        "shard_requests": SHARD_REQUESTS,
        "seeds": args.seeds,
        **provenance(),
    }
    print_last_line(report, args.json)


if __name__ == "__main__":
    main()
