"""Tables as other programs leave them: names and types that a job has to cope with."""

from __future__ import annotations

from datetime import time
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from lake.test_iceberg import create
from pyiceberg.transforms import MonthTransform
from support.fake_job import DS, fake_spec, finish
from support.lake_tables import LAKES, IcebergLake, Lake

from batchllm_operator.errors import EmptyPartitionError, SpecError, TableError
from batchllm_operator.lake import open_table
from batchllm_operator.plan.plan_job import plan_job
from batchllm_operator.spec import JobSpec


def spec_of(lake: Lake, folder: Path, **changes: Any) -> JobSpec:
    source = {"uri": lake.address, "key": "row_key", **changes.pop("input", {})}
    output = {"uri": f"{folder}/out", "carry": [], **changes.pop("output", {})}
    return fake_spec(folder, input=source, output=output, **changes)


def published(spec: JobSpec, ds: str = DS, key: str = "row_key") -> list[dict[str, Any]]:
    """The rows of the job's output, by their keys."""
    finish(plan_job(spec, ds))
    table = open_table(spec.output.uri, spec.input.partition_column)
    snapshot = table.snapshot(ds)
    rows = pa.Table.from_batches(table.scan(snapshot, snapshot.schema.names)).to_pylist()
    return sorted(rows, key=lambda row: str(row[key]))


def documents(**columns: Any) -> pa.Table:
    return pa.table({"row_key": ["a", "b"], "document": ["d", "e"], "query": ["q", "r"], **columns})


def test_columns_are_carried_over_under_other_names(lake: Lake, tmp_path: Path) -> None:
    """Also those that have the names of the job's own, or of each other."""
    own = {"model": ["x", "y"], "error": [1, None], "status": ["s", "t"], "query": ["q", "r"]}
    lake.append(DS, documents(**own))
    names = {"model": "source_model", "error": "fault", "status": "query", "query": "document"}
    rows = published(spec_of(lake, tmp_path, output={"carry": names}))
    for source, name in names.items():
        assert [row[name] for row in rows] == own[source]
    assert {(row["model"], row["error"]) for row in rows} == {("no-model", None)}


NESTED: dict[str, pa.Array] = {
    "doc": pa.array([{"title": "t", "size": {"n": 7}}, {"title": None, "size": None}]),
    "tags": pa.array([["x", "y"], ["z"]]),
    "sizes": pa.array([[("eu", 1), ("us", 2)], None], pa.map_(pa.string(), pa.int64())),
    "doc.title": pa.array(["whole", "name"]),
    "a.b": pa.array([{"c": 1.5}, {"c": 2.0}]),
}


@pytest.mark.parametrize(
    ("place", "texts"),
    [
        ("doc.size.n", ["7", None]),
        ("doc.title", ["whole", "name"]),
        ("`doc`.title", ["t", None]),
        ("doc[title]", ["t", None]),
        ("tags[0]", ["x", "z"]),
        ("tags[1]", ["y", None]),
        ("tags", ['["x", "y"]', '["z"]']),
        ("sizes[us]", ["2", None]),
        ("sizes['eu']", ["1", None]),
        ("`a.b`.c", ["1.5", "2.0"]),
        ("`doc.title`", ["whole", "name"]),
    ],
)
def test_values_inside_columns_are_placed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str, texts: list[str | None]
) -> None:
    lake = LAKES["parquet"](str(tmp_path / "lake"), tmp_path, monkeypatch)
    lake.append(DS, documents(**NESTED))
    spec = spec_of(lake, tmp_path, prompt={"template": f"{{{place}}}"}, max_failed_fraction=1.0)
    assert prompts(spec) == sorted(f"Answer. {text}" for text in texts if text is not None)
    for row, text in zip(published(spec), texts, strict=True):
        assert (row["status"] == "rejected") == (text is None)
        assert text is not None or row["error"]["message"] == f"column {place!r} is null"


def prompts(spec: JobSpec) -> list[str]:
    """The texts of a job's prompts, sorted."""
    plan = plan_job(spec, DS)
    texts: list[str] = []
    for number in range(len(plan.manifest.shards)):
        with plan.open_shard(number) as shard:
            rows = shard.read(["prompt_token_ids"]).column(0).to_pylist()
        texts += (bytes(token_ids).decode() for token_ids in rows)
    return sorted(texts)


def test_fields_are_placed_in_each_format(lake: Lake, tmp_path: Path) -> None:
    lake.append(DS, documents(doc=[{"title": "t", "n": 1}, {"title": "u", "n": 2}]))
    template = "{doc.title}|{doc.n}"
    assert prompts(spec_of(lake, tmp_path, prompt={"template": template})) == [
        "Answer. t|1",
        "Answer. u|2",
    ]
    for absent in ("doc.absent", "doc[0]", "doc.title.x", "doc."):
        with pytest.raises(SpecError, match=r"no column .* \('doc' holds struct<.*title: string"):
            plan_job(spec_of(lake, tmp_path, prompt={"template": f"{{{absent}}}"}), DS)
    with pytest.raises(SpecError, match=r"carry: .* no column 'doc.n' .*are for prompts"):
        plan_job(spec_of(lake, tmp_path, output={"carry": ["doc.n"]}), DS)


