"""`generate`: the rows of a frame, answered, in a frame of the same kind."""

import io
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
from support.demo_job import wait_until

from batchllm_operator import frames, generate
from batchllm_operator.errors import FailedRowsError, InvalidError, SpecError, TableError

FAKE: dict[str, Any] = {
    "model": "no-model",
    "engine": {"backend": "fake", "extra_args": {"byte_tokens": True}},
    "sampling": {"max_tokens": 8},
}
ANSWERS = [
    *("generated_text", "finish_reason", "num_prompt_tokens", "num_cached_tokens"),
    *("num_output_tokens", "status", "error"),
]


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder `batchllm` of the user's cache."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "batchllm"


@pytest.fixture
def no_job(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a call fail that would start a job."""

    def refuse(*given: object) -> None:
        raise AssertionError("a job was started")

    monkeypatch.setattr(frames, "run_command", refuse)


def docs(num_rows: int = 12) -> pd.DataFrame:
    return pd.DataFrame({"body": [f"document {idx // 3}, line {idx}" for idx in range(num_rows)]})


def test_a_pandas_frame_keeps_its_index_its_columns_and_the_order_of_its_rows(
    cache: Path, request: pytest.FixtureRequest, capsys: pytest.CaptureFixture[str]
) -> None:
    frame = pd.DataFrame(
        {
            "unused": [object(), 3, {"a"}, None, "x", 1.5],  # no type of Arrow's
            "body": ["ccc", "a", "", None, "a", "bb"],
            "kind": pd.Categorical(["x", "y", "x", "y", "y", "x"]),
            "ds": [np.datetime64("2026-01-31")] * 6,
        },
        index=pd.Index([7, 3, 3, 9, 7, 1], name="body"),
    )
    before = frame.copy()
    template = "{kind}, {ds}: {body}"
    answered = generate(frame, template, **FAKE)
    pd.testing.assert_frame_equal(frame, before)
    pd.testing.assert_frame_equal(answered[list(frame)], before)
    assert list(answered) == [*frame, *ANSWERS]
    texts, errors = answered["generated_text"].tolist(), answered["error"].tolist()
    assert texts[1] == texts[4]
    assert len({*texts}) == 5
    assert (texts[3], answered["status"].iloc[3]) == (None, "rejected")
    assert [error and error["kind"] for error in errors] == [*[None] * 3, "null_value", None, None]
    lengths = [len(f"x, 2026-01-31T00:00:00: {body or ''}") for body in frame["body"]]
    assert answered["num_prompt_tokens"].dropna().tolist() == [*lengths[:3], *lengths[4:]]
    assert "5/5 rows (100 %)" in capsys.readouterr().err

    request.getfixturevalue("no_job")
    again = generate(frame.assign(unused=0), template, **FAKE)
    pd.testing.assert_frame_equal(again, answered.assign(unused=0))
    assert len([*cache.iterdir()]) == 1
    assert cache.stat().st_mode & 0o077 == 0
    with pytest.raises(AssertionError, match="a job was started"):
        generate(frame[::-1], template, **FAKE)
    with pytest.raises(AssertionError, match="a job was started"):
        generate(frame, template, **{**FAKE, "sampling": {"max_tokens": 9}})
    assert len([*cache.iterdir()]) == 3


def test_tables_of_arrow_in_any_cut_and_any_library_that_gives_them_are_answered(
    request: pytest.FixtureRequest,
) -> None:
    class Other:
        def __arrow_c_stream__(self, requested_schema: object = None) -> object:
            return table.__arrow_c_stream__(requested_schema)

    kind = pa.struct({"title": pa.string(), "tags": pa.list_(pa.string())})
    rows = [{"doc": {"title": f"T{idx}", "tags": ["a", "b"]}, "text": "~"} for idx in range(5)]
    schema = pa.schema({"doc": kind, "text": pa.dictionary(pa.int8(), pa.string())})
    table = pa.Table.from_pylist(rows, schema=schema)
    given = {**FAKE, "prompt": {"template": "{doc.title} {doc.tags[1]}"}, "system": "S. "}
    answered = generate(table, **given)
    assert isinstance(answered, pa.Table)
    assert answered.column_names == ["doc", "text", *ANSWERS]
    assert answered.select(["doc", "text"]).equals(table)
    assert answered["num_prompt_tokens"].to_pylist() == [len("S. T0 b")] * 5
    assert len({*answered["generated_text"].to_pylist()}) == 5

    request.getfixturevalue("no_job")
    for same in (pa.concat_tables([table[:2], table[2:]]), table.to_reader(), Other()):
        assert generate(same, **given).equals(answered)


def test_several_prompts_give_a_struct_each() -> None:
    rest = {name: value for name, value in FAKE.items() if name != "sampling"}
    prompts = {
        "topic": {"template": "{body}: topic?", "task": "classify", "labels": ["a", "b"]},
        "summary": {"template": "{body}: sum up", "sampling": {"max_tokens": 8}},
    }
    frame = pd.DataFrame({"body": ["first", None, "third"], "status": "kept"})
    answered = generate(frame, prompts=prompts, **rest)
    assert [*answered][:2] == ["body", "status"]
    assert {*answered} == {"body", "status", *prompts}
    alone = generate(frame[["body"]], **prompts["summary"], **rest)
    texts = [row["generated_text"] for row in answered["summary"]]
    assert texts == alone["generated_text"].tolist()
    assert {row["label"] for row in answered["topic"]} <= {"a", "b", None}
    assert [row["status"] for row in answered["topic"]] == ["ok", "rejected", "ok"]


@pytest.mark.parametrize("frame", [docs(0), pa.table({"body": pa.array([], pa.string())})])
def test_a_frame_without_rows_gains_empty_columns(frame: Any) -> None:
    answered = generate(frame, "{body}", **FAKE)
    assert type(answered) is type(frame)
    assert list(answered.columns if isinstance(frame, pd.DataFrame) else answered.column_names) == [
        "body",
        *ANSWERS,
    ]
    assert len(answered) == 0


@pytest.mark.parametrize(
    ("frame", "error"),
    [
        (pd.DataFrame([["a", "b"]], columns=["body", "body"]), "has two columns 'body'"),
        (pa.table([["a"], ["b"]], names=["body", "body"]), "has two columns 'body'"),
        (pd.DataFrame([["a", "b"]], columns=["body", 1]), "column name 1 of the frame isn't text"),
        (
            pd.DataFrame([["a"]], columns=pd.MultiIndex.from_tuples([("body", "x")])),
            r"column name \('body', 'x'\) of the frame isn't text",
        ),
        (docs().assign(status="new"), "has a column 'status', as the answers do; rename or drop"),
        (docs().assign(body=[object()] * 12), "can't be read as an Arrow table: .*column body"),
        (docs().assign(body=[1, *"a" * 11]), "can't be read as an Arrow table: .*column body"),
        (docs()["body"], "Series isn't a frame"),
        ([{"body": "a"}], "list isn't a frame"),
        (({"body": "a"} for _ in "a"), "generator isn't a frame"),
        (pa.chunked_array([["a"]]), "ChunkedArray can't be read as an Arrow table"),
    ],
)
def test_what_is_no_frame_or_has_bad_columns_is_refused_before_a_job_starts(
    frame: Any, error: str, no_job: None
) -> None:
    with pytest.raises(TableError, match=f"^generate: .*{error}"):
        generate(frame, "{body}", **FAKE)


@pytest.mark.parametrize(
    ("fields", "error"),
    [
        ({"template": "{boddy}"}, "generate: the frame has no column 'boddy'; it has body, n$"),
        ({"template": "{body.title}"}, "generate: the frame has no column 'body.title'"),
        ({"template": "{body}", "smapling": {}}, "smapling: .*sampling"),
        ({"template": "{body}", "sampling": {"max_tokens": 0}}, "sampling.max_tokens: .*at least"),
        ({"prompt": "{body}"}, "prompt: must be a section"),
        ({}, "prompt: is missing"),
        ({"template": "{body}", "turns": [{"role": "user", "template": "{n}"}]}, "must be alone"),
        ({"template": "{body}", "input": {"filter": []}}, "generate: input is made from the frame"),
    ],
)
def test_wrong_fields_get_the_error_of_the_spec(
    fields: dict[str, Any], error: str, no_job: None
) -> None:
    with pytest.raises(SpecError, match=error):
        generate(docs().assign(n=1), **{**FAKE, **fields})


def test_errors_of_the_job_are_raised_with_its_message_and_class(tmp_path: Path) -> None:
    frame = docs(4).assign(when=pd.Timedelta("1s"), some=["a", None, None, None])
    with pytest.raises(InvalidError, match=r"column 'when' of table .* holds duration"):
        generate(frame, "{when}", cache=tmp_path / "own", **FAKE)
    with pytest.raises(FailedRowsError, match="3 of 4 rows"):
        generate(frame, "{some}", cache=tmp_path / "own", max_failed_fraction=0.5, **FAKE)
    assert generate(frame, "{some}", cache=tmp_path / "own", **FAKE)["status"].tolist() == [
        "cut_off",
        *["rejected"] * 3,
    ]


class Notebook(io.StringIO):
    """stderr in a notebook."""


Notebook.__module__ = "ipykernel.iostream"


def test_a_notebook_gets_bars_that_replace_themselves(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", shown := Notebook())
    engine = {**FAKE["engine"], "extra_args": {"byte_tokens": True, "delay_s": 0.05}}
    generate(docs(30), "{body}", **{**FAKE, "engine": engine})
    text = shown.getvalue()
    assert "100%|" in text
    assert "worker 0:" in text
    assert "\r\n" not in text
    assert text.count("\r") > text.count("\n")
    assert text.count("\n") < 15


SCRIPT = """
import sys
import pandas as pd
from batchllm_operator import generate

frame = pd.DataFrame({"body": [f"document {idx // 3}, line {idx}" for idx in range(12)]})
extra_args = {"byte_tokens": True, "delay_s": float(sys.argv[1]), "max_in_flight": 1}
try:
    answered = generate(
        frame,
        "{body}",
        model="no-model",
        engine={"backend": "fake", "extra_args": extra_args},
        sampling={"max_tokens": 8},
        planner={"num_shards": 1, "part_rows": 3},
    )
    print(answered["generated_text"].nunique())
except KeyboardInterrupt:
    print("the kernel lives")
"""


@pytest.fixture
def started(cache: Path) -> Iterator[subprocess.Popen[str]]:
    """A process that has answered the first rows of `docs()`."""
    command = [sys.executable, "-c", SCRIPT, "0.3"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, process_group=0)
    wait_until(lambda: [*cache.rglob("part-*.json")], "the first part is written")
    yield process
    process.kill()
    process.wait()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_after_a_stop_or_a_kill_the_same_call_goes_on(
    started: subprocess.Popen[str], cache: Path, number: signal.Signals
) -> None:
    os.kill(started.pid, number)
    said, _ = started.communicate()
    assert said == ("the kernel lives\n" if number == signal.SIGINT else "")
    [folder] = cache.iterdir() if number == signal.SIGINT else cache.glob("[!.]*")
    parts = len([*folder.rglob("part-*.json")])
    assert parts < 4
    wait_until(lambda: not commands_on(folder), "no process works on the job")
    again = subprocess.run(
        [sys.executable, "-c", SCRIPT, "0.3"], capture_output=True, text=True, check=True
    )
    assert again.stdout == "12\n"
    [report] = folder.rglob("runs/*/report.json")
    assert f'"num_resumed_parts":{parts}' in report.read_text().replace(" ", "")


def commands_on(folder: Path) -> list[str]:
    """Command lines of processes that name a folder."""
    lines = []
    for entry in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            lines.append(entry.read_text())
        except (FileNotFoundError, ProcessLookupError):
            continue
    return [line for line in lines if str(folder) in line]
