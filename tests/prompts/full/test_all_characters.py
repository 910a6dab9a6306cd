"""Every character of Unicode, in surroundings in which expressions treat it differently."""

from __future__ import annotations

import numpy as np
import pytest
from support.prompt_texts import family, whole
from support.tokenizer_families import FAMILIES

from batchllm_operator.prompts.prompt_encoder import PromptEncoder

SURROUNDINGS = ["{0}", "x{0}y;{0} {0};.{0}1;{0}\n {0};  {0}x;{0}{0}'s"]


@pytest.mark.parametrize("name", [name for name in FAMILIES if not name.endswith("_added")])
def test_every_character_has_the_ids_of_the_tokenizers_library(name: str) -> None:
    tokenizer = family(name)
    encoder = PromptEncoder(
        lambda texts: whole(tokenizer, list(texts)), tokenizer, name, add_special_tokens=True
    )
    if encoder.library != "fastokens":
        pytest.skip("fastokens doesn't take this tokenizer")
    codes = [*range(0xD800), *range(0xE000, 0x32000), *range(0xE0000, 0xE0200)]
    for surrounding in SURROUNDINGS:
        texts = [surrounding.format(chr(code)) for code in codes if code != 0x180E]
        tokens = encoder._encode_fast(texts)  # without the samples, which would be compared twice
        for start in range(0, len(texts), 4096):
            encodings = tokenizer.encode_batch_fast(texts[start : start + 4096])
            expected = [encoding.ids for encoding in encodings]
            found = tokens.take(np.arange(start, start + len(expected))).to_lists()
            assert found == expected
