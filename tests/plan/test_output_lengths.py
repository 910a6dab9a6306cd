"""Output lengths: constant, from a column, or learned from what the job published before."""

from __future__ import annotations

import datetime
from collections.abc import Callable
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest
from deltalake import DeltaTable
from support.fake_job import DS, document_rows, fake_spec, finish, write_table
from support.lake_tables import LAKES, IcebergLake

from batchllm_operator.engine import EngineOutput, EngineRequest
from batchllm_operator.engine.fake import FakeEngine
from batchllm_operator.errors import PlanError, SpecError
from batchllm_operator.lake import open_table
from batchllm_operator.plan.group_lengths import GroupLengths, PlanGroups
from batchllm_operator.plan.output_lengths import (
    Learned,
    estimate_output_tokens,
    learn_output_lengths,
)
from batchllm_operator.plan.plan_job import plan_job
from batchllm_operator.prefixes import PrefixGroups, Requests, TokenTable
from batchllm_operator.report import format_plan
from batchllm_operator.spec import JobSpec
from batchllm_operator.stored_plan.manifest import LearnedOutputs, LengthBucket
from batchllm_operator.stored_plan.stored_plan import StoredPlan

DAY = datetime.date(2026, 1, 1)
TIME = datetime.datetime(2026, 1, 1, 12)
LEARN = {"estimated_output_tokens": {"learned": True}}


def column_spec(folder: Path, **changes: Any) -> JobSpec:
    planner = {"num_shards": 1, "estimated_output_tokens": {"column": "expected"}}
    return fake_spec(folder, planner=planner, **changes)


def plan_order(plan: StoredPlan) -> list[int]:
    """Rows in the order in which they will be generated."""
    tables = [pq.read_table(plan.folder.full_path(s.file)) for s in plan.manifest.shards]
    return [row[0] for table in tables for row in table["row_idxs"].to_pylist()]


def run_and_commit(spec: JobSpec, ds: str) -> StoredPlan:
    plan = plan_job(spec, ds)
    finish(plan)
    return plan


def requests_of(lengths: list[int]) -> Requests:
    tokens = TokenTable.from_lists([[1] * length for length in lengths])
    idxs = np.arange(len(lengths) + 1, dtype=np.int64)
    return Requests(tokens, idxs[:-1], tokens.lengths, idxs[:-1], idxs)


def estimate_alone(
    spec: JobSpec, requests: Requests, learned: Learned | None
) -> npt.NDArray[np.int64]:
    """For requests that are all groups of one."""
    everyone = np.arange(len(requests) + 1)
    groups = PrefixGroups(everyone[:-1], everyone, np.zeros(len(requests), dtype=np.int64))
    hashes = np.full((len(requests), 2), -1)
    return estimate_output_tokens(spec, requests, learned, groups, hashes)


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


def test_rows_with_equal_prompts_take_the_largest_estimate(tmp_path: Path) -> None:
    rows = [
        {"row_key": "a", "document": "A", "query": "?", "expected": 2},
        {"row_key": "b", "document": "B", "query": "?", "expected": 4},
        {"row_key": "c", "document": "A", "query": "?", "expected": 6},
    ]
    write_table(tmp_path / "documents", rows)
    plan = plan_job(column_spec(tmp_path, prompt={"system": None}), DS)
    assert plan_order(plan) == [0, 1]


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


def test_the_latest_week_before_the_tenth_is_the_ninth(tmp_path: Path, short_answers: None) -> None:
    spec = fake_spec(tmp_path, input={"partition_column": "week"}, planner=LEARN)
    for week in ("1", "9", "10", "11"):
        write_table(tmp_path / "documents", document_rows(), week)
        (tmp_path / "documents" / f"ds={week}").rename(tmp_path / "documents" / f"week={week}")
        if week != "10":
            run_and_commit(spec, week)
    learned = plan_job(spec, "10").manifest.learned
    assert learned is not None
    assert learned.ds == "9"


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


