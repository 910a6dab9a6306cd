"""Carry-over between days: what was committed for an equal prompt isn't generated again."""

import json
import logging
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.fake_job import DS, document_rows, expected_prompt, fake_spec, finish, write_table

from batchllm_operator.answers.fakes import fake_text
from batchllm_operator.commit.commit_run import commit_run
from batchllm_operator.errors import SpecError
from batchllm_operator.inspect.gc import find_garbage, remove_garbage
from batchllm_operator.inspect.verify import verify_worker
from batchllm_operator.lake import open_table
from batchllm_operator.plan.earlier_outputs import Reuse, find_indexes
from batchllm_operator.plan.memory import MemoryBudget
from batchllm_operator.plan.plan_job import plan_job
from batchllm_operator.prefixes import TokenTable
from batchllm_operator.prompts.tokenizer import Utf8Tokenizer
from batchllm_operator.report import format_plan, format_summary
from batchllm_operator.run.run_shards import run_worker
from batchllm_operator.shards.reuse_index import (
    INDEX_SCHEMA,
    ReuseIndex,
    fingerprint_array,
    fingerprints_of,
    from_array,
    load_fingerprints,
    reuse_identity,
)
from batchllm_operator.spec import JobSpec
from batchllm_operator.stored_plan.manifest import REUSED_FILE
from batchllm_operator.stored_plan.parquet_files import RowGroupWriter
from batchllm_operator.stored_plan.run_report import RunReport
from batchllm_operator.stored_plan.stored_plan import StoredPlan

NEXT, THIRD = "2026-02-01", "2026-02-02"
FAR_FUTURE = 1e12
Row = dict[str, Any]


def reusing(folder: Path, **changes: Any) -> JobSpec:
    return fake_spec(folder, **{"reuse_outputs": True, **changes})


def put(folder: Path, rows: list[Row], *days: str) -> None:
    for ds in days:
        write_table(folder / "documents", rows, ds)


def changed(rows: list[Row], count: int) -> list[Row]:
    """The rows of a later day: others keys, and `count` of the prompts are new."""
    every = len(rows) // count if count else len(rows) + 1
    return [
        {
            **row,
            "row_key": f"later-{row['row_key']}",
            "query": f"new {row['query']}" if number % every == every - 1 else row["query"],
        }
        for number, row in enumerate(rows)
    ]


def run_and_commit(spec: JobSpec, ds: str = DS) -> tuple[StoredPlan, RunReport]:
    plan = plan_job(spec, ds)
    return plan, finish(plan)


def published(spec: JobSpec, ds: str, *left_out: str) -> list[Row]:
    table = open_table(spec.output.uri, spec.input.partition_column)
    snapshot = table.snapshot(ds)
    columns = [name for name in snapshot.schema.names if name not in left_out]
    return [row for batch in table.scan(snapshot, columns) for row in batch.to_pylist()]


def check_texts(spec: JobSpec, ds: str, rows: list[Row]) -> None:
    """The committed rows are those of the input, with the text of their prompt."""
    found = [(row["row_key"], row["generated_text"]) for row in published(spec, ds)]
    assert found == [
        (row["row_key"], fake_text(list(expected_prompt(row).encode()))) for row in rows
    ]


def index_path(plan: StoredPlan) -> Path:
    return Path(plan.folder.path) / "reuse.parquet"


# What is generated, and what is committed


