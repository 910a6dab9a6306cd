"""Prompts of rows: too long ones are cut in the named columns; a doubled start is warned of."""

import logging
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from prompts.test_tokenizer import CHAT_TEMPLATE, END, START, build_tokenizer
from support.fake_job import DS, document_rows, fake_spec, job_fields, write_table

from batchllm_operator.commit.commit_run import commit_run
from batchllm_operator.errors import FailedRowsError, SpecError
from batchllm_operator.plan.plan_job import plan_job
from batchllm_operator.plan.rows.prompting import Prompter
from batchllm_operator.prompts import Tokenizer, load_tokenizer
from batchllm_operator.run.run_shards import run_worker
from batchllm_operator.spec import JobSpec, parse_spec

MAX_LEN, MAX_TOKENS = 100, 8
ROOM = MAX_LEN - MAX_TOKENS


def byte_job(lake: Path, **prompt: Any) -> JobSpec:
    changes: dict[str, Any] = {
        "prompt": {"system": None, "template": "<{document}|{query}>", **prompt},
        "engine": {"max_model_len": MAX_LEN},
        "planner": {"num_shards": 1},
    }
    return fake_spec(lake, **changes)


def texts(spec: JobSpec, rows: list[dict[str, Any]]) -> list[str]:
    """The prompts that rows become, as text."""
    tokenizer = load_tokenizer(spec, DS)
    prompts = Prompter(spec, tokenizer, None).prompts(pa.RecordBatch.from_pylist(rows)).tokens
    return [tokenizer.decode(prompts.prompt(idx).tolist()) for idx in range(len(prompts))]


@pytest.mark.parametrize(
    ("cut", "document"),
    [
        ("end", "".join(map(chr, range(200, 242)))),
        ("start", "".join(map(chr, range(258, 300)))),
        ("middle", "".join(map(chr, [*range(200, 221), *range(279, 300)]))),
    ],
)
def test_a_prompt_that_is_too_long_keeps_all_but_what_is_cut(
    tmp_path: Path, cut: str, document: str
) -> None:
    """Characters of two bytes are never cut in half."""
    long = {"row_key": "a", "document": "".join(map(chr, range(200, 300))), "query": "why?"}
    short = {"row_key": "b", "document": "short", "query": "what?"}
    spec = byte_job(tmp_path, truncate={"document": cut})
    assert texts(spec, [long, short]) == [f"<{document}|why?>", "<short|what?>"]
    assert ROOM - 2 <= len(f"<{document}|why?>".encode()) <= ROOM


def test_several_columns_lose_the_same_share_and_what_cannot_fit_still_fails(
    tmp_path: Path,
) -> None:
    spec = byte_job(tmp_path, truncate={"query": "start", "document": "end"})
    rows = [
        {"document": "d" * 300, "query": "q" * 100 + "!"},
        {"document": "d", "query": "q"},
        {"document": None, "query": "q" * 500},
        {"document": "1.5", "query": "q"},
    ]
    first, second, last = texts(spec, rows)
    assert first.endswith("q!>") and 64 <= first.count("d") <= 67 and 20 <= first.count("q") <= 23
    assert (second, last) == ("<d|q>", "<1.5|q>")
    fixed = byte_job(tmp_path, template="x" * MAX_LEN + "{document}", truncate={"document": "end"})
    prompts = Prompter(fixed, load_tokenizer(fixed, DS), None)
    found = prompts.prompts(pa.RecordBatch.from_pylist([{"document": "abc"}]))
    assert (found.tokens.lengths.tolist(), found.num_truncated) == ([103], 0)
    # Where the answer's room can't be had, what the model allows is enough.
    tight = byte_job(tmp_path, template="x" * 95 + "{document}", truncate={"document": "end"})
    assert texts(tight, [{"document": "abcdefghi"}]) == ["x" * 95]


