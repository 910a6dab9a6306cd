"""Jobs whose answers have a form: typed columns, choices, patterns; invalid ones, and retries."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from support.answers_job import PROPERTIES, SCHEMA, TYPED, asking, published, run_and_commit
from support.fake_job import DS, document_rows, expected_prompt, write_table
from support.lake_tables import LAKES

from batchllm_operator.answers import Answers, FakePrompt
from batchllm_operator.answers.fakes import digest_of
from batchllm_operator.commit.commit_run import commit_run
from batchllm_operator.errors import SpecError
from batchllm_operator.plan.plan_job import plan_job

SAMPLED = {"temperature": 1.0, "seed": 5}


def fake(**arguments: Any) -> dict[str, Any]:
    extra_args = {"byte_tokens": True, **arguments}
    return {"backend": "fake", "max_model_len": 4096, "extra_args": extra_args}


def answer_to(row: dict[str, Any]) -> str:
    """The fake engine's answer to a row."""
    prompt = list(expected_prompt(row).encode())
    text, _ = Answers.of(asking("/lake", response_format=TYPED)).fake(FakePrompt(prompt, 0))
    return text


def is_hit(row: dict[str, Any], every: int) -> bool:
    return digest_of(list(expected_prompt(row).encode())) % every == 0


def test_columns_stand_after_the_text_in_the_schemas_order(tmp_path: Path) -> None:
    write_table(tmp_path / "documents", document_rows(1, 2))
    run_and_commit(asking(tmp_path, response_format={**TYPED, "prefix_columns": "answer_"}))
    names = pq.read_schema(tmp_path / "out" / f"ds={DS}" / "data.parquet").names
    first = names.index("generated_text") + 1
    assert names[first : first + len(PROPERTIES)] == [f"answer_{name}" for name in PROPERTIES]


def test_another_schema_reuses_nothing_but_another_prefix_does(tmp_path: Path) -> None:
    write_table(tmp_path / "documents", document_rows(3, 2))
    run_and_commit(asking(tmp_path, response_format=TYPED, reuse_outputs=True))

    def num_reused(form: dict[str, Any]) -> int:
        output = {"uri": str(tmp_path / "out"), "add_columns": True}
        spec = asking(tmp_path, response_format=form, reuse_outputs=True, output=output)
        return plan_job(spec, DS).manifest.counts.num_reused_rows

    properties = dict(reversed(PROPERTIES.items()))  # the model writes them in another order
    other = {**TYPED, "json_schema": {**SCHEMA, "properties": properties}}
    assert num_reused(other) == 0
    assert num_reused({**TYPED, "prefix_columns": "answer_"}) == 6


def test_an_invalid_answer_is_a_row_error_with_its_text(tmp_path: Path) -> None:
    rows = document_rows(4, 3)
    write_table(tmp_path / "documents", rows)
    spec = asking(
        tmp_path,
        response_format=TYPED,
        engine=fake(invalid_every=3),
        max_failed_fraction=1,
        reuse_outputs=True,
    )
    plan = run_and_commit(spec)
    num_invalid = 0
    for found, row in zip(published(spec), rows, strict=True):
        if is_hit(row, 3):
            num_invalid += 1
            assert found["status"] == found["error"]["kind"] == "invalid_output"
            assert found["error"]["message"].startswith("isn't JSON: ")
            assert json.loads(answer_to(row))["summary"] not in found["error"]["message"]
            assert answer_to(row).startswith(found["generated_text"])
            assert all(found[name] is None for name in PROPERTIES)
            assert found["finish_reason"] == "length"
        else:
            assert found["error"] is None and found["generated_text"] == answer_to(row)
    assert 0 < num_invalid < len(rows)
    again = plan_job(spec.model_copy(update={"on_empty": "commit"}), DS)
    assert again.manifest.counts.num_reused_rows == len(rows) - num_invalid
    assert plan.manifest.counts.num_reused_rows == 0