def test_a_second_day_pays_for_what_has_changed(tmp_path: Path) -> None:
    rows = document_rows(10, 10)
    later = changed(rows, 10)
    put(tmp_path, rows, DS)
    put(tmp_path, later, NEXT)
    spec = reusing(tmp_path)
    first, report = run_and_commit(spec)
    assert (first.manifest.counts.num_reused_rows, report.plan.num_reused_rows) == (0, 0)
    plan, report = run_and_commit(spec, NEXT)
    counts = plan.manifest.counts
    assert (counts.num_requests, counts.num_reused_rows, counts.num_rows) == (10, 90, 100)
    assert (counts.num_duplicate_rows, counts.num_rejected_rows) == (0, 0)
    assert sum(shard.num_rows for shard in plan.manifest.shards) == 10
    assert (report.num_rows_out, report.plan.num_reused_rows) == (100, 90)
    assert report.done.num_output_tokens == 10 * 8
    assert counts.num_logical_tokens == sum(
        len(expected_prompt(row)) for row in later if row["query"].startswith("new")
    )
    check_texts(spec, NEXT, later)
    without = fake_spec(tmp_path, output={"uri": f"{tmp_path}/other"})
    run_and_commit(without, NEXT)
    differing = ("num_cached_tokens", "run_id")
    assert published(spec, NEXT, *differing) == published(without, NEXT, *differing)
    for row, source in zip(published(spec, NEXT), later, strict=True):
        if not source["query"].startswith("new"):
            assert row["num_cached_tokens"] == row["num_prompt_tokens"]
    assert "90 rows reuse" in format_plan(plan.manifest, "x")
    assert ", 90 reused" in format_summary(report)


def test_a_day_on_which_all_is_known_needs_no_shard(tmp_path: Path) -> None:
    rows = document_rows()
    put(tmp_path, rows, DS)
    put(tmp_path, changed(rows, 0), NEXT)
    spec = reusing(tmp_path, planner={"estimated_output_tokens": {"learned": True}})
    run_and_commit(spec)
    plan = plan_job(spec, NEXT)
    assert plan.manifest.shards == ()
    said = format_plan(plan.manifest, "x")
    assert "nothing is left to generate" in said and "tokens saved" not in said
    assert run_worker(plan).shards == verify_worker(plan.folder.uri).shards == {}
    report = commit_run(plan.folder.uri)
    assert (report.num_rows_out, report.plan.num_reused_rows) == (30, 30)
    assert (report.done.num_output_tokens, report.achieved_saving) == (0, None)
    check_texts(spec, NEXT, changed(rows, 0))
    assert commit_run(plan.folder.uri) == report


def test_planning_a_committed_partition_again_generates_what_has_changed(
    tmp_path: Path,
) -> None:
    """It reuses its own rows: another plan at first, which then stays as it is."""
    rows = document_rows()
    put(tmp_path, rows, DS)
    spec = reusing(tmp_path)
    first, _ = run_and_commit(spec)
    before = published(spec, DS, "num_cached_tokens", "run_id")
    second, report = run_and_commit(spec)
    assert report.plan.num_reused_rows == len(rows)
    assert published(spec, DS, "num_cached_tokens", "run_id") == before
    third, _ = run_and_commit(spec)
    assert first.manifest.plan_id != second.manifest.plan_id
    assert third.manifest == second.manifest
    rows[3]["query"] = "a correction"
    put(tmp_path, rows, DS)
    plan, report = run_and_commit(spec)
    assert (plan.manifest.counts.num_requests, report.plan.num_reused_rows) == (1, len(rows) - 1)
    check_texts(spec, DS, rows)


def test_the_partition_itself_goes_before_the_one_before(tmp_path: Path) -> None:
    rows = document_rows()
    later = changed(rows, 5)
    put(tmp_path, rows, DS)
    put(tmp_path, later, NEXT)
    spec = reusing(tmp_path)
    run_and_commit(spec)
    run_and_commit(spec, NEXT)
    put(tmp_path, [*later, *rows], NEXT)  # the old prompts that the new ones replaced
    plan, report = run_and_commit(spec, NEXT)
    assert plan.manifest.shards == ()
    assert report.plan.num_reused_rows == 2 * len(rows)
    check_texts(spec, NEXT, [*later, *rows])