def test_a_job_publishes_cut_rows_and_counts_them(tmp_path: Path) -> None:
    rows = [
        {"row_key": f"r{idx}", "document": "word " * length, "query": str(idx)}
        for idx, length in enumerate((1, 50, 5, 3_000_000))
    ]
    write_table(tmp_path / "documents", rows)
    whole = byte_job(tmp_path)
    with pytest.raises(FailedRowsError, match="2 of 4 rows failed"):
        plan_job(whole, DS)
    spec = byte_job(tmp_path, truncate={"document": "end"})
    assert spec.identity != whole.identity
    plan = plan_job(spec, DS)
    counts = plan.manifest.counts
    assert (counts.num_rejected_rows, counts.num_truncated_rows) == (0, 2)
    run_worker(plan)
    report = commit_run(plan.folder.uri)
    assert (report.num_rows_out, report.plan.num_truncated_rows) == (4, 2)
    assert plan_job(spec, DS).manifest.plan_id == plan.manifest.plan_id


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ({"truncate": {"absent": "end"}}, "truncate: template places no column 'absent'"),
        ({"truncate": {"document": "tail"}}, "truncate"),
        ({"template": None, "messages": "document", "truncate": {"document": "end"}}, "are whole"),
    ],
)
def test_what_cannot_be_cut_is_refused(
    tmp_path: Path, prompt: dict[str, Any], message: str
) -> None:
    with pytest.raises(SpecError, match=message):
        byte_job(tmp_path, **prompt)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_tokenizer(tmp_path_factory.mktemp("model"), bos=True)


def with_model(model: Path, **changes: Any) -> tuple[JobSpec, Tokenizer]:
    fields = job_fields("/lake", model={"path": str(model)}, **changes)
    fields["engine"] = {"max_model_len": 40}
    if "task" in changes:
        fields.pop("sampling")
    spec = parse_spec(fields, source="test spec")
    return spec, load_tokenizer(spec, DS)


LONG = "The quick brown fox jumps over the lazy dog: na\u00efve caf\u00e9 \u8868 \U0001f642. " * 9


@pytest.mark.parametrize("cut", ["end", "middle", "start"])
@pytest.mark.parametrize("form", ["template", "chat_template", "turns"])
def test_ids_of_a_cut_prompt_are_those_of_its_text(model: Path, form: str, cut: str) -> None:
    template = "Doc: {document} Q:"
    prompt: dict[str, Any] = {"system": None, "template": template}
    if form == "turns":
        prompt |= {"template": None, "turns": [{"role": "user", "template": template}]}
    elif form == "chat_template":
        prompt["chat_template"] = True
    spec, tokenizer = with_model(model, prompt={**prompt, "truncate": {"document": cut}})
    values = [LONG[skip:] for skip in range(7)] + [f"{END} {LONG}"]
    rows = pa.record_batch({"document": values})
    tokens = Prompter(spec, tokenizer, None).prompts(rows).tokens
    assert 24 <= tokens.lengths.min() <= tokens.lengths.max() <= 40 - MAX_TOKENS
    for idx in range(len(values)):
        ids = tokens.prompt(idx).tolist()
        text = tokenizer.decode(ids)
        head, tail = text.split("Doc: ")[1].rsplit(" Q:")
        document, source = head, values[idx]
        assert source.startswith(document) or cut != "end"
        assert source.endswith(document) or cut != "start"
        whole = pa.record_batch({"document": [document]})
        again = Prompter(spec, tokenizer, None).prompts(whole).tokens
        assert again.prompt(0).tolist() == ids, tail


