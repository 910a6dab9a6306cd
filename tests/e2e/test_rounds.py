"""Rounds on real vLLM: the texts of jobs one after the other, also if the second is killed."""

import json
import os
import signal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from support.demo_job import DS, Demo, live_processes, wait_until
from support.messy_table import answerable, messy_rows

from batchllm_operator.commit.commit_run import commit_run
from batchllm_operator.plan.plan_job import plan_job

DOCUMENT = "Document: {document}\nQuery: {query}\n"
TOPIC = {"template": DOCUMENT + "Is it about music, yes or no?"}
SNIPPET = {"template": DOCUMENT + "About music: {topic}. Snippet:"}
YES_OR_NO = {"type": "choice", "choices": ["yes", "no"]}
SHORT = {"max_tokens": 8}
FEW_AT_ONCE = {
    "engine": {"max_num_seqs": 4},
    "planner": {"part_rows": 4},
    "max_failed_fraction": 0.2,  # rows without a document or a query
}


def by_hand(demo: Demo) -> list[dict[str, Any]]:
    """The rows whose answer to the first prompt is yes, or whose prompt is long, with the answers
    to both: the second job reads a table of the first one's answers."""
    first = demo.run_job(
        "topic", prompt={"system": None, **TOPIC}, response_format=YES_OR_NO, **FEW_AT_ONCE
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
        "snippet",
        input={"uri": "answered"},
        prompt={"system": None, **SNIPPET},
        sampling=SHORT,
        **FEW_AT_ONCE,
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
    spec = real.write_spec("rounds", prompt=None, sampling=None, prompts=prompts, **FEW_AT_ONCE)
    first = plan_job(spec, DS)
    real.warm.run(first.folder.uri)
    second = plan_job(spec, DS)
    assert second.manifest.before == first.manifest.plan_id

    process = real.start("run", "--plan", second.folder.uri)
    runs = Path(second.folder.path) / "runs" / "shard-00000"
    wait_until(lambda: list(runs.glob("*/part-*.json")), "the first part is written", 300.0)
    os.kill(process.pid, signal.SIGKILL)
    assert process.end()[0] == -signal.SIGKILL
    wait_until(lambda: not live_processes(process.pid), "the engine's processes are gone", 10.0)
    num_parts = len(list(runs.glob("*/part-*.json")))
    again = plan_job(spec, DS)
    assert again.manifest == second.manifest
    real.warm.run(again.folder.uri)
    report = json.loads((runs / "report.json").read_bytes())
    assert report["num_resumed_parts"] == num_parts < report["num_parts"]
    assert commit_run(again).num_rows_in == len(messy_rows())

    found = pq.read_table(real.folder / "out-rounds").to_pylist()
    expected = {row["snippet_id"]: row for row in by_hand(real)}
    assert len(answerable(messy_rows())) > len(expected) > 5
    for row in found:
        wanted = expected.get(row["snippet_id"])
        assert (row["snippet"]["status"] == "skipped") == (wanted is None)
        if wanted is not None:
            assert row["topic"]["generated_text"] == wanted["topic"]
            assert row["snippet"]["generated_text"] == wanted["snippet"]