def test_equal_prompts_share_what_is_reused(tmp_path: Path) -> None:
    rows = document_rows(2, 2)
    copies = [{**row, "row_key": f"{row['row_key']}-{n}"} for n in range(3) for row in rows]
    put(tmp_path, copies, DS)
    new = [{**rows[0], "row_key": f"new-{n}", "query": "new"} for n in range(2)]
    put(tmp_path, [*copies, *new], NEXT)
    spec = reusing(tmp_path)
    plan, _ = run_and_commit(spec)
    assert pq.read_metadata(index_path(plan)).num_rows == 4
    plan, report = run_and_commit(spec, NEXT)
    assert (
        report.plan.num_reused_rows,
        report.plan.num_duplicate_rows,
        report.plan.num_requests,
    ) == (12, 1, 1)
    check_texts(spec, NEXT, [*copies, *new])


def test_failed_and_rejected_rows_are_not_reused(tmp_path: Path) -> None:
    rows = document_rows(2, 3)
    rows[1]["query"] = "\x07"
    rows[2]["document"] = None
    put(tmp_path, rows, DS)
    put(tmp_path, rows, NEXT)
    args = {"error_token_id": 7}
    spec = reusing(tmp_path, engine={"extra_args": args}, max_failed_fraction=0.5)
    _, report = run_and_commit(spec)
    assert report.num_failed_rows == 2
    plan, report = run_and_commit(spec, NEXT)
    assert (plan.manifest.counts.num_requests, report.plan.num_reused_rows) == (1, 4)
    assert plan.manifest.counts.num_rejected_rows == 1
    assert report.num_failed_rows == 2


# Where nothing is reused


def reused_after(spec: JobSpec, later: JobSpec) -> int:
    run_and_commit(spec)
    return plan_job(later, NEXT).manifest.counts.num_reused_rows


@pytest.mark.parametrize(
    "changes",
    [
        {"sampling": {"max_tokens": 9}},
        {"sampling": {"max_tokens": 8, "repetition_penalty": 1.1}},
        {"sampling": {"max_tokens": 8, "stop": ["x"]}},
        {"engine": {"max_model_len": 5000}},
        {"engine": {"dtype": "float16"}},
        {"engine": {"extra_args": {"max_in_flight": 3}}},
        {"model": {"trust_remote_code": True}},
        {"reuse_outputs": False},
        {"name": "other", "output": {"uri": "other"}},
    ],
)
def test_other_settings_reuse_nothing(tmp_path: Path, changes: dict[str, Any]) -> None:
    put(tmp_path, document_rows(), DS, NEXT)
    if "output" in changes:
        changes = {**changes, "output": {"uri": f"{tmp_path}/other"}}
    assert reused_after(reusing(tmp_path), reusing(tmp_path, **changes)) == 0


@pytest.mark.parametrize("what", ["model_version", "fingerprint"])
def test_another_model_reuses_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    put(tmp_path, document_rows(), DS, NEXT)
    run_and_commit(reusing(tmp_path))
    assert plan_job(reusing(tmp_path), NEXT).manifest.counts.num_reused_rows == 30
    monkeypatch.setattr(Utf8Tokenizer, what, "another")
    assert plan_job(reusing(tmp_path), NEXT).manifest.counts.num_reused_rows == 0


def test_tuning_and_wording_of_the_template_still_reuse(tmp_path: Path) -> None:
    """What counts is the prompt's tokens, not how the template came to them."""
    put(tmp_path, document_rows(), DS, NEXT)
    tuned = reusing(
        tmp_path,
        engine={"max_num_seqs": 4, "attention": "batchllm"},
        planner={"num_shards": 3},
        prompt={"system": None, "template": "Answer. {document}|{query}"},
    )
    assert reused_after(reusing(tmp_path), tuned) == 30


def test_a_job_that_has_not_asked_before_keeps_no_index(tmp_path: Path) -> None:
    put(tmp_path, document_rows(), DS, NEXT)
    plan, _ = run_and_commit(fake_spec(tmp_path))
    names = set(plan.folder.find())
    assert not names & {"reuse.parquet", REUSED_FILE, "fingerprints.parquet"}
    assert json.loads(plan.folder.read_bytes("committed.json"))["reuse_sha256"] is None
    assert plan_job(reusing(tmp_path), NEXT).manifest.counts.num_reused_rows == 0