def test_invalid_rows_are_generated_again_and_no_others(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    rows = document_rows(6, 4)
    write_table(tmp_path / "documents", rows)
    spec = asking(
        tmp_path,
        response_format=TYPED,
        sampling=SAMPLED,
        retry_invalid=2,
        engine=fake(invalid_every=3, invalid_tries=2, max_in_flight=4),
        planner={"num_shards": 2},
    )
    with caplog.at_level(logging.INFO):
        run_and_commit(spec)
    for found, row in zip(published(spec), rows, strict=True):
        assert found["error"] is None and found["generated_text"] == answer_to(row)
    num_hit = sum(is_hit(row, 3) for row in rows)
    said = [each.args for each in caplog.records if each.message.startswith("retry_invalid")]
    assert num_hit > 1
    assert sum(int(str(times).split()[0]) for times, _ in said) == 2 * num_hit  # type: ignore[misc]


def test_a_row_that_stays_invalid_is_given_up(tmp_path: Path) -> None:
    rows = document_rows(3, 2)
    write_table(tmp_path / "documents", rows)
    spec = asking(
        tmp_path,
        response_format=TYPED,
        sampling=SAMPLED,
        retry_invalid=1,
        engine=fake(invalid_every=2, invalid_tries=2),
        max_failed_fraction=1,
    )
    plan = run_and_commit(spec)
    found = {row["row_key"]: row for row in published(spec)}
    for row in rows:
        error = found[row["row_key"]]["error"]
        assert (error is not None) == is_hit(row, 2)
    commit_run(plan.folder.uri)  # once more: nothing is left to do


@pytest.mark.parametrize(
    "form",
    [
        {
            "type": "json_schema",
            "json_schema": {"type": "object", "properties": {"a": {"pattern": r"^\p{L}+$"}}},
        },
        {"type": "regex", "regex": r"\{\"a\": \"\p{L}+\"\}"},
    ],
)
def test_a_pattern_that_python_lacks_checks_answers(tmp_path: Path, form: dict[str, Any]) -> None:
    answers = Answers.of(asking(tmp_path, response_format=form))
    assert answers.fault('{"a": "Ärger"}', {}) is None
    for wrong in ('{"a": "4"}', '{"a": "Ä4"}', '{"a": "Ä"} ' * 2):
        assert str(answers.fault(wrong, {})).startswith("invalid_output: ")


# Refused at plan


@pytest.mark.parametrize(
    ("properties", "message"),
    [
        ({"child": {"$ref": "#"}}, "property 'child' contains itself"),
        (
            {"tree": {"type": "array", "items": {"$ref": "#/properties/tree"}}},
            "property 'tree' contains itself",
        ),
        ({"far": {"$ref": "https://example.org/schema"}}, "property 'far' refers to"),
        ({"gone": {"$ref": "#/$defs/gone"}}, "'gone' refers to '#/\\$defs/gone', which isn't"),
        ({"odd": {"type": "strin"}}, "isn't a JSON schema: properties.odd.type"),
        ({"odd": {"pattern": "("}}, r"properties\.odd\.pattern: '\(' isn't a regular expression"),
        ({"odd": {"patternProperties": {r"\p{L}": {}}}}, r"properties\.odd: patternProperties: "),
        ({"a": {"type": "object", "properties": {"x": {}, "X": {}}}}, "differ by case only"),
        ({"a": {"type": "object", "properties": {"": {}}}}, "without a name in 'a'"),
    ],
)
def test_schemas_that_are_no_columns_are_refused(
    tmp_path: Path, properties: dict[str, Any], message: str
) -> None:
    write_table(tmp_path / "documents", document_rows(1, 1))
    form = {"type": "json_schema", "json_schema": {"type": "object", "properties": properties}}
    with pytest.raises(SpecError, match=message):
        plan_job(asking(tmp_path, response_format=form), DS)


@pytest.mark.parametrize(
    "properties",
    [{"first name": {}}, {"who": {"type": "object", "properties": {"a=b": {"type": "string"}}}}],
)
def test_delta_refuses_names_that_it_cannot_hold(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, properties: dict[str, Any]
) -> None:
    write_table(tmp_path / "documents", document_rows(1, 1))
    form = {"type": "json_schema", "json_schema": {"type": "object", "properties": properties}}
    target = LAKES["delta"](str(tmp_path), tmp_path, monkeypatch, "out")
    output = {"uri": target.address, "staging_uri": target.staging}
    with pytest.raises(SpecError, match=r"the name '(first name|who.a=b)' has '[ =]'"):
        plan_job(asking(tmp_path, response_format=form, output=output), DS)
    plan_job(asking(tmp_path, response_format=form), DS)  # Parquet holds it
