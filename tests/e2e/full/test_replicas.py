"""A run with two replicas of vLLM: what it generates, measures and computes together."""

import json
import os
import random
import re
import signal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from support.demo_job import DS, Demo, live_processes, wait_until

from batchllm_operator.commit.commit_run import commit_run
from batchllm_operator.engine.device_profile import StoredProfiles
from batchllm_operator.plan.plan_job import plan_job
from batchllm_operator.runahead.groups import ChainProfile, chain_subject
from batchllm_operator.spec import load_spec
from batchllm_operator.stored_plan.stored_plan import StoredPlan

WORKER = ("--worker", "0", "--num-workers", "1")
GPUS = """
[core]  # of a CPU, about
memory_bytes = 2_000_000_000
hbm_bytes_per_s = 1.0e10
bf16_flop_per_s = 4.0e10
achievable_compute = 0.6
achievable_bandwidth = 0.8
achievable_memory = 0.9
step_overhead_s = 0.002
usd_per_hour = 0.05
"""
# By these, a prefix of 2,000 tokens takes two seconds, and the rest nearly nothing.
STEPS = ((480, 0, 0.48), (960, 0, 0.96), (1920, 0, 1.93), (960, 960, 0.97), (1920, 1920, 1.95))


@pytest.fixture(scope="module")
def giant(demo: Demo) -> Demo:
    """The demo, and a table of one long document with eight queries and some short ones."""
    draw = random.Random(3)
    words = Path(os.__file__).read_text(encoding="utf-8").split()
    texts = [" ".join(draw.choices(words, k=650)), *(f"Short {k}. Enough said." for k in range(4))]
    rows = [
        {"snippet_id": f"{at}-{query}", "document": text, "query": f"question {query}"}
        for query in range(8)
        for at, text in enumerate(texts)
    ]
    folder = demo.folder / "long-documents" / f"ds={DS}"
    folder.mkdir(parents=True)
    pq.write_table(pa.Table.from_pylist(rows), folder / "a.parquet")
    (demo.folder / "gpus.toml").write_text(GPUS, encoding="utf-8")
    return demo


def job(demo: Demo, name: str, num_replicas: int, **changes: Any) -> Path:
    return demo.write_spec(
        name,
        input={"uri": "long-documents"},
        output={"staging_uri": "replicas"},
        sampling=changes.pop("sampling", {"max_tokens": 12, "ignore_eos": True}),
        engine={
            "replicas": num_replicas,
            "max_model_len": None,
            "max_num_batched_tokens": 2048,
            "kv_cache_memory_bytes": 1 << 26,
            **changes.pop("engine", {}),
        },
        planner={"target_gpu": "core", "gpu_table": "gpus.toml", **changes.pop("planner", {})},
        **changes,
    )


def plan(spec: Path) -> StoredPlan:
    """In this process, where the planner has been compiled already."""
    return plan_job(load_spec(spec), DS)


def run(demo: Demo, planned: StoredPlan) -> str:
    """Run all shards with one worker; what it printed."""
    process = demo.start("run", "--plan", planned.folder.uri, *WORKER)
    code, output = process.end()
    assert code == 0, output
    assert not live_processes(process.pid)
    return output


def outputs(demo: Demo, planned: StoredPlan) -> dict[str, dict[str, Any]]:
    """Rows of the published partition, by key."""
    commit_run(planned.folder.uri)
    rows = pq.read_table(demo.folder / f"out-{planned.manifest.spec.name}").to_pylist()
    assert all(row["error"] is None for row in rows)
    return {row["snippet_id"]: row for row in rows}


def test_replicas_measure_and_compute_together_and_the_texts_are_those_of_one_engine(
    giant: Demo,
) -> None:
    alone = plan(job(giant, "alone", 1))
    run(giant, alone)
    expected = outputs(giant, alone)

    # Nobody has measured a link: the groups are whole, and the run measures.
    first = plan(job(giant, "measuring", 2))
    placement = first.manifest.shards[0].replicas
    assert placement is not None
    assert placement.measure
    assert placement.spread == ()
    assert "measuring how fast replicas" in run(giant, first)
    found = outputs(giant, first)
    assert {key: row["generated_text"] for key, row in found.items()} == {
        key: row["generated_text"] for key, row in expected.items()
    }
    spec = first.manifest.spec
    profiles = StoredProfiles.of(spec)
    measured = profiles.find(ChainProfile, chain_subject(spec))
    assert measured is not None
    assert measured.link_bytes_per_s > 1e6
    assert [step[:2] for step in measured.steps][:2] == [(480, 0), (960, 0)]

    # As if the model were slower: what this machine measures changes from one run to the next.
    profiles.keep(ChainProfile(subject=measured.subject, link_bytes_per_s=1e9, steps=STEPS))
    second = plan(job(giant, "together", 2))
    placement = second.manifest.shards[0].replicas
    assert placement is not None
    assert not placement.measure
    (chained,) = placement.spread
    printed = run(giant, second)
    assert f"prefixes computed together: groups {chained.group_id}\n" in printed
    assert "by itself" not in printed
    found = outputs(giant, second)
    assert {key: row["generated_text"] for key, row in found.items()} == {
        key: row["generated_text"] for key, row in expected.items()
    }
    # Each replica computed its chunk, which the group's rows show once: nobody computed it all.
    members = [row for key, row in found.items() if key.startswith("0-")]
    computed = [row["num_prompt_tokens"] - row["num_cached_tokens"] for row in members]
    prefix = sum(chained.split)
    assert prefix <= sum(computed) < 1.5 * prefix


def test_replicas_end_with_their_run_and_another_takes_up_the_shard_of_a_dead_one(
    giant: Demo,
) -> None:
    spec = job(
        giant,
        "killed",
        2,
        engine={"max_num_seqs": 2},
        planner={"runahead": "off", "part_rows": 4},
        sampling={"max_tokens": 24, "ignore_eos": True},
    )
    planned = plan(spec)
    runs = Path(planned.folder.path) / "runs" / "shard-00000"
    arguments = ["run", "--plan", planned.folder.uri, *WORKER]

    process = giant.start(*arguments)
    wait_until(lambda: len(live_processes(process.pid)) == 3, "the replicas have started")
    os.kill(process.pid, signal.SIGKILL)
    process.end()
    wait_until(lambda: not live_processes(process.pid), "the replicas are gone", 10.0)

    process = giant.start(*arguments)
    wait_until(lambda: list(runs.glob("*/part-*.json")), "the first part is written", 300.0)
    (latest, *_) = sorted(runs.glob("*/claim.json"), reverse=True)
    os.kill(json.loads(latest.read_bytes())["process_id"], signal.SIGKILL)
    code, printed = process.end()
    assert code == 0, printed
    assert re.search(r"replicas \[\d\] have failed; others have done their work", printed)
    assert not live_processes(process.pid)
    assert len(outputs(giant, planned)) == 40