def _flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (_flip, "checksum"),
        (lambda path: path.unlink(), "reuse.parquet"),
        (lambda path: (path.parent / "committed.json").write_bytes(b"{}"), "as committed"),
        (lambda path: (path.parent / "committed.json").unlink(), "as committed"),
        (lambda path: (path.parent / "manifest.json").unlink(), "manifest.json"),
    ],
)
def test_a_spoilt_index_is_none(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, spoil: Any, said: str
) -> None:
    put(tmp_path, document_rows(), DS, NEXT)
    plan, _ = run_and_commit(reusing(tmp_path))
    spoil(index_path(plan))
    with caplog.at_level(logging.WARNING):
        plan, report = run_and_commit(reusing(tmp_path), NEXT)
    assert report.plan.num_reused_rows == 0
    assert f"partition {DS}: no outputs are reused" in caplog.text
    assert said in caplog.text
    check_texts(reusing(tmp_path), NEXT, document_rows())


def test_an_empty_partition_does_not_break_the_chain(tmp_path: Path) -> None:
    rows = document_rows()
    put(tmp_path, rows, DS)
    schema = pa.Table.from_pylist(rows).schema
    (tmp_path / "documents" / f"ds={NEXT}").mkdir()
    pq.write_table(schema.empty_table(), tmp_path / "documents" / f"ds={NEXT}" / "a.parquet")
    put(tmp_path, rows, THIRD)
    spec = reusing(tmp_path, on_empty="commit")
    run_and_commit(spec)
    run_and_commit(spec, NEXT)
    assert plan_job(spec, THIRD).manifest.counts.num_reused_rows == len(rows)


# What lies in the lake


def test_the_index_outlives_gc_and_a_plan_outlives_the_index(tmp_path: Path) -> None:
    rows = document_rows()
    put(tmp_path, rows, DS, NEXT, THIRD)
    spec = reusing(tmp_path)
    first, _ = run_and_commit(spec)
    second, _ = run_and_commit(spec, NEXT)
    waiting = plan_job(spec, THIRD)
    remove_garbage(find_garbage(spec, before=FAR_FUTURE, ds=DS)[0])
    remove_garbage(find_garbage(spec, before=FAR_FUTURE, ds=NEXT)[0])
    for plan in (first, second):
        kept = {"manifest.json", "turn.json", "report.json", "report.html", "committed.json"}
        kept.add("reuse.parquet")
        assert set(plan.folder.find()) == kept
    index_path(second).unlink()
    assert commit_run(waiting.folder.uri).plan.num_reused_rows == len(rows)
    assert plan_job(spec, "2026-02-01").manifest.counts.num_reused_rows == len(rows)


def test_a_commit_that_died_before_its_note_writes_the_index_again(tmp_path: Path) -> None:
    put(tmp_path, document_rows(), DS, NEXT)
    spec = reusing(tmp_path)
    plan, _ = run_and_commit(spec)
    before = index_path(plan).read_bytes()
    index_path(plan).unlink()
    (Path(plan.folder.path) / "committed.json").unlink()
    assert plan_job(spec, NEXT).manifest.counts.num_reused_rows == 0
    commit_run(plan.folder.uri)
    assert index_path(plan).read_bytes() == before
    assert plan_job(spec, NEXT).manifest.counts.num_reused_rows == 30


def test_an_index_that_does_not_fit_is_refused(tmp_path: Path) -> None:
    put(tmp_path, document_rows(), DS, NEXT)
    spec = reusing(tmp_path)
    run_and_commit(spec)
    tokenizer = Utf8Tokenizer(spec)
    identity = reuse_identity(spec, "none", "utf-8", tokenizer.max_model_len)
    least = MemoryBudget(0, 0).least_bytes(0)
    assert find_indexes(spec, NEXT, identity, MemoryBudget(least + 30 * 32, 0), tmp_path)
    with pytest.raises(SpecError, match="memory_budget_bytes"):
        find_indexes(spec, NEXT, identity, MemoryBudget(least + 30 * 32 - 1, 0), tmp_path)


