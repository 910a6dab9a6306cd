import hashlib
import json
from pathlib import Path
from typing import Any

import pytest
from demo_model import build_demo_model
from demo_table import demo_documents

DOCUMENTS = [document.text for document in demo_documents()[:40]]
PROMPTS = [f"{text}\n\nQuery: {query}" for text in DOCUMENTS[:4] for query in ("License", "Usage")]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("demo") / "model"
    build_demo_model(folder, documents=DOCUMENTS)
    return folder


def content(folder: Path) -> dict[str, str]:
    """Digests of a folder's files; pytest would take hours to tell megabytes apart."""
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in folder.iterdir()}


def test_the_same_documents_give_the_same_bytes(folder: Path, tmp_path: Path) -> None:
    again = tmp_path / "again"
    build_demo_model(again, documents=DOCUMENTS)
    build_demo_model(again, documents=DOCUMENTS)  # over an older one
    digests = content(folder)
    assert {"config.json", "model.safetensors", "tokenizer.json"} <= set(digests)
    assert content(again) == digests
    assert [path.name for path in tmp_path.iterdir()] == ["again"]


def test_tokenizer_loads_and_gives_text_back(folder: Path) -> None:
    from tokenizers import Tokenizer
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    text = "Ünïcode, tabs\tand code: `pip install x==1.2`\n\n日本"
    ids = tokenizer(text)["input_ids"]
    assert tokenizer.decode(ids) == text
    assert tokenizer.eos_token == "<|im_end|>"
    assert tokenizer.pad_token == "<|endoftext|>"
    assert len(tokenizer) <= json.loads((folder / "config.json").read_text())["vocab_size"]
    # Whoever reads tokenizer.json alone gets the same ids.
    alone = Tokenizer.from_file(str(folder / "tokenizer.json"))
    assert all(alone.encode(p).ids == tokenizer(p)["input_ids"] for p in (*PROMPTS, text))
    assert len(tokenizer(DOCUMENTS[0])["input_ids"]) < 0.6 * len(DOCUMENTS[0])  # it has learnt


def test_chat_template_wraps_messages(folder: Path) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]
    assert tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True) == (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n"
        "<|im_start|>assistant\n"
    )
    ids = tokenizer("<|im_start|>user")["input_ids"]
    assert ids[0] == tokenizer.convert_tokens_to_ids("<|im_start|>")


def test_greedy_choices_are_clear_and_depend_on_the_prompt(folder: Path) -> None:
    """The best logit leads by far more than float32 noise: batching can't change the text."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    model: Any = AutoModelForCausalLM.from_pretrained(folder)
    exact = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64)
    assert model.dtype == torch.float32
    texts, margins, noises = set(), [], []
    with torch.no_grad():
        for prompt in PROMPTS:
            ids = torch.tensor([tokenizer(prompt)["input_ids"]])
            whole = model.generate(ids, max_new_tokens=16, do_sample=False)
            texts.add(tuple(whole[0, ids.shape[1] :].tolist()))
            logits, exact_logits = (
                m(whole).logits[0, ids.shape[1] - 1 : -1] for m in (model, exact)
            )
            best = logits.topk(2).values
            margins.append(((best[:, 0] - best[:, 1]) / logits.std(-1)).min().item())
            noise = (logits - exact_logits).abs().max(-1).values / exact_logits.std(-1)
            noises.append(noise.max().item())
    assert min(margins) > 10 * max(noises)
    assert len(texts) > len(PROMPTS) // 2