def test_another_past_is_another_plan(tmp_path: Path, short_answers: None) -> None:
    spec = fake_spec(tmp_path, planner=LEARN)
    write_table(tmp_path / "documents", document_rows(2, 2), DS)
    write_table(tmp_path / "documents", document_rows(3, 3), "2026-01-30")
    without = plan_job(spec, DS)
    run_and_commit(spec, "2026-01-30")
    learned = plan_job(spec, DS)
    assert without.folder != learned.folder
    assert without.manifest.files == learned.manifest.files


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
    assert open_table(str(tmp_path / "none"), "ds").partitions() == []


def test_learned_lengths_by_hand(tmp_path: Path) -> None:
    buckets = (
        LengthBucket(min_prompt_tokens=4, num_rows=2, num_output_tokens=5),
        LengthBucket(min_prompt_tokens=16, num_rows=1, num_output_tokens=100),
        LengthBucket(min_prompt_tokens=32, num_rows=1, num_output_tokens=0),
    )
    learned = LearnedOutputs(ds="x", plan_id="y", buckets=buckets)
    spec = fake_spec(tmp_path, planner=LEARN, sampling={"max_tokens": 60})
    found = estimate_alone(spec, requests_of([4, 7, 8, 16, 31, 40]), Learned(learned, None))
    assert found.tolist() == [3, 3, 27, 60, 60, 1]


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


def test_without_the_earlier_plan_lengths_are_all_there_is(
    tmp_path: Path, curt_and_long: None, caplog: pytest.LogCaptureFixture
) -> None:
    spec = fake_spec(tmp_path, planner=LEARN, sampling={"max_tokens": 500})
    for ds in ("2026-01-30", DS):
        write_table(tmp_path / "documents", news(["curt", "long"], 3), ds)
    earlier = run_and_commit(spec, "2026-01-30")
    learned = learn_output_lengths(spec, DS)
    assert learned is not None and learned.by_group is not None
    assert learned.by_group.num_rows.tolist() == [3] * len(learned.by_group.hashes)
    earlier.folder.remove("groups.parquet")
    with caplog.at_level("INFO"):
        learned = learn_output_lengths(spec, DS)
    assert learned is not None and learned.by_group is None
    assert "without groups" in caplog.text
    assert plan_job(spec, DS).manifest.learned == learned.by_length
    run_and_commit(fake_spec(tmp_path), "2026-01-30")  # its plan keeps nothing to learn from
    with caplog.at_level("INFO"):
        learned = learn_output_lengths(spec, DS)
    assert learned is not None and learned.by_group is None
    assert "was made without planner.estimated_output_tokens: learned" in caplog.text


# What other programs have done to the published rows since


def rewrite(path: Path, change: Callable[[pa.Table], pa.Table]) -> None:
    table = pq.ParquetFile(path).read()
    changed = change(table)
    pq.write_table(changed.replace_schema_metadata(table.schema.metadata), path)


def by_group_of(spec: JobSpec) -> dict[int, tuple[int, int]]:
    """Learned rows and tokens by prefix."""
    learned = learn_output_lengths(spec, DS)
    assert learned is not None and learned.by_group is not None
    found = learned.by_group
    counts = zip(found.num_rows.tolist(), found.num_output_tokens.tolist(), strict=True)
    return dict(zip(found.hashes.tolist(), counts, strict=True))


def with_row(table: pa.Table, idx: int, **values: Any) -> pa.Table:
    """The rows, and one of them again at the beginning, changed."""
    row = {**table.slice(idx, 1).to_pylist()[0], **values}
    return pa.concat_tables([pa.Table.from_pylist([row], schema=table.schema), table])


