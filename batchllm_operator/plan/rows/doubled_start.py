"""Warns of prompts that begin with the same control token twice, which models have never seen."""

from __future__ import annotations

import logging
from typing import Final

from batchllm_operator.model import ChatRefusedError
from batchllm_operator.prefixes import TokenTable
from batchllm_operator.prompts import Tokenizer, renderer_of, sample_chat
from batchllm_operator.spec import JobSpec

_MOST_PROMPTS: Final = 64
_log = logging.getLogger(__name__)


def sample_tokens(spec: JobSpec, tokenizer: Tokenizer) -> TokenTable:
    """The prompt of a made-up row; none if the chat template refuses it."""
    sample = renderer_of(spec.prompt).render(sample_chat(spec.prompt))
    try:
        return tokenizer.encode(tokenizer.apply_chat_template(sample).present())
    except ChatRefusedError:
        return TokenTable.from_lists([])


def warn_of_doubled_start(spec: JobSpec, tokens: TokenTable, tokenizer: Tokenizer) -> None:
    """Warn, with the cure, if one of the first prompts begins with a control token twice.

    Args:
        tokens: of prompts; with adapters, those of their classes.
    """
    for number in range(min(len(tokens), _MOST_PROMPTS)):
        start = [token_id % tokenizer.vocabulary_bound for token_id in tokens.prompt(number)[:2]]
        token = tokenizer.decode(start[:1])
        if start == start[:1] * 2 and token in tokenizer.control_tokens.special:
            whose = "tokenizer adds one"
            if spec.prompt.chat_template:
                whose = "chat template adds one (or both: then correct that)"
            _log.warning(
                "prompts begin with %s twice, which the model has never seen: its %s;"
                " leave it out of prompt.%s, of prompt.system, and of the columns that come first",
                token,
                whose,
                spec.prompt.field,
            )
            return
