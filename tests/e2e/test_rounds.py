"""Rounds on real vLLM: the texts of jobs one after the other, also if the second is killed."""

import os
import signal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from support.demo_job import DS, Demo, live_processes, wait_until
from support.messy_table import answerable, messy_rows

DOCUMENT = "Document: {document}\nQuery: {query}\n"
TOPIC = {"template": DOCUMENT + "Is it about music, yes or no?"}
SNIPPET = {"template": DOCUMENT + "About music: {topic}. Snippet:"}
YES_OR_NO = {"type": "choice", "choices": ["yes", "no"]}
SHORT = {"max_tokens": 8}
FAILURES = {"max_failed_fraction": 0.2, "planner": {"part_rows": 4}}


def by_hand(demo: Demo) -> list[dict[str, Any]]:
    """The rows whose answer to the first prompt is yes, or whose prompt is long, with the answers
    to both: the second job reads a table of the first one's answers."""
    first = demo.run_job(
        "topic", prompt={"system": None, **TOPIC}, response_format=YES_OR_NO, **FAILURES
    )
    answered = zip(messy_rows(), first.table.to_pylist(), strict=True)
    rows = [
        {**row, "topic": found["generated_text"]}
        for row, found in answered
        if found["error"] is None
        and (found["generated_text"] == "yes" or found["num_prompt_tokens"] > 100)
    ]
    folder = demo.folder / "answered" / f"ds={DS}"
    folder.mkdir(parents=True)
    pq.write_table(pa.Table.from_pylist(rows), folder / "rows.parquet")
    second = demo.run_job(
        "snippet", input={"uri": "answered"}, prompt={"system": None, **SNIPPET}, sampling=SHORT
    )
    texts = second.table["generated_text"].to_pylist()
    return [{**row, "snippet": text} for row, text in zip(rows, texts, strict=True)]


def test_two_rounds_give_the_texts_of_two_jobs_though_the_second_is_killed(real: Demo) -> None:
    prompts = {
        "topic": {**TOPIC, "response_format": YES_OR_NO, "sampling": {"max_tokens": 16}},
        "snippet": {
            **SNIPPET,
            "sampling": SHORT,
            "when": "topic == 'yes' or topic.num_prompt_tokens > 100",
        },
    }
    engine = {"max_num_seqs": 4}
    spec = real.write_spec(
        "rounds", prompt=None, sampling=None, prompts=prompts, engine=engine, **FAILURES
    )
    job = ["--job", str(spec), "--ds", DS]
    first = real.run("plan", *job)
    real.run("run", "--plan", first["plan_uri"])
    second = real.run("plan", *job)
    assert (second["round"], second["num_rounds"]) == (2, 2)

    runs = Path(second["plan_uri"]) / "runs" / "shard-00000"
    process = real.start("run", "--plan", second["plan_uri"])
    wait_until(lambda: list(runs.glob("*/part-*.json")), "the first part is written")
    os.kill(process.pid, signal.SIGKILL)
    process.end()
    wait_until(lambda: not live_processes(process.pid), "the engine's processes are gone", 10.0)
    again = real.run("plan", *job)
    assert again["plan_uri"] == second["plan_uri"]
    real.run("run", "--plan", again["plan_uri"])
    report = real.run("commit", "--plan", again["plan_uri"])
    assert report["num_rows_in"] == len(messy_rows())

    found = pq.read_table(real.folder / "out-rounds").to_pylist()
    expected = {row["snippet_id"]: row for row in by_hand(real)}
    assert len(answerable(messy_rows())) > len(expected) > 5
    for row in found:
        wanted = expected.get(row["snippet_id"])
        assert (row["snippet"]["status"] == "skipped") == (wanted is None)
        if wanted is not None:
            assert row["topic"]["generated_text"] == wanted["topic"]
            assert row["snippet"]["generated_text"] == wanted["snippet"]