@pytest.mark.parametrize(
    ("change", "num_rows"),
    [
        (lambda table: table.sort_by([("row_key", "descending")]), [3, 3]),
        (lambda table: table.slice(1), [2, 3]),
        (lambda table: table.take([5, 2, 3]), [1, 2]),
        (lambda table: with_row(table, 0, row_key="new", num_output_tokens=499), [3, 3]),
        (lambda table: with_row(table, 0, row_key=None, num_output_tokens=499), [3, 3]),
        (lambda table: pa.concat_tables([table, table, table.slice(2, 2)]), [3, 3]),
        (lambda table: with_row(table.slice(1), 1, error={"kind": "engine_error"}), [2, 3]),
        (lambda table: with_row(table.slice(1), 0, num_output_tokens=None), [2, 3]),
    ],
    ids=[
        *("sorted", "first deleted", "some deleted and turned", "one more", "one without a key"),
        *("doubled", "failed", "without a count"),
    ],
)
def test_rows_are_known_by_their_keys(
    tmp_path: Path,
    curt_and_long: None,
    change: Callable[[pa.Table], pa.Table],
    num_rows: list[int],
) -> None:
    spec = fake_spec(tmp_path, planner={**LEARN, "num_shards": 1}, sampling={"max_tokens": 500})
    rows = news(["curt", "long"], 3)
    write_table(tmp_path / "documents", [rows[idx] for idx in (0, 3, 1, 4, 2, 5)], "2026-01-30")
    run_and_commit(spec, "2026-01-30")
    before = by_group_of(spec)
    rewrite(tmp_path / "out" / "ds=2026-01-30" / "data.parquet", change)
    of_group = {(3, 9): (num_rows[0], 3 * num_rows[0]), (3, 600): (num_rows[1], 200 * num_rows[1])}
    assert by_group_of(spec) == {prefix: of_group[counts] for prefix, counts in before.items()}
    learned = learn_output_lengths(spec, DS)
    assert learned is not None and learned.by_length.num_rows == sum(num_rows)


@pytest.mark.parametrize("kind", ["iceberg", "delta"])
def test_rows_that_a_table_format_has_deleted_teach_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, curt_and_long: None, kind: str
) -> None:
    lake = LAKES[kind](str(tmp_path), tmp_path, monkeypatch, "out")
    spec = fake_spec(
        tmp_path,
        input={"key": ["row_key", "at"]},
        output={"uri": lake.address, "staging_uri": lake.staging},
        planner={**LEARN, "num_shards": 1},
        sampling={"max_tokens": 500},
    )
    rows = news(["curt", "long"], 2)
    at = pa.array(range(4), pa.timestamp("ns"))  # which the formats hold as microseconds
    at = pc.multiply(at.cast(pa.int64()), 1000).cast(at.type)
    folder = tmp_path / "documents" / "ds=2026-01-30"
    folder.mkdir(parents=True)
    table = pa.Table.from_pylist([rows[idx] for idx in (0, 2, 1, 3)]).append_column("at", at)
    pq.write_table(table, folder / "a.parquet")
    run_and_commit(spec, "2026-01-30")
    before = by_group_of(spec)
    assert set(before.values()) == {(2, 6), (2, 400)}
    if isinstance(lake, IcebergLake):
        lake.load().delete("row_key = 'curt-0'")
    else:
        DeltaTable(lake.folder.uri).delete("row_key = 'curt-0'")
    expected = {(2, 6): (1, 3), (2, 400): (2, 400)}
    assert by_group_of(spec) == {prefix: expected[counts] for prefix, counts in before.items()}


def test_keys_that_a_table_has_no_more_leave_lengths(
    tmp_path: Path, curt_and_long: None, caplog: pytest.LogCaptureFixture
) -> None:
    spec = fake_spec(tmp_path, planner=LEARN, sampling={"max_tokens": 500})
    write_table(tmp_path / "documents", news(["curt", "long"], 3), "2026-01-30")
    run_and_commit(spec, "2026-01-30")
    path = tmp_path / "out" / "ds=2026-01-30" / "data.parquet"
    rewrite(path, lambda table: table.rename_columns({"row_key": "id"}))
    with caplog.at_level("INFO"):
        learned = learn_output_lengths(spec, DS)
    assert learned is not None and learned.by_group is None
    assert learned.by_length.num_rows == 6
    assert "the table has no column 'row_key' any more" in caplog.text


