"""A plan allows the lengths that vLLM allows, for models of all kinds."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from transformers import AutoConfig

from batchllm_operator.errors import ModelError, SpecError
from batchllm_operator.model import ModelFiles, choose_length, find_length
from batchllm_operator.spec import EngineSpec

vllm_model = pytest.importorskip("vllm.config.model")
vllm_config = pytest.importorskip("vllm.transformers_utils.config")
convertors = pytest.importorskip("vllm.transformers_utils.model_arch_config_convertor")

LLAMA = {"model_type": "llama", "max_position_embeddings": 4096}
BERT = {"model_type": "bert", "max_position_embeddings": 512, "position_embedding_type": "absolute"}
ROBERTA = {**BERT, "model_type": "xlm-roberta", "max_position_embeddings": 514, "pad_token_id": 1}
PHI = {
    "model_type": "phi3",
    "hidden_size": 64,
    "num_attention_heads": 4,
    "max_position_embeddings": 131072,
    "original_max_position_embeddings": 4096,
}
LONG = {"short_factor": [1.0] * 8, "long_factor": [2.0] * 8}


def rope(**scaling: Any) -> dict[str, Any]:
    return {**LLAMA, "rope_scaling": scaling}


LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 512}
GEMMA = {"model_type": "gemma3_text", "max_position_embeddings": 8192}
WINDOW = {**LLAMA, "model_type": "mistral", "sliding_window": 512}
OF_BERT, OF_TOKENIZER = "sentence_bert_config.json", "tokenizer_config.json"
CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "llama": (LLAMA, {}),
    "linear": (rope(rope_type="linear", factor=2.5), {}),
    "dynamic, by its older name": (rope(type="dynamic", factor=4.0), {}),
    "llama3": (rope(rope_type="llama3", factor=8.0, **LLAMA3), {}),
    "longrope": ({**PHI, "rope_scaling": {"type": "longrope", **LONG}}, {}),
    "rope_parameters": ({**LLAMA, "rope_parameters": {"rope_type": "linear", "factor": 2.0}}, {}),
    "gemma3": ({**GEMMA, "rope_scaling": {"rope_type": "linear", "factor": 8.0}}, {}),
    "gpt2": ({"model_type": "gpt2", "n_positions": 1024}, {}),
    "a length by the name of its kind": ({"model_type": "rwkv", "context_length": 1024}, {}),
    "mpt": ({"model_type": "mpt", "max_seq_len": 2048}, {}),
    "two lengths": ({**LLAMA, "seq_length": 1000}, {}),
    "model_max_length": ({**LLAMA, "model_max_length": 9000}, {}),
    "a window": (WINDOW, {}),
    "without its window": (WINDOW, {"arguments": {"disable_sliding_window": True}}),
    "overridden": (LLAMA, {"arguments": {"hf_overrides": {"max_position_embeddings": 777}}}),
    "text of several kinds": (
        {"model_type": "gemma3", "text_config": {"max_position_embeddings": 3000}},
        {},
    ),
    "bert": (BERT, {}),
    "MiniLM": (BERT, {OF_BERT: {"max_seq_length": 256}}),
    "a decoder with an encoder's file": (
        LLAMA,
        {"sentence_xlnet_config.json": {"max_seq_length": 128, "do_lower_case": False}},
    ),
    "an encoder's file without a length": (BERT, {OF_BERT: {"x": 1}}),
    "the first of two encoder's files": (
        BERT,
        {OF_BERT: {"x": 1}, "sentence_roberta_config.json": {"max_seq_length": 99}},
    ),
    "tokenizer": (BERT, {OF_TOKENIZER: {"model_max_length": 384}}),
    "tokenizer without a limit": (BERT, {OF_TOKENIZER: {}}),
    "tokenizer of any length": (BERT, {OF_TOKENIZER: {"model_max_length": int(1e30)}}),
    "tokenizer of a decoder": (LLAMA, {OF_TOKENIZER: {"model_max_length": 1024}}),
    "roberta": (ROBERTA, {OF_TOKENIZER: {"model_max_length": 512}}),
}


def write(folder: Path, config: dict[str, Any], **files: dict[str, Any]) -> ModelFiles:
    for name, content in {"config.json": config, **files}.items():
        (folder / name).write_text(json.dumps(content))
    return ModelFiles(str(folder))


def vllms(folder: Path, wanted: int | None, arguments: dict[str, Any], *, is_pooled: bool) -> int:
    """What vLLM makes of a length; see `ModelConfig.get_and_verify_max_len`."""
    overrides = arguments.get("hf_overrides", {})
    config = vllm_config.get_config(folder, False, hf_overrides_kw=overrides)
    text = vllm_config.get_hf_text_config(config)
    kinds = convertors.MODEL_ARCH_CONFIG_CONVERTORS
    kind = kinds.get(config.model_type, convertors.ModelArchConfigConvertorBase)
    derived = kind(config, text).derive_max_model_len_and_key()
    is_absolute = getattr(config, "position_embedding_type", "") == "absolute"
    tokenizer = folder / "tokenizer_config.json"
    return int(
        vllm_model._get_and_verify_max_len(
            hf_config=text,
            model_arch_config=SimpleNamespace(derived_max_model_len_and_key=derived),
            tokenizer_config=json.loads(tokenizer.read_text())
            if is_pooled and is_absolute and tokenizer.exists()
            else None,
            max_model_len=wanted,
            disable_sliding_window=arguments.get("disable_sliding_window", False),
            sliding_window=getattr(text, "sliding_window", None),
            encoder_config=vllm_config.get_sentence_transformer_tokenizer_config(folder, None),
        )
    )


@pytest.mark.parametrize("is_pooled", [False, True])
@pytest.mark.parametrize("name", CASES)
def test_lengths_are_those_that_vllm_allows(tmp_path: Path, name: str, is_pooled: bool) -> None:
    config, more = CASES[name]
    arguments = more.get("arguments", {})
    files = write(tmp_path, config, **{name: more[name] for name in more if name != "arguments"})
    given, engine = AutoConfig.from_pretrained(tmp_path), EngineSpec(extra_args=arguments)
    found = find_length(given, files, engine, is_pooled=is_pooled)
    assert found is not None
    if config is ROBERTA and not is_pooled:  # vLLM would read beyond the last position
        assert found.most == 512 < vllms(tmp_path, None, arguments, is_pooled=is_pooled)
        return
    assert found.usual == vllms(tmp_path, None, arguments, is_pooled=is_pooled)
    assert found.most == vllms(tmp_path, found.most, arguments, is_pooled=is_pooled)
    assert choose_length(found, found.most, "m") == found.most
    with pytest.raises(ValueError, match="greater than the derived"):
        vllms(tmp_path, found.most + 1, arguments, is_pooled=is_pooled)
    with pytest.raises(SpecError, match=rf"engine\.max_model_len: .* allows: {found.most} \("):
        choose_length(found, found.most + 1, "m")


@pytest.mark.parametrize(
    ("config", "length", "most"),
    [
        (ROBERTA, None, 512),
        (ROBERTA, 1024, 512),
        (BERT, 1024, 512),
        ({**ROBERTA, "position_embedding_type": "rotary"}, 1024, 1024),
    ],
)
def test_no_prompt_is_longer_than_the_learned_positions(
    tmp_path: Path, config: dict[str, Any], length: int | None, most: int
) -> None:
    """vLLM would read beyond the last one."""
    encoder = {} if length is None else {"sentence_bert_config.json": {"max_seq_length": length}}
    files = write(tmp_path, config, **encoder)
    given = AutoConfig.from_pretrained(tmp_path)
    found = find_length(given, files, EngineSpec(), is_pooled=True)
    assert found is not None
    assert (found.usual, found.most) == (most, most)


def test_a_rope_factor_that_is_no_number_is_refused(tmp_path: Path) -> None:
    config = rope(type="linear", factor="2")
    files = write(tmp_path, LLAMA)
    given = AutoConfig.from_pretrained(tmp_path)
    given.rope_parameters = config["rope_scaling"]
    with pytest.raises(ModelError, match=r"factor in rope_scaling of config\.json is '2'"):
        find_length(given, files, EngineSpec(), is_pooled=False)


def test_a_length_that_is_none_is_refused(tmp_path: Path) -> None:
    files = write(tmp_path, BERT, **{"sentence_bert_config.json": {"max_seq_length": None}})
    given = AutoConfig.from_pretrained(tmp_path)
    with pytest.raises(ModelError, match=r"max_seq_length of sentence_bert_config\.json is None"):
        find_length(given, files, EngineSpec(), is_pooled=True)


def test_vllms_own_switch_lifts_the_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = write(tmp_path, LLAMA)
    given = AutoConfig.from_pretrained(tmp_path)
    found = find_length(given, files, EngineSpec(), is_pooled=False)
    monkeypatch.setenv("VLLM_ALLOW_LONG_MAX_MODEL_LEN", "1")
    assert found is not None
    assert choose_length(found, 9000, "m") == 9000 == vllms(tmp_path, 9000, {}, is_pooled=False)


@pytest.mark.parametrize(
    ("overrides", "fault"),
    [
        ({"max_position_embeddings": "8k"}, "max_position_embeddings"),
        ({"text_config": {"rope_scaling": 7}}, "rope_parameters"),
    ],
)
def test_overrides_that_no_config_can_have_are_refused(
    tmp_path: Path, overrides: dict[str, Any], fault: str
) -> None:
    files = write(tmp_path, LLAMA)
    given, engine = (
        AutoConfig.from_pretrained(tmp_path),
        EngineSpec(extra_args={"hf_overrides": overrides}),
    )
    with pytest.raises(SpecError, match=rf"engine\.extra_args: hf_overrides: .*{fault}"):
        find_length(given, files, engine, is_pooled=False)


def test_a_limit_has_the_name_of_the_models_own_file(tmp_path: Path) -> None:
    files = write(tmp_path, {"model_type": "gpt2", "n_positions": 1024})
    given = AutoConfig.from_pretrained(tmp_path)
    found = find_length(given, files, EngineSpec(), is_pooled=False)
    assert found == (1024, 1024, "n_positions of config.json")
