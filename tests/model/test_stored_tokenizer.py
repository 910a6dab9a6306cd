"""Files that say what transformers would load give the same tokenizer without it; others don't."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from prompts.test_tokenizer import job
from support.prompt_texts import FRAGMENTS, long_text
from support.tokenizer_families import END, FAMILIES, START

from batchllm_operator.model import read_stored
from batchllm_operator.prompts import load_tokenizer
from batchllm_operator.prompts import tokenizer as tokenizer_module
from batchllm_operator.prompts.tokenizer import ModelTokenizer

Change = Callable[[dict[str, Any]], object]


def make_qwen(folder: Path) -> None:
    from transformers import Qwen2Tokenizer

    model = json.loads(FAMILIES["qwen2"]().to_str())["model"]
    merges: Any = [tuple(merge) for merge in model["merges"]]
    Qwen2Tokenizer(
        vocab=model["vocab"],
        merges=merges,
        unk_token=START,
        eos_token=END,
        pad_token=END,
        extra_special_tokens=["<|tool|>", "<|think|>"],  # behind the vocabulary
    ).save_pretrained(folder)


def make_llama(folder: Path) -> None:
    from transformers import PreTrainedTokenizerFast

    PreTrainedTokenizerFast(
        tokenizer_object=FAMILIES["llama3"](), bos_token=START, eos_token=END
    ).save_pretrained(folder)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a model of each kind."""
    folder = tmp_path_factory.mktemp("models")
    for name, make in (("qwen2", make_qwen), ("llama", make_llama)):
        make(folder / name)
        config = {"model_type": name, "max_position_embeddings": 321}
        (folder / name / "config.json").write_text(json.dumps(config))
    return folder


def changed(models: Path, folder: Path, kind: str, file: str, change: Change) -> Path:
    """A copy of a model with one file changed."""
    copy = Path(shutil.copytree(models / kind, folder / "changed"))
    content = json.loads((copy / file).read_text())
    change(content)
    (copy / file).write_text(json.dumps(content))
    return copy


def by_transformers(folder: Path, monkeypatch: pytest.MonkeyPatch) -> ModelTokenizer:
    with monkeypatch.context() as patched:
        patched.setattr(tokenizer_module, "read_stored", lambda _: None)
        found = load_tokenizer(job(folder), "2026-01-31")
    assert isinstance(found, ModelTokenizer)
    return found


@pytest.mark.parametrize("kind", ["qwen2", "llama"])
def test_it_is_what_transformers_loads(
    models: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers import AutoTokenizer

    stored = read_stored(models / kind)
    assert stored is not None
    loaded = AutoTokenizer.from_pretrained(models / kind)
    assert json.loads(stored.backend.to_str()) == json.loads(loaded.backend_tokenizer.to_str())
    assert stored.special_tokens == loaded.special_tokens_map
    direct = load_tokenizer(job(models / kind), "2026-01-31")
    other = by_transformers(models / kind, monkeypatch)
    assert direct.fingerprint == other.fingerprint
    assert (direct.max_model_len, direct.model_version) == (321, other.model_version)
    texts = [long_text(0), "".join(FRAGMENTS), *FRAGMENTS, ""]
    ids = direct.encode(texts).to_lists()
    assert ids == other.encode(texts).to_lists() == loaded(texts)["input_ids"]
    assert [direct.decode(each) for each in ids] == [loaded.decode(each) for each in ids]


@pytest.mark.parametrize("kind", ["qwen2", "llama"])
def test_transformers_isnt_imported(models: Path, kind: str) -> None:
    code = (
        "import sys, json; from batchllm_operator.prompts import load_tokenizer;"
        "from batchllm_operator.spec import JobSpec;"
        "spec = JobSpec.model_validate(json.loads(sys.argv[1]));"
        "print(load_tokenizer(spec, 'd').encode(['a fox']).num_tokens > 0);"
        "print({'transformers', 'torch'} & set(sys.modules))"
    )
    spec = json.dumps(job(models / kind).model_dump(mode="json"))
    done = subprocess.run(
        [sys.executable, "-P", "-c", code, spec], capture_output=True, text=True, check=True
    )
    assert done.stdout.split() == ["True", "set()"]


def remove(name: str) -> Change:
    return lambda content: content.pop(name)


def put(**values: Any) -> Change:
    return lambda content: content.update(values)


def special_is_normalized(content: dict[str, Any]) -> None:
    for token in content["added_tokens"]:
        if token["content"] == END:
            token["normalized"] = True


def other_pattern(content: dict[str, Any]) -> None:
    content["pre_tokenizer"]["pretokenizers"][0]["pattern"]["Regex"] = r"\s+|\S+"


def ids_with_a_gap(content: dict[str, Any]) -> None:
    content["added_tokens"][-1]["id"] += 5


@pytest.mark.parametrize("kind", ["qwen2", "llama"])
@pytest.mark.parametrize(
    ("file", "change"),
    [
        ("config.json", put(model_type="mistral")),
        ("config.json", put(auto_map={"AutoConfig": "own.Config"})),
        ("config.json", put(text_config={})),
        ("config.json", remove("max_position_embeddings")),
        ("config.json", put(max_position_embeddings="321")),
        ("tokenizer_config.json", put(tokenizer_class="GPT2Tokenizer")),
        ("tokenizer_config.json", remove("tokenizer_class")),
        ("tokenizer_config.json", put(auto_map={"AutoTokenizer": ["own.Tokenizer", None]})),
        ("tokenizer_config.json", put(fix_mistral_regex=True)),
        ("tokenizer_config.json", put(split_special_tokens=True)),
        ("tokenizer_config.json", put(add_prefix_space=True)),
        ("tokenizer_config.json", put(eos_token="<|another|>")),
        ("tokenizer_config.json", put(image_token="<|image|>")),
        ("tokenizer_config.json", put(extra_special_tokens=["<|another|>"])),
        ("tokenizer_config.json", put(extra_special_tokens={"image_token": END})),
        ("tokenizer_config.json", put(added_tokens_decoder={})),
        ("tokenizer.json", put(post_processor=None)),
        ("tokenizer.json", special_is_normalized),
        ("tokenizer.json", remove("added_tokens")),
        ("tokenizer.json", put(model={"type": "nosuch"})),
    ],
)
def test_in_doubt_transformers_loads_it(
    models: Path, tmp_path: Path, kind: str, file: str, change: Change
) -> None:
    assert read_stored(changed(models, tmp_path, kind, file, change)) is None


@pytest.mark.parametrize(
    "change",
    [
        other_pattern,
        ids_with_a_gap,
        put(normalizer=None),
        put(decoder=None),
        lambda content: content["model"].update(ignore_merges=True),
        lambda content: content["model"].update(unk_token=END),
    ],
)
def test_qwens_class_has_code_of_its_own(models: Path, tmp_path: Path, change: Change) -> None:
    assert read_stored(changed(models, tmp_path, "qwen2", "tokenizer.json", change)) is None


@pytest.mark.parametrize("name", ["special_tokens_map.json", "added_tokens.json"])
def test_older_files_are_left_to_transformers(models: Path, tmp_path: Path, name: str) -> None:
    copy = changed(models, tmp_path, "llama", "config.json", put())
    assert read_stored(copy) is not None
    (copy / name).write_text("{}")
    assert read_stored(copy) is None


def test_a_folder_that_lacks_a_file(models: Path, tmp_path: Path) -> None:
    assert read_stored(tmp_path) is None
    copy = changed(models, tmp_path, "llama", "config.json", put())
    (copy / "tokenizer.json").write_text("{")
    assert read_stored(copy) is None
