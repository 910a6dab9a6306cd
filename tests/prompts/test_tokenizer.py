"""Token ids must be those that the engine's own tokenizer gives."""

import gc
import json
import shutil
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from batchllm_operator import prompts
from batchllm_operator.errors import ExitCode, ModelError
from batchllm_operator.prompts import Tokenizer, length_fault, sample_chat
from batchllm_operator.prompts import tokenizer as tokenizer_module
from batchllm_operator.prompts.tokenizer import Utf8Tokenizer
from batchllm_operator.spec import JobSpec

END, START = "<|im_end|>", "<|im_start|>"
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
TEXTS = [
    "The quick brown fox jumps over the lazy dog.",
    "",
    " leading and trailing ",
    "naïve café 表 🙂",
    f"a special token {END} in the data {START}",
    "line\n\nline\ttab\r\n",
    "{braces} and <|im_end",
]
CONFIG = {
    "architectures": ["Qwen2ForCausalLM"],
    "model_type": "qwen2",
    "vocab_size": 400,
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "max_position_embeddings": 321,
}


def load_tokenizer(spec: JobSpec, ds: str = "2026-01-31") -> Tokenizer:
    return prompts.load_tokenizer(spec, ds)


def build_tokenizer(
    folder: Path, *, chat_template: str | None = CHAT_TEMPLATE, bos: bool = False, extra: str = ""
) -> Path:
    """A model folder without weights: config.json and a byte-level BPE trained on a few lines."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
    from transformers import PreTrainedTokenizerFast

    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=360,
        special_tokens=[END, START],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    bpe.train_from_iterator([*TEXTS, extra] * 3, trainer)
    if bos:
        bpe.post_processor = processors.TemplateProcessing(
            single=f"{START} $A", special_tokens=[(START, bpe.token_to_id(START))]
        )
    fast = PreTrainedTokenizerFast(
        tokenizer_object=bpe, eos_token=END, bos_token=START, chat_template=chat_template
    )
    fast.save_pretrained(folder)
    (folder / "config.json").write_text(json.dumps(CONFIG), encoding="utf-8")
    return folder


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_tokenizer(tmp_path_factory.mktemp("model"))


@pytest.fixture
def own_model(model: Path, tmp_path: Path) -> Path:
    """A copy of `model` to spoil."""
    return Path(shutil.copytree(model, tmp_path / "model"))


def job(
    path: Path | str,
    *,
    backend: str = "vllm",
    max_model_len: int | None = None,
    extra_args: dict[str, Any] | None = None,
    **prompt: Any,
) -> JobSpec:
    return JobSpec.model_validate(
        {
            "spec_version": 1,
            "name": "t",
            "input": {"uri": "in", "key": "id"},
            "prompt": {"template": "{doc}", **prompt},
            "model": {"path": str(path)},
            "output": {"uri": "out"},
            "engine": {
                "backend": backend,
                "max_model_len": max_model_len,
                "extra_args": extra_args or {},
            },
        }
    )


def ids_of(spec: JobSpec, texts: list[str], ds: str = "2026-01-31") -> list[list[int]]:
    """Token ids of rows with these texts in the column `doc`."""
    tokenizer = load_tokenizer(spec, ds)
    rendered = tokenizer.renderer(spec.prompt).render(pa.record_batch({"doc": texts}))
    return tokenizer.encode(rendered.present()).to_lists()


def reference(path: Path) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(path)


def refused(spec: JobSpec) -> str:
    with pytest.raises(ModelError) as caught:
        load_tokenizer(spec)
    assert caught.value.exit_code == ExitCode.INVALID
    message = str(caught.value)
    assert spec.model.path in message
    assert "\n" not in message
    return message


# Token ids


def long_prompts(num: int = 12) -> list[str]:
    document = " ".join(f"{text} vocabulary of kinds {idx}" for idx in range(40) for text in TEXTS)
    return [f"{document}\nquestion {idx}: {TEXTS[idx % len(TEXTS)]}" for idx in range(num)]


def test_plain_prompts_get_the_models_own_token_ids(model: Path) -> None:
    plain, tokenizer = reference(model), load_tokenizer(job(model))
    assert tokenizer.library == "fastokens"
    texts = [*TEXTS, *long_prompts()]
    expected = [plain(text)["input_ids"] for text in texts]
    assert tokenizer.encode(texts).to_lists() == expected
    assert tokenizer.encode(texts[::-1]).to_lists() == expected[::-1]
    assert tokenizer.encode([]).to_lists() == []


def test_a_vocabulary_is_not_searched_for_garbage_while_it_is_loaded(
    model: Path, tmp_path: Path
) -> None:
    load_tokenizer(job(model))  # imports
    phases: list[str] = []

    def note(phase: str, info: dict[str, int]) -> None:
        phases.append(phase)

    gc.callbacks.append(note)
    try:
        load_tokenizer(job(model))
    finally:
        gc.callbacks.remove(note)
    assert phases.count("start") <= 1 and gc.isenabled()
    refused(job(tmp_path))
    assert gc.isenabled()


def test_special_tokens_that_the_model_adds_are_added_once(tmp_path: Path) -> None:
    model = build_tokenizer(tmp_path, bos=True)
    plain = reference(model)
    encoded = load_tokenizer(job(model)).encode(TEXTS).to_lists()
    assert encoded == [plain(text)["input_ids"] for text in TEXTS]
    assert all(ids[0] == plain.bos_token_id for ids in encoded)
    [chat] = ids_of(job(model, chat_template=True), ["hello"])
    assert chat[:2].count(plain.bos_token_id) == 1  # the template's own, and no other before it


@pytest.mark.parametrize("system", [None, "Be brief.", "{braces} {% raw %}"])
def test_chat_prompts_get_what_the_models_chat_template_gives(
    model: Path, system: str | None
) -> None:
    plain = reference(model)
    texts = [*filter(None, TEXTS), *long_prompts()]
    head = [] if system is None else [{"role": "system", "content": system}]
    expected = [
        plain.apply_chat_template(
            [*head, {"role": "user", "content": text}],
            add_generation_prompt=True,
            tokenize=True,
            return_dict=True,
        )["input_ids"]
        for text in texts
    ]
    spec = job(model, chat_template=True, system=system, special_tokens="keep")
    assert ids_of(spec, texts) == expected


@pytest.mark.parametrize("prefix", ["Category:", "{braces}", "{% raw %}", " 表\n", f"{START}x"])
@pytest.mark.parametrize("form", ["template", "turns", "messages"])
def test_a_begun_answer_has_the_tokens_of_a_last_message_that_is_continued(
    model: Path, form: str, prefix: str
) -> None:
    forms = {
        "template": {"template": "{doc}", "chat_template": True},
        "turns": {"template": None, "turns": [{"role": "user", "template": "{doc}"}]},
        "messages": {"template": None, "messages": "doc"},
    }
    spec = job(model, answer_prefix=prefix, **forms[form])
    messages = [{"role": "user", "content": "The quick brown fox"}]
    text = json.dumps(messages) if form == "messages" else messages[0]["content"]
    expected = reference(model).apply_chat_template(
        [*messages, {"role": "assistant", "content": prefix}],
        continue_final_message=True,
        tokenize=True,
        return_dict=True,
    )["input_ids"]
    assert ids_of(spec, [text]) == [expected]


def test_answers_follow_a_begun_one(model: Path, caplog: pytest.LogCaptureFixture) -> None:
    tokenizer, plain = load_tokenizer(job(model)), reference(model)
    prompt = f"{START}user\nhello{END}\n{START}assistant\nThe lazy"
    assert tokenizer.answer_tokens(prompt, [" dog", "."]) == [
        plain(answer)["input_ids"] for answer in (" dog", ".")
    ]
    assert not caplog.messages
    tokenizer.answer_tokens(f"{prompt} ", ["dog", "."])
    assert "end and 'dog' would be one token" in caplog.messages[0]


def test_a_prompt_longer_than_the_model_is_counted_in_full_and_quietly(
    model: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    [ids] = ids_of(job(model), ["word " * 1000])
    assert len(ids) > 321
    assert capfd.readouterr().err == ""


# Limits


def test_the_limit_is_the_models_unless_the_spec_says_less(model: Path) -> None:
    assert load_tokenizer(job(model)).max_model_len == 321
    assert load_tokenizer(job(model, max_model_len=64)).max_model_len == 64


def test_a_model_that_does_not_say_needs_a_limit_in_the_spec(own_model: Path) -> None:
    (own_model / "config.json").write_text('{"model_type": "mamba"}', encoding="utf-8")
    assert "engine.max_model_len" in refused(job(own_model))
    assert load_tokenizer(job(own_model, max_model_len=64)).max_model_len == 64


def limited(num_tokens: int, task: str = "generate") -> Tokenizer:
    """A tokenizer of bytes with a limit."""
    extra_args = {"byte_tokens": True}
    spec = job("none", backend="fake", max_model_len=num_tokens, extra_args=extra_args)
    return load_tokenizer(
        JobSpec.model_validate({**spec.model_dump(exclude={"sampling"}), "task": task})
    )


@pytest.mark.parametrize(
    ("task", "num_tokens", "wanted"),
    [
        ("generate", 0, "empty_prompt: the tokenizer makes no tokens of this row's text"),
        ("generate", 1, None),
        ("generate", 9, None),
        ("generate", 10, "prompt_too_long: 10 tokens, the model allows 9 and one of output"),
        *((task, 10, None) for task in ("embed", "pool")),
        ("embed", 11, "prompt_too_long: 11 tokens, the model allows 10"),
        ("pool", 11, "prompt_too_long: 11 tokens, the model allows 10"),
    ],
)
def test_a_prompt_has_tokens_and_leaves_room_for_an_output(
    task: str, num_tokens: int, wanted: str | None
) -> None:
    fault = length_fault(num_tokens, limited(10, task))
    assert (fault and str(fault)) == wanted


# Fingerprints


def test_the_fingerprint_is_that_of_the_content(
    model: Path, own_model: Path, tmp_path: Path
) -> None:
    """Truncation and padding are settings inside the tokenizer that nothing here uses."""
    stored = json.loads((own_model / "tokenizer.json").read_text())
    stored["truncation"] = {
        "direction": "Right", "max_length": 7, "strategy": "LongestFirst", "stride": 0
    }  # fmt: skip
    (own_model / "tokenizer.json").write_text(json.dumps(stored))
    words = build_tokenizer(tmp_path / "words", extra="entirely different words words words")
    template = CHAT_TEMPLATE.replace("assistant", "model")
    chat = build_tokenizer(tmp_path / "chat", chat_template=template)

    def fingerprint(path: Path, *, used: bool = False) -> str:
        return load_tokenizer(job(path, chat_template=used)).fingerprint

    assert fingerprint(own_model) == fingerprint(model) == fingerprint(chat) != fingerprint(words)
    assert fingerprint(chat, used=True) != fingerprint(model, used=True)
    assert len(ids_of(job(own_model), ["word " * 50])[0]) > 7


# What can't be loaded


def test_places_without_a_model_are_refused(tmp_path: Path) -> None:
    assert "no such folder" in refused(job(tmp_path / "absent"))
    refused(job(tmp_path))
    refused(job("batchllm-tests/no-such-model"))  # conftest.py keeps the hub out of reach
    (tmp_path / "model.Q4_K_M.gguf").write_bytes(b"GGUF")
    assert "GGUF isn't supported" in refused(job(tmp_path))


@pytest.mark.parametrize(
    ("name", "content"),
    [
        *(("tokenizer.json", content) for content in ("", "{", '{"version": "1.0"}')),
        *(("config.json", content) for content in ("", "{", "{}", '{"model_type": "nosuch"}')),
    ],
)
def test_a_broken_file_is_refused(own_model: Path, name: str, content: str) -> None:
    (own_model / name).write_text(content, encoding="utf-8")
    refused(job(own_model))


@pytest.mark.parametrize("names", [["params.json"], ["config.json"], ["tokenizer.json"]])
def test_a_model_in_mistrals_own_format_only(own_model: Path, names: list[str]) -> None:
    for path in own_model.iterdir():
        if path.name not in names:
            path.unlink()
    (own_model / "tekken.json").write_text("{}", encoding="utf-8")
    message = refused(job(own_model))
    assert "Mistral's own format (tekken.json)" in message
    assert "config.json and tokenizer.json" in message


def test_of_two_formats_that_of_transformers_is_used(own_model: Path) -> None:
    expected = load_tokenizer(job(own_model)).encode(TEXTS).to_lists()
    config = {**CONFIG, "model_type": "mistral", "architectures": ["MistralForCausalLM"]}
    (own_model / "config.json").write_text(json.dumps(config), encoding="utf-8")
    (own_model / "tekken.json").write_text("{}", encoding="utf-8")
    for chat in (False, True):
        load_tokenizer(job(own_model, chat_template=chat))
    assert load_tokenizer(job(own_model)).encode(TEXTS).to_lists() == expected


@pytest.mark.parametrize("kind", ["qwen2", "llama", "bert"])
@pytest.mark.parametrize("kept", ["config.json", "*config.json"])
def test_a_folder_without_a_tokenizer(own_model: Path, kind: str, kept: str) -> None:
    """transformers makes an empty one for some models, and has reasons of several lines."""
    for path in own_model.iterdir():
        if not path.match(kept):
            path.unlink()
    config = {**CONFIG, "model_type": kind}
    (own_model / "config.json").write_text(json.dumps(config), encoding="utf-8")
    message = refused(job(own_model))
    assert "there is no tokenizer.json" in message
    assert not message.rstrip().endswith(":")


def test_a_missing_chat_template(tmp_path: Path) -> None:
    model = build_tokenizer(tmp_path, chat_template=None)
    assert "prompt.chat_template: false" in refused(job(model, chat_template=True))
    load_tokenizer(job(model))


@pytest.mark.parametrize(
    "chat", [{"messages": "chat"}, {"turns": [{"role": "user", "template": "{text}"}]}]
)
@pytest.mark.parametrize("chat_template", [None, "{{ strftime_now('%Y') }}"])
def test_advice_on_a_chat_template_names_no_setting_that_chats_refuse(
    tmp_path: Path, chat: dict[str, Any], chat_template: str | None
) -> None:
    spec = job(build_tokenizer(tmp_path, chat_template=chat_template), template=None, **chat)
    with pytest.raises(ModelError) as refusal:
        load_tokenizer(spec, "latest").renderer(spec.prompt).render(sample_chat(spec.prompt))
    assert "chat_template: false" not in str(refusal.value)
    assert f"prompt.template, in place of prompt.{next(iter(chat))}" in str(refusal.value)
    assert "chat_template.jinja" in str(refusal.value)


@pytest.mark.parametrize(
    "chat_template",
    ["{{ raise_exception('System role not supported') }}", "{% for %}", "{{ nosuch.field }}"],
)
def test_a_chat_template_that_refuses_the_prompt(tmp_path: Path, chat_template: str) -> None:
    """As those of some models do when there is a system text."""
    model = build_tokenizer(tmp_path, chat_template=chat_template)
    with pytest.raises(ModelError, match="chat template"):
        ids_of(job(model, chat_template=True, system="Be brief."), ["hello"])


# The fake engine's tokenizer


def test_the_fake_engine_counts_the_models_tokens(model: Path) -> None:
    """A row that the model takes isn't too long, and the other way round."""
    fake, real = load_tokenizer(job(model, backend="fake")), load_tokenizer(job(model))
    assert fake.encode(TEXTS).to_lists() == real.encode(TEXTS).to_lists()
    assert (fake.max_model_len, fake.fingerprint) == (real.max_model_len, real.fingerprint)


