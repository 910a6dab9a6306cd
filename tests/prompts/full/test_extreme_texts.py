"""Texts that are much longer, or many more, than any table should hold."""

from collections import Counter

import pytest
from prompts.test_prompt_encoder import encoder
from support.prompt_texts import family, whole

MIB = 1 << 20


@pytest.mark.parametrize("name", ["qwen2", "gemma"])
def test_one_word_of_20_mib(name: str) -> None:
    text = "v" * 20 * MIB
    found = encoder(name)
    [ids] = found.encode([text]).to_lists()
    assert found.library == "fastokens"
    assert [ids] == whole(family(name), [text])  # takes a minute


def test_20_mib_of_spaces_on_which_the_tokenizers_library_gives_up() -> None:
    found = encoder("qwen2")
    [ids] = found.encode([" " * 20 * MIB]).to_lists()
    assert found.library == "fastokens"
    assert sum(len(family("qwen2").decode([token])) * n for token, n in Counter(ids).items()) == (
        20 * MIB
    )


def test_a_million_empty_texts() -> None:
    for special in (False, True):
        found = encoder("llama3", special=special)
        [once] = whole(family("llama3"), [""], special=special)
        tokens = found.encode([""] * 10**6)
        assert found.library == "fastokens"
        assert tokens.lengths.tolist() == [len(once)] * 10**6
        assert tokens.token_ids.tolist() == once * 10**6