@pytest.mark.parametrize("lake", ["parquet", "delta"], indirect=True)
def test_a_field_that_some_files_lack_is_null_there(lake: Lake, tmp_path: Path) -> None:
    for key, doc in (("a", {"title": "t"}), ("b", {"title": "u", "n": 2})):
        rows = {"row_key": [key], "document": ["d"], "query": ["q"], "doc": [doc]}
        lake.append(DS, pa.table(rows))
    template = {"template": "{doc.title}|{doc.n}"}
    spec = spec_of(lake, tmp_path, prompt=template, max_failed_fraction=1.0)
    assert prompts(spec) == ["Answer. u|2"]


def test_bytes_are_text_if_the_spec_says_so(lake: Lake, tmp_path: Path) -> None:
    texts = {"document": [b"d\xc3\xa9", b"\xff"], "doc": [{"raw": b"x"}, {"raw": b"y"}]}
    lake.append(DS, pa.table({"row_key": [b"a", b"b"], "query": [b"q", b"r"], **texts}))
    changes: dict[str, Any] = {
        "prompt": {"template": "{document}|{doc.raw}"},
        "output": {"carry": ["query"]},
        "max_failed_fraction": 1.0,
    }
    with pytest.raises(SpecError, match=r"'document' .* holds (large_)?binary"):
        plan_job(spec_of(lake, tmp_path, **changes), DS)
    spec = spec_of(lake, tmp_path, input={"bytes_as_text": True}, **changes)
    assert prompts(spec) == ["Answer. d\u00e9|x"]
    first, second = published(spec)
    assert (first["row_key"], first["query"], second["error"]["kind"]) == ("a", "q", "not_utf8")
    changes["output"] = {"carry": ["document"]}
    with pytest.raises(TableError, match=r"'document' isn't valid UTF-8 in row 1 .*row_key='b'"):
        plan_job(spec_of(lake, tmp_path, input={"bytes_as_text": True}, **changes), DS)


@pytest.mark.parametrize(
    ("there", "asked"), [("cafe\u0301", "caf\u00e9"), ("Text", "text"), ("text ", "text")]
)
def test_names_that_only_look_alike_are_told_apart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, there: str, asked: str
) -> None:
    lake = LAKES["parquet"](str(tmp_path / "lake"), tmp_path, monkeypatch)
    lake.append(DS, documents(**{there: ["x", "y"]}))
    with pytest.raises(SpecError) as refused:
        plan_job(spec_of(lake, tmp_path, prompt={"template": f"{{{asked}}}"}), DS)
    assert f"({there!a} is written differently from {asked!a})" in str(refused.value)


def test_keys_and_filters_name_columns_as_they_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lake = LAKES["parquet"](str(tmp_path / "lake"), tmp_path, monkeypatch)
    times = pa.array([time(9, 5), time(9, 30, 1)], pa.time64("ns"))
    lake.append(DS, documents(at=times, **{"a.b": ["x", "y"]}))
    late = [{"column": "at", "op": ">", "value": "09:30"}]
    spec = spec_of(lake, tmp_path, input={"key": "a.b", "filter": late})
    assert [row["a.b"] for row in published(spec, key="a.b")] == ["y"]
    with pytest.raises(SpecError, match=r"'a\.b' is written differently from '`a\.b`'"):
        plan_job(spec_of(lake, tmp_path, input={"key": "`a.b`"}), DS)


def test_a_day_of_a_time_zone_is_read_of_a_table_partitioned_by_timestamps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lake = LAKES["iceberg"](str(tmp_path / "lake"), tmp_path, monkeypatch)
    assert isinstance(lake, IcebergLake)
    ts = pa.array(["2026-01-30T22:59", "2026-01-30T23:00", "2026-01-31T22:59", "2026-01-31T23:00"])
    texts = {name: list("abcd") for name in ("row_key", "document", "query")}
    data = pa.table({**texts, "ts": ts.cast(pa.timestamp("us"))})
    create(lake, data.slice(0, 0), "ts", MonthTransform())
    pq.write_table(data, tmp_path / "january.parquet")
    lake.load().add_files([str(tmp_path / "january.parquet")])
    source = {"partition": {"ts": "%Y-%m-%d"}, "partition_timezone": "Europe/Berlin"}
    spec = spec_of(lake, tmp_path, input=source, output={"carry": ["ts"]})
    rows = published(spec)
    assert [(row["row_key"], row["ds"]) for row in rows] == [("b", DS), ("c", DS)]
    assert [row["ts"] for row in rows] == data["ts"].to_pylist()[1:3]
    with pytest.raises(EmptyPartitionError, match=r"newest are: '2026-01' \(on_"):
        plan_job(spec.model_copy(update={"on_empty": "fail"}), "2026-02-02")
    in_utc = spec_of(lake, tmp_path, input={"partition": {"ts": "%Y-%m-%d"}})
    assert in_utc.identity != spec.identity
    of_texts = LAKES["parquet"](str(tmp_path / "lake"), tmp_path, monkeypatch)
    of_texts.append(DS, documents())
    with pytest.raises(SpecError, match=r"partition_timezone: is for timestamps.*'ds' .*string"):
        plan_job(spec_of(of_texts, tmp_path, input={"partition_timezone": "UTC"}), DS)
