"""The job that the trials run, and what its output has to be."""

import hashlib
import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

_NUM_PATTERNS: Final = 4
MAX_IN_FLIGHT: Final = 4
SPILL_ROWS: Final = 3
"""In place of `shard_run.SPILL_ROWS`; parts have more."""

Rows = Sequence[Mapping[str, Any]]
Truth = Mapping[str, tuple[str | None, str]]
"""Of each key, the generated text and a carried column."""


@dataclass(frozen=True, slots=True)
class Job:
    """How the rows are cut, and how fast the engine is."""

    num_shards: int
    part_rows: int
    delay_s: float
    """Of the engine, for each request."""


BY_ONE: Final = Job(num_shards=2, part_rows=10, delay_s=0.002)
"""One worker does all of it."""
BY_WORKERS: Final = Job(num_shards=8, part_rows=5, delay_s=0.04)


def input_rows(version: int) -> list[dict[str, str]]:
    """The input as it is on one day, from 0: other documents, and some keys come and go.

    No two versions have a prompt in common, so that nothing is generated already.
    """
    return [
        {
            "row_key": f"d{document}-q{query}",
            "document": f"Version {version} of document {document}. " * 4,
            "query": f"question {query} of version {version}",
        }
        for query in range(8)
        for document in range(10)
        if (document + query - version) % _NUM_PATTERNS
    ]


def job_json(job: Job, tables: Any, staging: str) -> str:
    """The spec."""
    engine = {"byte_tokens": True, "delay_s": job.delay_s, "max_in_flight": MAX_IN_FLIGHT}
    return json.dumps(
        {
            "spec_version": 1,
            "name": "job",
            "input": {"uri": tables.address("documents"), "key": "row_key"},
            "prompt": {"system": "Answer. ", "template": "{document}|{query}"},
            "model": {"path": "no-model"},
            "sampling": {"max_tokens": 8},
            "output": {"uri": tables.address("out"), "carry": ["query"], "staging_uri": staging},
            "engine": {"backend": "fake", "extra_args": engine},
            "planner": {"num_shards": job.num_shards, "part_rows": job.part_rows},
        }
    )


def computed_truth(version: int) -> Truth:
    """What the fake engine says, computed here: it answers a prompt with a digest of its bytes."""
    truth = {}
    for row in input_rows(version):
        prompt = list(f"Answer. {row['document']}|{row['query']}".encode())
        digest = hashlib.sha256(repr(prompt).encode()).hexdigest()[:16]
        truth[row["row_key"]] = (f"fake {digest}", row["query"])
    return truth


@dataclass(slots=True)
class Differences:
    """How many rows of a table aren't as they should be."""

    lost: int = 0
    duplicate: int = 0
    wrong: int = 0

    def __bool__(self) -> bool:
        return bool(self.lost or self.duplicate or self.wrong)


def compare(rows: Rows, truth: Truth) -> Differences:
    """Every row by its key."""
    counts = Counter(row["row_key"] for row in rows)
    return Differences(
        lost=len(truth.keys() - counts.keys()),
        duplicate=sum(count - 1 for count in counts.values()),
        wrong=sum(
            truth.get(row["row_key"]) != (row["generated_text"], row["query"])
            or row["error"] is not None
            for row in rows
        ),
    )


def is_whole(rows: Rows, truth: Truth | None) -> bool:
    """Whether a reader sees exactly one publication; None is a table that hasn't been written."""
    if truth is None:
        return not rows
    return not compare(rows, truth) and len({row["run_id"] for row in rows}) == 1
