"""Prompts that begin with the same control token twice are warned of once, with the cure."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
from prompts.test_tokenizer import CHAT_TEMPLATE, START, build_tokenizer
from support.fake_job import DS, document_rows, fake_spec, write_table

from batchllm_operator.plan.plan_job import plan_job

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
