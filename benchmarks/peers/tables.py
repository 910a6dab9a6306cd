"""Tables of prompts from real text: the descriptions of installed packages."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

from demo_table import demo_documents

Row = dict[str, Any]
_QUESTIONS: Final = (
    *("What is this package for?", "How is it installed?", "Who is it meant for?"),
    *("Which versions of Python does it need?", "Under which licence is it published?"),
    *("What does an example of its use look like?", "Which packages does it depend on?"),
    *("Where is its documentation?", "How can one contribute to it?", "What are its limits?"),
)
_NUM_TURNS: Final = 8
_NUM_TOKENS: Final = (585, 870)
"""Of a document, so that a prompt with a question has 600 to 900."""


def documents(text: str) -> Iterator[str]:
    """A document under ten questions."""
    for question in _QUESTIONS:
        yield f"{text}\n\nQuestion: {question}\nAnswer:"


def conversations(text: str) -> Iterator[str]:
    """A chat about a document, up to each of its turns: a prompt continues the one before."""
    size, prompt = -(-len(text) // _NUM_TURNS), "You help readers of documentation.\n"
    for start in range(0, len(text), size):
        part = text[start : start + size]
        prompt += f"User: Read on: {part}\nWhat did you learn?\nAssistant:"
        yield prompt
        prompt += " " + part.strip().partition("\n")[0] + "\n"


WORKLOADS: Final[dict[str, Callable[[str], Iterator[str]]]] = {
    "documents": documents,
    "conversations": conversations,
}


def make_rows(workload: str, model: Path, num_documents: int) -> tuple[list[Row], list[int]]:
    """Rows in a random order, and the numbers of tokens of their prompts."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))

    def length(text: str) -> int:
        return len(tokenizer.encode(text, add_special_tokens=False).ids)

    least, most = _NUM_TOKENS
    texts = [each.text for each in demo_documents(2_800) if least <= length(each.text) <= most]
    if len(texts) < num_documents:
        raise SystemExit(f"only {len(texts)} descriptions have {least} to {most} tokens")
    chosen = random.Random(0).sample(texts, num_documents)
    prompts = [prompt for text in chosen for prompt in WORKLOADS[workload](text)]
    rows = [{"id": f"{idx:05d}", "prompt": prompt} for idx, prompt in enumerate(prompts)]
    return random.Random(0).sample(rows, len(rows)), [length(prompt) for prompt in prompts]
