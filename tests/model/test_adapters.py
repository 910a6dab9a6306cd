"""Adapters on the hub, here in its local cache; what they have of their own beside weights."""

import json
import logging
import shutil
from pathlib import Path
from typing import Any

import huggingface_hub.constants
import numpy as np
import pytest
from prompts.test_tokenizer import CHAT_TEMPLATE, build_tokenizer
from safetensors.numpy import save_file
from support.adapters import write_adapter
from support.fake_job import DS, document_rows, fake_spec, write_table
from tokenizers import Tokenizer

from batchllm_operator.errors import ModelError
from batchllm_operator.model import check_adapters, find_adapters
from batchllm_operator.plan.plan_job import plan_job
from batchllm_operator.spec import JobSpec, ModelSpec

MODULES = {"model.layers.0.self_attn.q_proj": (8, 8)}
COMMITS = ("1" * 40, "2" * 40)


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    return tmp_path


def publish(cache: Path, name: str, commit: str) -> Path:
    """The empty folder of a commit, to which the branch `main` points."""
    repository = cache / f"models--{name.replace('/', '--')}"
    (repository / "refs").mkdir(parents=True, exist_ok=True)
    (repository / "refs" / "main").write_text(commit)
    folder = repository / "snapshots" / commit
    folder.mkdir(parents=True)
    return folder


def test_its_version_is_the_commit(cache: Path) -> None:
    model = ModelSpec(path="we/base", adapters={"a": "we/tuned"}, adapter="a")
    for commit in COMMITS:
        folder = publish(cache, "we/tuned", commit)
        write_adapter(folder, MODULES, rank_pattern={"k_proj": 32})
        [adapter] = find_adapters(model)
        assert (adapter.folder, adapter.version) == (folder, f"commit:{commit}")
        assert adapter.rank == 32


def test_an_unknown_name(cache: Path) -> None:
    model = ModelSpec(path="we/base", adapters={"a": "we/unknown"}, adapter="a")
    with pytest.raises(ModelError, match=r"model\.adapters\.a: we/unknown: the hub"):
        find_adapters(model)


def test_a_model_on_the_hub_is_compared_once_its_weights_are_here(cache: Path) -> None:
    write_adapter(publish(cache, "we/tuned", COMMITS[0]), MODULES)
    model = ModelSpec(path="we/base", adapters={"a": "we/tuned"}, adapter="a")
    folder = publish(cache, "we/base", COMMITS[1])
    assert len(find_adapters(model)) == 1
    name = "model.layers.0.self_attn.q_proj.weight"
    save_file({name: np.zeros((8, 16), "<f4")}, folder / "model.safetensors")
    with pytest.raises(ModelError, match="16 inputs in the model, and 8 in the adapter"):
        find_adapters(model)


@pytest.mark.parametrize(
    ("base", "warns"), [("we/base", False), ("We/Base", False), ("we/other", True), (None, False)]
)
def test_another_base_model_is_a_warning(
    cache: Path, caplog: pytest.LogCaptureFixture, base: str | None, warns: bool
) -> None:
    folder = publish(cache, "we/tuned", COMMITS[0])
    write_adapter(folder, MODULES, base_model_name_or_path=base)
    model = ModelSpec(path="we/base", adapters={"a": "we/tuned"}, adapter="a")
    with caplog.at_level(logging.WARNING):
        check_adapters(model, find_adapters(model), None, chat=False)
    assert ("was trained on we/other" in caplog.text) == warns


# Tokens, a tokenizer, a chat template of their own


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
