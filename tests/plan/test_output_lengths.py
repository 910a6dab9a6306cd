"""Output lengths: constant, from a column, or learned from what the job published before."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from support.answers_job import run_and_commit
from support.fake_job import DS, document_rows, fake_spec, write_table

from batchllm_operator.commit.commit_run import commit_run
from batchllm_operator.engine import EngineOutput, EngineRequest
from batchllm_operator.engine.fake import FakeEngine
from batchllm_operator.errors import SpecError
from batchllm_operator.plan.output_lengths import (
    Learned,
    estimate_output_tokens,
    learn_output_lengths,
)
from batchllm_operator.plan.plan_job import plan_job
from batchllm_operator.prefixes import PrefixGroups, Requests, TokenTable
from batchllm_operator.report import format_plan
from batchllm_operator.shards.group_lengths import LENGTHS_SCHEMA
from batchllm_operator.spec import JobSpec
from batchllm_operator.stored_plan.manifest import LearnedOutputs, LengthBucket
from batchllm_operator.stored_plan.stored_plan import StoredPlan

LEARN = {"estimated_output_tokens": {"learned": True}}
NOTHING = np.zeros(0, dtype=np.int64)


def column_spec(folder: Path, **changes: Any) -> JobSpec:
    planner = {"num_shards": 1, "estimated_output_tokens": {"column": "expected"}}
    return fake_spec(folder, planner=planner, **changes)


def plan_order(plan: StoredPlan) -> list[int]:
    """Rows in the order in which they will be generated."""
    tables = [pq.read_table(plan.folder.full_path(s.file)) for s in plan.manifest.shards]
    return [row[0] for table in tables for row in table["row_idxs"].to_pylist()]


def requests_of(lengths: list[int]) -> Requests:
    tokens = TokenTable.from_lists([[1] * length for length in lengths])
    idxs = np.arange(len(lengths) + 1, dtype=np.int64)
    return Requests(tokens, idxs[:-1], tokens.lengths, idxs[:-1], idxs)


def estimate_alone(
    spec: JobSpec,
    requests: Requests,
    learned: Learned | None,
    hashes: npt.NDArray[np.int64] | None = None,
) -> npt.NDArray[np.int64]:
    """For requests that are all groups of one."""
    everyone = np.arange(len(requests) + 1)
    groups = PrefixGroups(everyone[:-1], everyone, np.zeros(len(requests), dtype=np.int64))
    unknown = np.full((len(requests), 2), -1)
    asked, known = requests.questions(1), unknown if hashes is None else hashes
    return estimate_output_tokens(spec, requests, asked, learned, groups, known)


# Constant


@pytest.mark.parametrize(("estimate", "expected"), [(None, 8), (3, 3), (100, 8)])
def test_a_constant_is_at_most_max_tokens(
    tmp_path: Path, estimate: int | None, expected: int
) -> None:
    spec = fake_spec(tmp_path, planner={"estimated_output_tokens": estimate})
    found = estimate_alone(spec, requests_of([1, 5]), None)
    assert found.tolist() == [expected] * 2


@pytest.mark.parametrize("source", [None, 2_000_000_000, {"column": "expected"}])
def test_no_output_is_longer_than_the_model_leaves_room_for(
    tmp_path: Path, source: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """The engine ends it there, so neither the plan nor its price may count on more."""
    rows = [
        {"row_key": n, "document": "x" * (20 * n), "query": "?", "expected": 1_999_999_999}
        for n in range(3)
    ]
    write_table(tmp_path / "documents", rows)
    spec = fake_spec(
        tmp_path,
        sampling={"max_tokens": 2_000_000_000},
        engine={"max_model_len": 64},
        planner={"estimated_output_tokens": source, "num_shards": 1},
    )
    plan = plan_job(spec, DS)
    assert "sampling.max_tokens: 2000000000 is never reached" in caplog.text
    table = pq.read_table(plan.folder.full_path(plan.manifest.shards[0].file))
    lengths = table["prompt_token_ids"].combine_chunks().value_lengths().to_numpy()
    assert sorted(lengths) == [10, 30, 50]
    assert (table["num_output_tokens"].to_numpy() == 64 - lengths).all()


def test_more_output_than_the_model_allows_cannot_be_asked_for(tmp_path: Path) -> None:
    write_table(tmp_path / "documents", [{"row_key": 0, "document": "x", "query": "?"}])
    spec = fake_spec(
        tmp_path, sampling={"max_tokens": 100, "min_tokens": 64}, engine={"max_model_len": 64}
    )
    with pytest.raises(SpecError, match=r"sampling\.min_tokens: 64 .* at most 64 tokens"):
        plan_job(spec, DS)


# Column


def test_a_column_orders_the_plan(tmp_path: Path) -> None:
    """What decodes longest after as much prefill goes first; null is max_tokens."""
    expected = [1, 7, None, 4, -5]
    rows = [
        {"row_key": n, "document": f"{n} is the document", "query": "?", "expected": value}
        for n, value in enumerate(expected)
    ]
    write_table(tmp_path / "documents", rows)
    plan = plan_job(column_spec(tmp_path, prompt={"system": None}), DS)
    assert plan_order(plan) == [2, 1, 3, 0, 4]
    assert plan.manifest.learned is None


def test_rejected_rows_have_no_estimate(tmp_path: Path) -> None:
    rows = [
        {"row_key": n, "document": None if n == 0 else str(n), "query": "?", "expected": n}
        for n in range(4)
    ]
    write_table(tmp_path / "documents", rows)
    spec = column_spec(tmp_path, prompt={"system": None}, max_failed_fraction=0.5)
    assert plan_order(plan_job(spec, DS)) == [3, 2, 1]


def test_the_column_must_be_there_and_hold_integers(tmp_path: Path) -> None:
    write_table(tmp_path / "documents", document_rows(2, 2))
    for column, said in (("nothing", "no column 'nothing'"), ("query", "not integers")):
        planner = {"estimated_output_tokens": {"column": column}}
        with pytest.raises(SpecError, match=rf"planner\.estimated_output_tokens: .*{said}"):
            plan_job(fake_spec(tmp_path, planner=planner), DS)
    assert not (tmp_path / "out").exists()


# Learned


Lengths = Callable[[list[int]], int]


@pytest.fixture
def answer_lengths(monkeypatch: pytest.MonkeyPatch) -> Callable[[Lengths], None]:
    """Sets how long the fake engine's answers are, by the prompt's tokens."""
    answer = FakeEngine._answer

    def set_lengths(length_of: Lengths) -> None:
        def as_long(self: FakeEngine, request: EngineRequest, *args: Any) -> EngineOutput:
            output = answer(self, request, *args)
            fields = {name: getattr(output, name) for name in output.__slots__}
            num_tokens = length_of(list(request.prompt_token_ids))
            return EngineOutput(**{**fields, "num_output_tokens": num_tokens})

        monkeypatch.setattr(FakeEngine, "_answer", as_long)

    return set_lengths


@pytest.fixture
def short_answers(answer_lengths: Callable[[Lengths], None]) -> None:
    """The fake engine answers with a tenth of the prompt's tokens."""
    answer_lengths(lambda prompt: len(prompt) // 10)


@pytest.fixture
def curt_and_long(answer_lengths: Callable[[Lengths], None]) -> None:
    """Answers are as long as the document in the prompt says."""
    lengths = {"curt": 3, "long": 200, "news": 50}
    answer_lengths(
        lambda prompt: next(n for name, n in lengths.items() if name in bytes(prompt).decode())
    )


def test_lengths_are_learned_from_the_latest_earlier_partition(
    tmp_path: Path, short_answers: None
) -> None:
    spec = fake_spec(tmp_path, planner=LEARN, sampling={"max_tokens": 500})
    rows = [
        {"row_key": n, "document": f"{n} " + "x" * (n * 40), "query": "?"} for n in range(1, 31)
    ]
    for ds in ("2026-01-29", "2026-01-30", "2026-02-01", DS):
        write_table(tmp_path / "documents", rows if ds != "2026-01-29" else rows[:3], ds)
    assert plan_job(spec, "2026-01-29").manifest.learned is None
    run_and_commit(spec, "2026-01-29")
    earlier = run_and_commit(spec, "2026-01-30")
    run_and_commit(spec, "2026-02-01")  # later: doesn't count

    plan = plan_job(spec, DS)
    learned = plan.manifest.learned
    assert learned is not None
    assert (learned.ds, learned.plan_id) == ("2026-01-30", earlier.manifest.plan_id)
    assert learned.num_rows == 30
    lengths = [len(f"Answer. {row['document']}|?") for row in rows]
    for bucket in learned.buckets:
        low = bucket.min_prompt_tokens
        chosen = [length for length in lengths if low <= length < 2 * low]
        assert bucket.num_rows == len(chosen) > 0
        assert bucket.num_output_tokens == sum(length // 10 for length in chosen)
    assert "output lengths as in partition 2026-01-30: " in format_plan(plan.manifest, "")
    assert plan_job(spec, DS) == plan, "planning again learns the same"
    assert StoredPlan.open(plan.folder.uri) == plan


def test_partitions_without_texts_or_of_others_teach_nothing(tmp_path: Path) -> None:
    spec = fake_spec(tmp_path, planner=LEARN, max_failed_fraction=1.0)
    rows = document_rows(2, 2)
    rows[0]["query"] = None
    write_table(tmp_path / "documents", rows, "2026-01-28")
    write_table(tmp_path / "documents", [{**row, "query": None} for row in rows], "2026-01-29")
    for ds in ("2026-01-28", "2026-01-29"):
        run_and_commit(spec, ds)
    foreign = tmp_path / "out" / "ds=2026-01-30"
    foreign.mkdir(parents=True)
    (foreign / "part-0.parquet").write_bytes(b"PAR1")
    (tmp_path / "out" / "ds=2026-01-27x").mkdir()
    learned = learn_output_lengths(spec, DS)
    assert learned is not None
    assert (learned.by_length.ds, learned.by_length.num_rows) == ("2026-01-28", 3)
    assert learn_output_lengths(spec, "2026-01-28") is None
    assert learn_output_lengths(fake_spec(tmp_path), DS) is None


def test_learned_lengths_by_hand(tmp_path: Path) -> None:
    buckets = (
        LengthBucket(min_prompt_tokens=4, num_rows=2, num_output_tokens=5),
        LengthBucket(min_prompt_tokens=16, num_rows=1, num_output_tokens=100),
        LengthBucket(min_prompt_tokens=32, num_rows=1, num_output_tokens=0),
    )
    learned = LearnedOutputs(ds="x", plan_id="y", buckets=buckets)
    spec = fake_spec(tmp_path, planner=LEARN, sampling={"max_tokens": 60})
    requests = requests_of([4, 7, 8, 16, 31, 40])
    found = estimate_alone(spec, requests, Learned(learned, NOTHING, NOTHING))
    assert found.tolist() == [3, 3, 27, 60, 60, 1]
    hashes = np.array([[5, 9], [7, 9], [9, 5], [7, 8], [-1, -1], [9, -1]])
    by_group = Learned(learned, np.array([5, 9]), np.array([12, 13]))
    found = estimate_alone(spec, requests, by_group, hashes)
    assert found.tolist() == [12, 13, 13, 60, 60, 13], "the longer prefix that is known decides"


# Learned by group


def news(documents: list[str], queries: int, asked: str = "") -> list[dict[str, Any]]:
    return [
        {
            "row_key": f"{name}-{n}",
            "document": f"{name} {'x' * 200}",
            "query": f"{asked}{n}",
        }
        for name in documents
        for n in range(queries)
    ]


def test_a_document_seen_before_is_answered_as_before(tmp_path: Path, curt_and_long: None) -> None:
    """All prompts are equally long, so only their documents can tell the answers' lengths."""
    spec = fake_spec(tmp_path, planner={**LEARN, "num_shards": 1}, sampling={"max_tokens": 500})
    write_table(tmp_path / "documents", news(["curt", "long"], 3), "2026-01-30")
    earlier = run_and_commit(spec, "2026-01-30")
    assert "groups.parquet" in earlier.manifest.files
    # Other questions, and their common beginning makes the groups' prefixes longer.
    rows = news(["long", "curt", "news"], 4, asked="what is ")
    write_table(tmp_path / "documents", rows)
    plan = plan_job(spec, DS)
    assert plan.manifest.learned is not None
    assert plan.manifest.learned.num_known_prefixes > 0
    order = [rows[idx]["document"][:4] for idx in plan_order(plan)]
    assert order == ["long"] * 4 + ["news"] * 4 + ["curt"] * 4
    assert plan_job(spec, DS) == plan


def learn(spec: JobSpec) -> Learned:
    learned = learn_output_lengths(spec, DS)
    assert learned is not None
    return learned


def learning(folder: Path) -> tuple[JobSpec, StoredPlan]:
    """A job of two documents with three questions each, one twice, published a day before."""
    spec = fake_spec(folder, planner={**LEARN, "num_shards": 2}, sampling={"max_tokens": 500})
    rows = news(["curt", "long"], 3)
    rows.append({**rows[0], "row_key": "again"})
    write_table(folder / "documents", rows, "2026-01-30")
    return spec, run_and_commit(spec, "2026-01-30")


def test_a_commit_counts_rows_and_tokens_by_prefix(tmp_path: Path, curt_and_long: None) -> None:
    spec, plan = learning(tmp_path)
    stored = pq.read_table(plan.folder.full_path("lengths.parquet"))
    assert stored.schema.equals(LENGTHS_SCHEMA)
    hashes, num_rows, num_tokens = (column.to_pylist() for column in stored.columns)
    assert hashes == sorted(set(hashes))
    assert set(zip(num_rows, num_tokens, strict=True)) == {(4, 12), (3, 600)}
    assert learn(spec).by_length.num_known_prefixes == len(hashes)
    assert len(learn_output_lengths(spec, DS, by_group=False).hashes) == 0  # type: ignore[union-attr]


def test_without_the_earlier_plan_lengths_are_all_there_is(
    tmp_path: Path, curt_and_long: None, caplog: pytest.LogCaptureFixture
) -> None:
    spec, earlier = learning(tmp_path)
    write_table(tmp_path / "documents", news(["curt", "long"], 3))
    assert sorted(set(learn(spec).means.tolist())) == [3, 200]
    earlier.folder.remove("lengths.parquet")
    with caplog.at_level("INFO"):
        learned = learn(spec)
    assert len(learned.hashes) == 0
    assert "without groups: its commit has left no lengths.parquet" in caplog.text
    assert plan_job(spec, DS).manifest.learned == learned.by_length
    run_and_commit(fake_spec(tmp_path), "2026-01-30")  # its plan keeps nothing to learn from
    assert len(learn(spec).hashes) == 0


def test_a_commit_that_cannot_count_is_a_commit(
    tmp_path: Path, curt_and_long: None, caplog: pytest.LogCaptureFixture
) -> None:
    spec, plan = learning(tmp_path)
    for name in ("committed.json", "report.json", "lengths.parquet"):
        plan.folder.remove(name)
    plan.folder.write_bytes("shard-00001.parquet", b"damaged")
    assert commit_run(plan).num_rows_out == 7
    assert "can't learn output lengths by group" in caplog.text
    assert len(learn(spec).hashes) == 0


@pytest.mark.parametrize(
    "changes", [{"error": {"kind": "engine_error"}}, {"num_output_tokens": None}]
)
def test_rows_that_another_program_has_added_without_an_answer_teach_nothing(
    tmp_path: Path, curt_and_long: None, changes: dict[str, Any]
) -> None:
    spec, _ = learning(tmp_path)
    before = learn(spec).by_length
    path = tmp_path / "out" / "ds=2026-01-30" / "data.parquet"
    table = pq.ParquetFile(path).read()
    row = {**table.slice(0, 1).to_pylist()[0], **changes}
    more = pa.concat_tables([pa.Table.from_pylist([row], schema=table.schema), table])
    pq.write_table(more.replace_schema_metadata(table.schema.metadata), path)
    assert learn(spec).by_length == before
