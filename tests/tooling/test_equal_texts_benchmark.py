"""What `benchmarks.equal_texts` counts."""

from __future__ import annotations

from types import SimpleNamespace

from support.benchmark_modules import load

margin = load("equal_texts").margin


def output(token_ids: list[int], logprobs: list[dict[int, float]]) -> SimpleNamespace:
    likely = [
        {token: SimpleNamespace(logprob=each) for token, each in at.items()} for at in logprobs
    ]
    return SimpleNamespace(token_ids=token_ids, logprobs=likely)


def test_a_margin_is_that_of_the_first_token_that_differs() -> None:
    first = output([1, 2, 3], [{1: -0.1}, {2: -0.5, 7: -0.75}, {3: 0.0}])
    assert margin(first, output([1, 7, 8], [])) == 0.25
    assert margin(first, output([1, 9, 3], [])) is None, "far less likely"
    assert margin(first, output([1, 2], [])) == 0.0, "stopped earlier"
