"""What the fake engine makes up for a prompt: deterministic, and different between prompts."""

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any, Final

NUM_CHARACTERS: Final = 21
"""Of a text, unless the spec says otherwise."""


def adapter_ids(adapter: str | None) -> list[int]:
    """What stands for an adapter in front of a prompt's token ids."""
    return [-1 - byte for byte in (adapter or "").encode()]


def fake_text(
    prompt_token_ids: Sequence[int],
    num_characters: int = NUM_CHARACTERS,
    adapter: str | None = None,
) -> str:
    """The text for a prompt."""
    prompt = repr([*adapter_ids(adapter), *prompt_token_ids]).encode()
    text = "fake " + hashlib.sha256(prompt).hexdigest()[:16]
    if num_characters > len(text):
        text += hashlib.shake_256(prompt).hexdigest((num_characters - len(text) + 1) // 2)
    return text[:num_characters]


def fake_logprobs(prompt_token_ids: list[int], num_tokens: int) -> list[float]:
    """Log-probabilities of labels, or of generated tokens."""
    digest = hashlib.shake_256(repr(prompt_token_ids).encode()).digest(num_tokens)
    return [-1 - byte / 64 for byte in digest]


def fake_vector(prompt_token_ids: list[int], size: int) -> list[float]:
    """The vector of a prompt."""
    digest = hashlib.shake_256(repr(prompt_token_ids).encode()).digest(size)
    return [byte / 128 - 1 for byte in digest]


def digest_of(prompt_token_ids: list[int]) -> int:
    """A number that a prompt determines."""
    return int(hashlib.sha256(repr(prompt_token_ids).encode()).hexdigest()[:12], 16)


def cut(text: str) -> str:
    """The first half of an answer, which lacks its form."""
    return text[: len(text) // 2]


def json_value(schema: Mapping[str, Any], digest: int) -> Any:
    """A value by types, `anyOf`, `enum` and the two formats of time."""
    if "anyOf" in schema:
        return json_value(schema["anyOf"][digest % len(schema["anyOf"])], digest)
    if "enum" in schema:
        return schema["enum"][digest % len(schema["enum"])]
    kind = schema.get("type", "string")
    if isinstance(kind, list):
        kind = kind[digest % len(kind)]
    if kind == "object":
        fields = schema.get("properties", {})
        return {name: json_value(value, digest) for name, value in fields.items()}
    if kind == "array":
        return [json_value(schema["items"], digest + idx) for idx in range(digest % 3)]
    if kind == "string":
        day = f"2026-01-{digest % 28 + 1:02d}"
        times = {"date": day, "date-time": f"{day}T12:30:00.25+02:00"}
        return times.get(schema.get("format", ""), f"text {digest % 1000}")
    numbers = {"integer": digest % 1000, "number": digest % 1000 / 8, "boolean": digest % 2 == 0}
    return numbers.get(kind)
