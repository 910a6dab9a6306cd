"""Every character of Unicode, alone and in surroundings where expressions treat it differently."""

import numpy as np
import pytest
from support.prompt_texts import family, whole
from support.tokenizer_families import FAMILIES

from batchllm_operator.prompts.prompt_encoder import PromptEncoder

SURROUNDINGS = "x{0}y;{0} {0};.{0}1;{0}\n {0};  {0}x;{0}{0}'s"
CHARACTERS = [
    code
    for code in (*range(0xD800), *range(0xE000, 0x32000), *range(0xE0000, 0xE0200))
    if code != 0x180E
]
# Ideographs, Hangul syllables and private use, each alike to every expression and normalizer.
UNIFORM = (
    *((0x3400, 0x4DC0), (0x4E00, 0xA000), (0xAC00, 0xD7A4), (0xE000, 0xF900), (0x17000, 0x18D00)),
    *((0x20000, 0x2F800), (0x2FA20, 0x32000)),
)


@pytest.mark.parametrize("name", [name for name in FAMILIES if not name.endswith("_added")])
def test_every_character_has_the_ids_of_the_tokenizers_library(name: str) -> None:
    tokenizer = family(name)
    encoder = PromptEncoder(
        lambda texts: whole(tokenizer, list(texts)), tokenizer, name, add_special_tokens=True
    )
    if encoder.library != "fastokens":
        pytest.skip("fastokens doesn't take this tokenizer")
    surrounded = [
        code
        for code in CHARACTERS
        if code % 16 == 0 or not any(first <= code < last for first, last in UNIFORM)
    ]
    for texts in (
        [chr(code) for code in CHARACTERS],
        [SURROUNDINGS.format(chr(code)) for code in surrounded],
    ):
        tokens = encoder._encode_fast(texts)  # without the samples, which would be compared twice
        for start in range(0, len(texts), 4096):
            encodings = tokenizer.encode_batch_fast(texts[start : start + 4096])
            expected = [encoding.ids for encoding in encodings]
            found = tokens.take(np.arange(start, start + len(expected))).to_lists()
            assert found == expected
