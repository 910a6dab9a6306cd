"""Every kind of answer through whole jobs and each table format; embeddings and scores."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, date, datetime
from pathlib import Path
from statistics import fmean
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from support.answers_job import NEXT, TYPED, asking, published, run_and_commit
from support.fake_job import DS, document_rows, expected_prompt, write_table
from support.lake_tables import Lake, ParquetLake

from batchllm_operator.answers import Answers, FakePrompt
from batchllm_operator.answers.answers import KINDS
from batchllm_operator.answers.fakes import (
    NUM_CHARACTERS,
    digest_of,
    fake_logprobs,
    fake_text,
    fake_vector,
)
from batchllm_operator.answers.vectors import FAKE_SIZE
from batchllm_operator.errors import SpecError
from batchllm_operator.lake import open_table
from batchllm_operator.plan.plan_job import plan_job
from batchllm_operator.spec import JobSpec

LABELS = {"relevant": "yes", "partly": "so", "irrelevant": "no"}
ODD_LABELS = {"not relevant": "no", " yes": "yes", "a.b=c, {d};": "a", "無関係": "無", "Ü": "Ü"}
VALUES = {"1": 1.0, "2": 2.0, "5": 5.0}
OF_EVERY_JOB = {
    *("generated_text", "finish_reason", "num_prompt_tokens", "num_cached_tokens"),
    *("num_output_tokens", "status", "error", "model", "run_id"),
}
NUMBER = pa.float64()
NUMBERS = pa.list_(NUMBER)


@dataclass(frozen=True)
class Case:
    """A job that asks for a kind."""

    fields: dict[str, Any]
    """Of its spec."""
    types: dict[str, pa.DataType]
    """Of the columns that the kind adds."""
    wanted: Callable[[list[int]], dict[str, Any]]
    """Values of columns for a prompt of these tokens."""


def labels_of(labels: dict[str, float]) -> Callable[[list[int]], dict[str, Any]]:
    def wanted(prompt: list[int]) -> dict[str, Any]:
        logprobs = fake_logprobs(prompt, len(labels))
        total = sum(map(math.exp, logprobs))
        named = zip(sorted(labels), logprobs, strict=True)
        shares = {label: math.exp(value) / total for label, value in named}
        first, second, *_ = sorted(logprobs, reverse=True)
        best = max(shares, key=lambda label: shares[label])
        return {
            "label": best,
            "generated_text": best,
            "probability": pytest.approx(shares[best]),
            "probabilities": pytest.approx(shares),
            "logit_margin": pytest.approx(first - second),
            "label_mass": pytest.approx(min(total, 1)),
            "num_output_tokens": 1,
            "score": pytest.approx(sum(labels[label] * share for label, share in shares.items())),
        }

    return wanted


def typed(prompt: list[int]) -> dict[str, Any]:
    text, _ = Answers.of(asking("/lake", response_format=TYPED)).fake(FakePrompt(prompt, 0))
    answer = json.loads(text)
    return {
        **answer,
        "generated_text": text,
        "seen_at": datetime.fromisoformat(answer["seen_at"]).astimezone(UTC),
        "day": answer["day"] and date.fromisoformat(answer["day"]),
        "rest": json.dumps(answer["rest"]),
    }


def samples(prompt: list[int]) -> dict[str, Any]:
    texts = [fake_text(prompt), *(fake_text([*prompt, -sample]) for sample in (1, 2))]
    return {"generated_text": texts[0], "generated_texts": texts}


def logprobs(prompt: list[int]) -> dict[str, Any]:
    values = fake_logprobs(prompt, 4)
    top = [{"token": "token 0", "logprob": 0.0}, {"token": "token 1", "logprob": -0.125}]
    mean = pytest.approx(fmean(values))
    return {"token_logprobs": values, "mean_logprob": mean, "top_logprobs": [top] * 4}


def response(prompt: list[int]) -> dict[str, Any]:
    spec, asked = asking("/lake", **CASES["responses"].fields), FakePrompt(prompt, NUM_CHARACTERS)
    text, raw = Answers.of(spec).fake(asked)
    assert json.loads(raw["response"])["choices"][0]["message"]["content"] == text
    return raw


def label_types(*names: str) -> dict[str, pa.DataType]:
    probabilities = pa.struct([(name, NUMBER) for name in names])
    kinds = {"label": pa.string(), "probability": NUMBER, "probabilities": probabilities}
    return kinds | {"logit_margin": NUMBER, "label_mass": NUMBER}


PERSON = pa.struct([("name", pa.string()), ("age", pa.int64())])
TOKENS = pa.list_(pa.list_(pa.struct([("token", pa.string()), ("logprob", NUMBER)])))
CASES = {
    "labels": Case(
        {"task": "classify", "labels": LABELS},
        label_types(*sorted(LABELS)),
        labels_of(dict.fromkeys(LABELS, 0.0)),
    ),
    "scored labels": Case(
        {"task": "classify", "label_values": VALUES},
        {**label_types(*VALUES), "score": NUMBER},
        labels_of(VALUES),
    ),
    "labels of any name": Case(
        {"task": "classify", "labels": ODD_LABELS},
        label_types(*sorted(ODD_LABELS)),
        labels_of(dict.fromkeys(ODD_LABELS, 0.0)),
    ),
    "embeddings": Case(
        {"task": "embed"},
        {"embedding": pa.list_(pa.float32(), FAKE_SIZE)},
        lambda prompt: {"embedding": fake_vector(prompt, FAKE_SIZE)},
    ),
    "short embeddings": Case(
        {"task": "embed", "embedding": {"dimensions": 5}},
        {"embedding": pa.list_(pa.float32(), 5)},
        lambda prompt: {"embedding": fake_vector(prompt, 5)},
    ),
    "scores": Case(
        {"task": "pool"},
        {"scores": pa.list_(pa.float32())},
        lambda prompt: {"scores": fake_vector(prompt, FAKE_SIZE)},
    ),
    "typed": Case(
        {"response_format": TYPED},
        {
            **{"summary": pa.string(), "count": pa.int64(), "rating": NUMBER, "urgent": pa.bool_()},
            **{"seen_at": pa.timestamp("us", "UTC"), "day": pa.date32()},
            **{"tags": pa.list_(pa.string()), "person": PERSON, "rest": pa.string()},
        },
        typed,
    ),
    "choices": Case(
        {"response_format": {"type": "choice", "choices": ["yes", "no", "unclear"]}},
        {},
        lambda prompt: {"generated_text": ("yes", "no", "unclear")[digest_of(prompt) % 3]},
    ),
    "patterns": Case(
        {"response_format": {"type": "regex", "regex": "[0-9]{4,}"}},
        {},
        lambda prompt: {"generated_text": str(digest_of(prompt))},
    ),
    "samples": Case(
        {"sampling": {"temperature": 0.7, "seed": 3, "n": 3}},
        {"generated_texts": pa.list_(pa.string())},
        samples,
    ),
    "log-probabilities": Case(
        {"sampling": {"max_tokens": 4, "logprobs": 2}},
        {"mean_logprob": NUMBER, "token_logprobs": NUMBERS, "top_logprobs": TOKENS},
        logprobs,
    ),
    "log-probabilities without the likeliest": Case(
        {"sampling": {"max_tokens": 4, "logprobs": 0}},
        {"mean_logprob": NUMBER, "token_logprobs": NUMBERS},
        logprobs,
    ),
    "responses": Case(
        {"request": '{"url": "/v1/chat/completions"}'}, {"response": pa.string()}, response
    ),
    "reasoning": Case(
        {"model": {"path": "x", "reasoning_parser": "qwen3"}},
        {"reasoning": pa.string()},
        lambda prompt: {"reasoning": f"reasoning of {fake_text(prompt)}"},
    ),
}
every_kind = pytest.mark.parametrize("case", [pytest.param(CASES[name], id=name) for name in CASES])


def is_pooled(case: Case) -> bool:
    return case.fields.get("task") in ("embed", "pool")


def check_rows(found: list[dict[str, Any]], rows: list[dict[str, Any]], case: Case) -> None:
    by_key = {row["row_key"]: row for row in found}
    assert by_key.keys() == {row["row_key"] for row in rows}
    for row in rows:
        have = by_key[row["row_key"]]
        if row["document"] is None:
            assert have["error"]["kind"] == "null_value" and have["status"] == "rejected"
            assert all(have[name] is None for name in case.types)
        else:
            assert have["error"] is None
            wanted = case.wanted(list(expected_prompt(row).encode()))
            for name in {*case.types, *wanted} & have.keys():
                assert have[name] == wanted[name], name


def test_every_kind_has_a_case() -> None:
    specs = [asking("/lake", **case.fields) for case in CASES.values()]
    assert all(any(kind.is_asked(spec) for spec in specs) for kind in KINDS)


@every_kind
def test_the_spec_names_the_columns_of_a_kind(case: Case) -> None:
    spec = asking("/lake", **case.fields)
    assert {field.name for field in Answers.of(spec).fields} == case.types.keys()
    assert [name for name in spec.output_columns if name not in OF_EVERY_JOB] == list(case.types)
    texts = {"generated_text", "finish_reason", "num_output_tokens"}
    assert texts.isdisjoint(spec.output_columns) == is_pooled(case)
    for name in case.types:
        with pytest.raises(SpecError, match=r"writes a column of that name|is another column"):
            output = {"uri": "/lake/out", "carry": [name]}
            asking("/lake", **{**case.fields, "output": output})


@every_kind
def test_every_format_holds_the_columns_of_a_kind(lake: Lake, case: Case, tmp_path: Path) -> None:
    rows = document_rows(3, 2)
    rows[2] = {**rows[2], "document": None}
    rows[5] = {**rows[4], "row_key": "a duplicate"}
    write_table(tmp_path / "documents", rows)
    output = {"uri": lake.address, "staging_uri": lake.staging}
    spec = asking(tmp_path, **case.fields, output=output, max_failed_fraction=0.2)
    for _ in range(2):  # the table is there then
        plan = run_and_commit(spec)
        check_rows(published(spec), rows, case)
    # Equal prompts are one request, unless they are sampled.
    assert plan.manifest.counts.num_duplicate_rows == int(spec.sampling.is_greedy)
    table = open_table(spec.output.uri, "ds")
    schema = table.snapshot(DS).schema
    if isinstance(lake, ParquetLake):
        assert {name: schema.field(name).type for name in case.types} == case.types


@every_kind
def test_a_later_day_reuses_the_answers_of_a_kind(case: Case, tmp_path: Path) -> None:
    spec = asking(tmp_path, **case.fields)
    if not spec.sampling.is_greedy:
        with pytest.raises(SpecError, match="reuse_outputs needs greedy sampling"):
            asking(tmp_path, **case.fields, reuse_outputs=True)
        return
    spec = asking(tmp_path, **case.fields, reuse_outputs=True)
    rows = document_rows(3, 2)
    write_table(tmp_path / "documents", rows)
    run_and_commit(spec)
    later = [*rows, {"row_key": "new", "document": "Another.", "query": "now?"}]
    write_table(tmp_path / "documents", later, NEXT)
    assert run_and_commit(spec, NEXT).manifest.counts.num_reused_rows == len(rows)
    check_rows(published(spec, NEXT), later, case)


@every_kind
def test_an_answer_of_a_kind_that_can_be_used_has_no_fault(case: Case) -> None:
    answers = Answers.of(asking("/lake", **case.fields))
    text, raw = answers.fake(FakePrompt(list(b"some prompt"), 21))
    assert {field.name for field in answers.raw_fields} <= raw.keys()
    assert answers.fault(text, raw) is None


NO_PROBABILITIES = "not_finite: the model gives the labels no probabilities"


@pytest.mark.parametrize(
    ("case", "text", "raw", "fault"),
    [
        ("labels", "", {"label_logprobs": [math.nan, -1.0, -1.0]}, NO_PROBABILITIES),
        ("labels", "", {"label_logprobs": [-math.inf] * 3}, NO_PROBABILITIES),
        (
            "embeddings",
            "",
            {"vector": [1.0, math.nan]},
            "not_finite: the model's vector has 1 number",
        ),
        ("scores", "", {"vector": [math.inf] * 2}, "not_finite: the model's vector has 2 numbers"),
        ("typed", '{"summary": "a', {}, "invalid_output: isn't JSON: "),
        ("choices", "maybe", {}, "invalid_output: isn't a choice"),
        ("patterns", "12a", {}, "invalid_output: doesn't match the regex"),
    ],
)
def test_an_answer_of_a_kind_that_cannot_be_used_has_a_fault(
    case: str, text: str, raw: dict[str, Any], fault: str
) -> None:
    answers = Answers.of(asking("/lake", **CASES[case].fields))
    assert str(answers.fault(text, raw)).startswith(fault)


@pytest.mark.parametrize(
    ("case", "changes", "message"),
    [
        ("labels", {"labels": ["yes"]}, "from 2 to 128"),
        ("labels", {"labels": ["yes", "no", "yes"]}, "names a label twice"),
        ("labels", {"labels": {"a": "yes", "b": "yes"}}, "the same answer"),
        ("labels", {"labels": {"Yes": "1", "yes": "2"}}, "differ by case only"),
        ("labels", {"labels": {}}, "from 2 to 128"),
        ("labels", {"labels": {f"{n}": f"{n}" for n in range(129)}}, "from 2 to 128"),
        ("labels", {"label_values": {"relevant": 1}}, "a number for each of labels"),
        ("labels", {"label_values": dict.fromkeys((*LABELS, "more"), 1)}, "a number for each"),
        ("labels", {"sampling": {"max_tokens": 8}}, "leave sampling out"),
        ("labels", {"sampling": {"max_tokens": 1, "temperature": 1}}, "leave sampling out"),
        ("labels", {"task": "generate"}, "are for task: classify"),
        ("reasoning", {"calibrate": "prior"}, "are for task: classify"),
        ("labels", {"calibrate": "mean"}, "calibrate"),
        ("embeddings", {"sampling": {"max_tokens": 8}}, "generates no tokens; leave sampling out"),
        ("embeddings", {"labels": ["a", "b"]}, "are for task: classify"),
        ("embeddings", {"label_values": {"a": 1, "b": 2}}, "are for task: classify"),
        ("scores", {"embedding": {"normalize": False}}, "embedding is for task: embed"),
        ("samples", {"embedding": {"dimensions": 8}}, "embedding is for task: embed"),
        ("embeddings", {"embedding": {"dimensions": 0}}, "dimensions"),
        ("scores", {"planner": {"estimated_output_tokens": 4}}, "no tokens; leave it out"),
        ("samples", {"sampling": {"n": 2}}, "greedy sampling gives the same answer"),
        ("samples", {"sampling": {"n": 0, "temperature": 1}}, "at least 1"),
        ("samples", {"sampling": {"n": 2, "temperature": 1, "logprobs": 1}}, "n or logprobs"),
        ("samples", {"sampling": {"logprobs": 21}}, "at most 20"),
        ("samples", {"sampling": {"logprobs": -1}}, "at least 0"),
        ("reasoning", {"task": "classify", "labels": ["a", "b"]}, "is for task: generate"),
        ("reasoning", {"sampling": {"n": 2, "temperature": 1}}, r"sampling\.n: 1"),
        ("reasoning", {"model": {"path": "x", "reasoning_parser": ""}}, "must not be empty"),
        (
            "reasoning",
            {"engine": {"extra_args": {"reasoning_parser": "qwen3"}}},
            r"model\.reasoning_parser",
        ),
    ],
)
def test_fields_that_do_not_go_with_a_kind_are_refused(
    case: str, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(SpecError, match=message):
        asking("/lake", **{**CASES[case].fields, **changes})


def test_a_key_may_be_named_like_a_column_of_texts_if_there_are_none() -> None:
    spec: JobSpec = asking(
        "/lake", task="embed", output={"uri": "/lake/out", "carry": ["generated_text"]}
    )
    assert "generated_text" not in spec.output_columns


# Vectors: embeddings, and scores of pooling heads


COLUMNS = {"embed": "embedding", "pool": "scores"}


@pytest.mark.parametrize("task", COLUMNS)
def test_a_prompt_of_exactly_the_models_length_has_its_vector(tmp_path: Path, task: str) -> None:
    rows = document_rows(1, 2)
    length = len(expected_prompt(rows[0]))
    rows[1] = {**rows[1], "query": rows[0]["query"] + "!"}
    write_table(tmp_path / "documents", rows)
    engine = {"backend": "fake", "max_model_len": length, "extra_args": {"byte_tokens": True}}
    spec = asking(tmp_path, task=task, engine=engine, max_failed_fraction=0.5)
    run_and_commit(spec)
    fits, is_longer = published(spec)
    assert fits[COLUMNS[task]] == fake_vector(list(expected_prompt(rows[0]).encode()), FAKE_SIZE)
    assert is_longer["error"]["kind"] == "prompt_too_long"


def write_config(folder: Path, **config: Any) -> str:
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config))
    return str(folder)


@pytest.mark.parametrize(
    ("config", "mode", "is_shared"),
    [
        ({"model_type": "qwen2"}, None, True),
        ({"model_type": "qwen2"}, "pooling_mode_lasttoken", True),
        ({"model_type": "qwen2"}, "pooling_mode_mean_tokens", False),
        ({"model_type": "qwen2", "is_causal": False}, None, False),
        ({"model_type": "gemma3_text", "use_bidirectional_attention": True}, None, False),
        ({"model_type": "bert"}, "pooling_mode_cls_token", False),
        ({"model_type": "modernbert"}, None, False),
    ],
)
def test_prefixes_are_shared_as_the_files_say(
    tmp_path: Path, config: dict[str, Any], mode: str | None, is_shared: bool
) -> None:
    model = tmp_path / "model"
    write_config(model, **config)
    if mode is not None:
        write_config(model / "1_Pooling", **{mode: True})
        module = {"path": "1_Pooling", "type": "sentence_transformers.models.Pooling"}
        (model / "modules.json").write_text(json.dumps([module]))
    write_table(tmp_path / "documents", document_rows(3, 4))
    manifest = plan_job(asking(tmp_path, task="embed", model={"path": str(model)}), DS).manifest
    assert (manifest.counts.planned_saving_ratio > 0) == is_shared
    assert (manifest.counts.num_shared_groups > 0) == is_shared
    assert (manifest.answers.reason_against_sharing is None) == is_shared


def test_names_of_scores_are_the_models(tmp_path: Path) -> None:
    labels = {"0": "no", "1": "yes"}
    model = write_config(tmp_path / "model", model_type="qwen2", id2label=labels)
    write_table(tmp_path / "documents", document_rows(1, 2))
    plan = run_and_commit(asking(tmp_path, task="pool", model={"path": model}))
    assert plan.manifest.answers.score_labels == ("no", "yes")
    field = pq.read_schema(tmp_path / "out" / f"ds={DS}" / "data.parquet").field("scores")
    assert json.loads(field.metadata[b"batchllm.labels"]) == ["no", "yes"]