@pytest.mark.parametrize(
    ("template", "cut", "side"),
    [
        ("{document}", "end", "right"),
        ("{document}", "start", "left"),
        ("q: {document}", "end", "right"),
    ],
)
def test_vectors_of_cut_texts_have_the_ids_of_sentence_transformers(
    model: Path, template: str, cut: str, side: str
) -> None:
    from transformers import AutoTokenizer

    prompt = {"system": None, "template": template, "truncate": {"document": cut}}
    spec, tokenizer = with_model(model, task="embed", prompt=prompt)
    values = [LONG[skip:] for skip in range(11)] + ["short"]
    found = Prompter(spec, tokenizer, None).prompts(pa.record_batch({"document": values}))
    own = AutoTokenizer.from_pretrained(model, truncation_side=side)
    whole = [template.format(document=each) for each in values]
    wanted = own(whole, truncation=True, max_length=40)
    assert found.tokens.to_lists() == wanted["input_ids"]
    assert found.num_truncated == 11
    assert np.max(found.tokens.lengths) == 40


@pytest.mark.parametrize("cut", [None, "end", "middle", "start"])
def test_what_is_too_long_for_any_tokens_is_never_tokenized(
    model: Path, cut: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompt: dict[str, Any] = {"system": None, "template": "{document}|{query}"}
    prompt["truncate"] = {"document": cut} if cut else {}
    spec, tokenizer = with_model(model, prompt=prompt)
    most = tokenizer.max_prompt_bytes
    encode = tokenizer.encode

    def checked(texts: list[str]) -> Any:
        assert all(len(text) <= most + 20 for text in texts)
        return encode(texts)

    monkeypatch.setattr(tokenizer, "encode", checked)
    rows = pa.record_batch({"document": ["a " * most, "b"], "query": ["?", "b" * (most + 1)]})
    found = Prompter(spec, tokenizer, None).prompts(rows)
    assert found.rendered.errors[1].kind == "prompt_too_long"
    assert (0 in found.rendered.errors) == (cut is None)
    assert found.num_truncated == (cut is not None)


# A control token that prompts begin with twice


PLAIN = {"system": None, "template": "{document}"}
CHAT = {"system": None, "template": "{document}", "chat_template": True}
TURNS = {"system": None, "template": None, "turns": [{"role": "user", "template": "{document}"}]}


def warnings_of(
    folder: Path,
    caplog: pytest.LogCaptureFixture,
    prompt: dict[str, Any],
    *,
    start: str = "",
    chat_template: str = CHAT_TEMPLATE,
) -> list[str]:
    model = build_tokenizer(folder / "model", bos=True, chat_template=chat_template)
    rows = [{**row, "document": start + row["document"]} for row in document_rows(2, 2)]
    write_table(folder / "documents", rows)
    engine = {"backend": "fake", "extra_args": {"byte_tokens": False}}
    spec = fake_spec(folder, model={"path": str(model)}, prompt=prompt, engine=engine)
    with caplog.at_level(logging.WARNING):
        plan_job(spec, DS)
    return [record.message for record in caplog.records if "twice" in record.message]


@pytest.mark.parametrize("prompt", [PLAIN, CHAT, TURNS])
def test_a_token_that_is_added_once_is_no_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, prompt: dict[str, Any]
) -> None:
    assert warnings_of(tmp_path, caplog, prompt) == []


@pytest.mark.parametrize(
    ("prompt", "start"),
    [
        ({"template": START + "{document}"}, ""),
        ({"system": START, "template": "{document}"}, ""),
        ({"template": "{document}"}, START),
    ],
)
def test_a_token_that_the_prompt_spells_and_the_tokenizer_adds_is_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, prompt: dict[str, Any], start: str
) -> None:
    [message] = warnings_of(tmp_path, caplog, {**PLAIN, **prompt}, start=start)
    assert f"begin with {START} twice" in message
    assert "its tokenizer adds one; leave it out of prompt.template" in message


@pytest.mark.parametrize(("prompt", "field"), [(CHAT, "template"), (TURNS, "turns")])
def test_a_chat_template_that_spells_it_twice_is_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, prompt: dict[str, Any], field: str
) -> None:
    [message] = warnings_of(tmp_path, caplog, prompt, chat_template=START + CHAT_TEMPLATE)
    assert "its chat template adds one (or both: then correct that); leave it" in message
    assert f"out of prompt.{field}," in message
