"""What an adapter has of its own beside weights: tokens, a tokenizer, a chat template."""

from __future__ import annotations

import json
import logging
import shutil
from pathlib import Path
from typing import Any

import pytest
from prompts.test_tokenizer import CHAT_TEMPLATE, build_tokenizer
from support.adapters import write_adapter
from support.fake_job import DS, document_rows, fake_spec, write_table
from tokenizers import Tokenizer

from batchllm_operator.errors import ModelError
from batchllm_operator.plan.plan_job import plan_job
from batchllm_operator.spec import JobSpec

MODULES = {"model.layers.0.self_attn.q_proj": (8, 8)}
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return build_tokenizer(tmp_path / "model")


@pytest.fixture
def adapter(tmp_path: Path, model: Path) -> Path:
    """An adapter with the files of the model's tokenizer, as trainers save them."""
    folder = write_adapter(tmp_path / "tuned", MODULES)
    for name in TOKENIZER_FILES:
        if (model / name).exists():
            shutil.copy(model / name, folder)
    return folder


def job(folder: Path, *, chat: bool = True) -> JobSpec:
    write_table(folder / "documents", document_rows(1, 2))
    model = {"path": str(folder / "model"), "adapters": {"a": str(folder / "tuned")}}
    prompt: dict[str, Any] = {"system": None, "template": "{document}", "chat_template": chat}
    engine = {"backend": "fake", "extra_args": {"byte_tokens": False}}
    return fake_spec(folder, model={**model, "adapter": "a"}, prompt=prompt, engine=engine)


def change(path: Path, **fields: Any) -> None:
    old = json.loads(path.read_text()) if path.exists() else {}
    path.write_text(json.dumps({**old, **fields}))


def add_token(folder: Path, token: str) -> None:
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.add_special_tokens([token])
    tokenizer.save(str(folder / "tokenizer.json"))


def warnings_of(spec: JobSpec, caplog: pytest.LogCaptureFixture) -> str:
    with caplog.at_level(logging.WARNING):
        plan_job(spec, DS)
    return "\n".join(each.message for each in caplog.records if "model.adapters" in each.message)


def test_the_models_own_files_beside_an_adapter_are_no_warning(
    tmp_path: Path, adapter: Path, caplog: pytest.LogCaptureFixture
) -> None:
    tokenizer = Tokenizer.from_file(str(adapter / "tokenizer.json"))
    tokenizer.enable_truncation(64)
    tokenizer.enable_padding()
    tokenizer.save(str(adapter / "tokenizer.json"))
    assert warnings_of(job(tmp_path), caplog) == ""


@pytest.mark.parametrize("place", ["tokenizer.json", "added_tokens.json", "tokenizer_config.json"])
def test_tokens_that_the_model_lacks_are_refused_by_name(
    tmp_path: Path, adapter: Path, place: str
) -> None:
    if place == "tokenizer.json":
        add_token(adapter, "<new>")
    elif place == "added_tokens.json":
        change(adapter / place, **{"<new>": 900})
    else:
        change(adapter / place, added_tokens_decoder={"900": {"content": "<new>"}})
    with pytest.raises(ModelError, match=r"model\.adapters\.a: .* that the model lacks: '<new>'"):
        plan_job(job(tmp_path), DS)


def test_a_token_that_fills_up_batches_is_a_warning_at_most(
    tmp_path: Path, adapter: Path, caplog: pytest.LogCaptureFixture
) -> None:
    add_token(adapter, "<pad>")
    change(adapter / "tokenizer_config.json", pad_token="<pad>")
    assert "a: has a tokenizer of its own" in warnings_of(job(tmp_path), caplog)


@pytest.mark.parametrize("place", ["chat_template.jinja", "tokenizer_config.json"])
@pytest.mark.parametrize("chat", [True, False])
def test_a_chat_template_of_its_own_is_named_where_one_is_used(
    tmp_path: Path, adapter: Path, caplog: pytest.LogCaptureFixture, place: str, chat: bool
) -> None:
    (adapter / "chat_template.jinja").unlink(missing_ok=True)
    if place == "chat_template.jinja":
        (adapter / place).write_text("### " + CHAT_TEMPLATE)
    else:
        change(adapter / place, chat_template="### " + CHAT_TEMPLATE)
    found = warnings_of(job(tmp_path, chat=chat), caplog)
    assert ("a: has a chat template of its own" in found) == chat


def test_a_damaged_tokenizer_is_named(tmp_path: Path, adapter: Path) -> None:
    (adapter / "tokenizer.json").write_text("{")
    with pytest.raises(ModelError, match=r"model\.adapters\.a: its tokenizer\.json can't be read"):
        plan_job(job(tmp_path), DS)
