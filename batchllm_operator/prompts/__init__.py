"""From rows to token ids: the template, the tokenizer."""

from batchllm_operator.prompts.chats import has_messages, renderer_of, sample_chat
from batchllm_operator.prompts.prompt_encoder import TokenIdsDifferError
from batchllm_operator.prompts.template import PromptRenderer, RenderedPrompts
from batchllm_operator.prompts.tokenizer import (
    PROMPT_TOO_LONG,
    Tokenizer,
    length_fault,
    load_tokenizer,
)
from batchllm_operator.prompts.values import has_text, text_column

__all__ = [
    "PROMPT_TOO_LONG",
    "PromptRenderer",
    "RenderedPrompts",
    "TokenIdsDifferError",
    "Tokenizer",
    "has_messages",
    "has_text",
    "length_fault",
    "load_tokenizer",
    "renderer_of",
    "sample_chat",
    "text_column",
]