# Fingerprints and files


@given(st.lists(st.lists(st.integers(0, 300), max_size=5), max_size=20))
def test_fingerprints_are_equal_where_prompts_are(prompts: list[list[int]]) -> None:
    found = fingerprints_of(TokenTable.from_lists(prompts))
    assert len(set(found.tolist())) == len({tuple(prompt) for prompt in prompts})
    assert (from_array(fingerprint_array(found)) == found).all()


def test_fingerprints_never_change() -> None:
    """Or a release would reuse nothing of the one before, or the wrong thing."""
    found = fingerprints_of(TokenTable.from_lists([[1, 2, 3], [], [2**31 - 1]]))
    assert fingerprint_array(found)[0].as_py().hex() == "b30a3c159d7e8193559a42a84f1fcae1"


@given(
    known=st.lists(st.integers(0, 12), max_size=12),
    asked=st.lists(st.integers(0, 12), max_size=25),
    pieces=st.integers(1, 9),
)
def test_every_known_row_gets_the_output_of_its_prompt(
    tmp_path_factory: pytest.TempPathFactory, known: list[int], asked: list[int], pieces: int
) -> None:
    """Even of an index that has prompts twice. Rows that can't be prompted lie in between."""
    folder = tmp_path_factory.mktemp("reuse")
    prints = fingerprints_of(TokenTable.from_lists([[number] for number in known]))
    texts = [str(number) for number in known]
    counts = pa.array(known, pa.int32())
    columns = [fingerprint_array(prints), pa.array(texts, pa.string()), texts, counts, counts]
    with RowGroupWriter(folder / "index.parquet", INDEX_SCHEMA) as writer:
        writer.write(pa.table(columns, schema=INDEX_SCHEMA))
    index = ReuseIndex("x", folder / "index.parquet", np.sort(prints))
    with Reuse([index], folder) as reuse:
        new = []
        for start in range(0, len(asked), pieces):
            piece = asked[start : start + pieces]
            rows = 2 * np.arange(start, start + len(piece)) + 1
            taken = reuse.take(TokenTable.from_lists([[number] for number in piece]), rows)
            new += [number for number, is_known in zip(piece, taken, strict=True) if not is_known]
        reuse.finish(2 * len(asked) + 1)
    assert new == [number for number in asked if number not in known]
    found = pq.read_table(folder / REUSED_FILE).to_pylist()
    got = {row: int(entry["generated_text"]) for entry in found for row in entry["row_idxs"]}
    assert got == {2 * n + 1: number for n, number in enumerate(asked) if number in known}
    assert sum(len(entry["row_idxs"]) for entry in found) == reuse.num_rows == len(got)
    of_rows = load_fingerprints(folder / "fingerprints.parquet")
    assert len(of_rows) == 2 * len(asked) + 1 and not of_rows[::2].any()


@pytest.mark.parametrize("pieces", [1, 2, 7, 100])
def test_bytes_do_not_depend_on_the_pieces(tmp_path: Path, pieces: int) -> None:
    schema = pa.schema([pa.field("x", pa.int64())])
    for name, size in (("whole", 100), ("pieces", pieces)):
        with RowGroupWriter(tmp_path / name, schema, 8) as writer:
            for start in range(0, 30, size):
                writer.write(pa.table({"x": list(range(30))[start : start + size]}, schema=schema))
    assert (tmp_path / "whole").read_bytes() == (tmp_path / "pieces").read_bytes()
    found = pq.ParquetFile(tmp_path / "pieces")
    assert found.read()["x"].to_pylist() == list(range(30))
    assert found.metadata.num_row_groups == 4