def test_the_more_specific_prefix_decides() -> None:
    lengths = GroupLengths(np.array([5, 9]), np.array([2, 3]), np.array([5, 30]))
    hashes = np.array([[5, 9], [7, 9], [9, 5], [7, 8], [-1, -1], [9, -1]])
    assert lengths.mean_tokens(hashes).tolist() == [3, 10, 10, -1, -1, 10]
    nothing = GroupLengths(*(np.zeros(0, dtype=np.int64) for _ in range(3)))
    assert nothing.mean_tokens(hashes).tolist() == [-1] * 6


# Rows of a plan, known again by their keys


def plan_with(folder: Path, **keys: pa.Array) -> StoredPlan:
    """A plan whose key is these columns."""
    num_rows = len(next(iter(keys.values())))
    table = pa.Table.from_pylist(document_rows(num_rows, 1)).drop_columns("row_key")
    for name, column in keys.items():
        table = table.append_column(name, column)
    partition = folder / "documents" / f"ds={DS}"
    partition.mkdir(parents=True)
    pq.write_table(table, partition / "a.parquet")
    return plan_job(fake_spec(folder, input={"key": list(keys)}, planner=LEARN), DS)


@pytest.mark.parametrize(
    ("key", "published"),
    [
        (pa.array([7, 8, 9], pa.uint32()), pa.int64()),
        (pa.array([7, 8, 9], pa.int8()), pa.int64()),
        (pa.array([1.5, -0.25, 1e300]), pa.float64()),
        (pa.array(["a", "b", ""]), pa.large_string()),
        (pa.array(["a", "b", "c"]).dictionary_encode(), pa.string()),
        (pa.array([b"aa", b"\0\0", b"a\0"], pa.binary(2)), pa.binary()),
        (pa.array([DAY, DAY.replace(day=2), DAY.replace(day=3)], pa.date64()), pa.date32()),
        (pa.array([TIME, TIME.replace(hour=1), TIME.replace(hour=2)], pa.timestamp("ns")), None),
        (pa.array([Decimal("1.50"), Decimal("-2"), Decimal(0)]), pa.decimal128(20, 2)),
    ],
    ids=str,
)
def test_keys_are_compared_as_the_table_holds_them(
    tmp_path: Path, key: pa.Array, published: pa.DataType | None
) -> None:
    held = key.cast(published or pa.timestamp("us", "UTC"))
    groups = PlanGroups.of(plan_with(tmp_path, id=key), pa.schema([("id", held.type)]))
    places = groups.places(pa.record_batch({"id": held}))
    assert sorted(places.tolist()) == [0, 1, 2]
    turned = held.take(pa.array([2, 0, 1]))
    assert groups.places(pa.record_batch({"id": turned})).tolist() == places[[2, 0, 1]].tolist()


def test_keys_of_several_columns_are_told_apart_and_nulls_are_never_known(tmp_path: Path) -> None:
    first, second = pa.array(["a", "ab", "", "x"]), pa.array(["bc", "c", "1:", "1:"])
    plan = plan_with(tmp_path, first=first, second=second)
    groups = PlanGroups.of(plan, pa.schema([("second", pa.string()), ("first", pa.string())]))
    rows = {"second": ["c", "1:", "1:", "bc", None], "first": ["ab", "ab", None, "a", "x"]}
    places = groups.places(pa.record_batch(rows))
    assert (places >= 0).tolist() == [True, False, False, True, False]


def test_what_does_not_fit_is_refused(tmp_path: Path) -> None:
    plan = plan_with(tmp_path, id=pa.array(["a", "b"]))
    with pytest.raises(PlanError, match="no column 'id'"):
        PlanGroups.of(plan, pa.schema([("key", pa.string())]))
    with pytest.raises(pa.ArrowException):
        PlanGroups.of(plan, pa.schema([("id", pa.int64())]))
    path = Path(plan.folder.full_path("rows.parquet"))
    pq.write_table(pq.read_table(path).slice(1), path)
    with pytest.raises(PlanError, match=r"its rows are 1, not 2"):
        PlanGroups.of(plan, pa.schema([("id", pa.string())]))