def test_the_fake_engine_takes_bytes_where_there_is_no_model(tmp_path: Path) -> None:
    absent = tmp_path / "absent"
    assert "byte_tokens" in refused(job(absent, backend="fake"))
    assert "byte_tokens" not in refused(job(absent))
    spec = job(absent, backend="fake", extra_args={"byte_tokens": True})
    tokenizer = load_tokenizer(spec)
    assert isinstance(tokenizer, Utf8Tokenizer)
    assert tokenizer.encode(["aé"]).to_lists() == [[97, 195, 169]]
    assert tokenizer.max_model_len == 4096
    engine = spec.engine.model_copy(update={"max_model_len": 9})
    assert load_tokenizer(spec.model_copy(update={"engine": engine})).max_model_len == 9


# Which library makes them


@pytest.mark.parametrize("bound", ["__call__", "_encode_plus"])
def test_a_tokenizer_with_code_of_its_own_is_called_for_all_prompts(
    model: Path, monkeypatch: pytest.MonkeyPatch, bound: str
) -> None:
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    original = getattr(PreTrainedTokenizerFast, bound)

    class Remote(PreTrainedTokenizerFast):
        pass

    def call(self: Any, text: Any, *args: Any, **options: Any) -> Any:
        return original(self, [f"{each}!" for each in text], *args, **options)

    setattr(Remote, bound, call)
    Remote.__module__ = "transformers.remote"  # as if it were one of the library's
    remote = Remote.from_pretrained(model)
    monkeypatch.setattr(AutoTokenizer, "from_pretrained", lambda *_, **__: remote)
    tokenizer = load_tokenizer(job(model))
    assert tokenizer.library == "transformers"
    assert tokenizer.encode(["fox"]).to_lists() == [reference_of(remote, "fox!")]


def reference_of(tokenizer: Any, text: str) -> list[int]:
    return list(tokenizer.backend_tokenizer.encode(text).ids)


def test_token_ids_that_are_too_large_are_refused_before_any_row_is_read(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A vocabulary with ids beyond 31 bits takes the libraries a minute."""
    assert tokenizer_module.MAX_TOKEN_ID == 2**31 - 1
    vocabulary = reference(model).get_vocab()
    largest = max(vocabulary.values())
    monkeypatch.setattr(tokenizer_module, "MAX_TOKEN_ID", largest)
    load_tokenizer(job(model))
    monkeypatch.setattr(tokenizer_module, "MAX_TOKEN_ID", largest - 1)
    [token] = [token for token, number in vocabulary.items() if number == largest]
    assert f"token {token!r} of its vocabulary has the id {largest}" in refused(job(model))
