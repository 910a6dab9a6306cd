"""From rows to token ids: the template, the tokenizer."""

from batchllm_operator.prompts.prompt_encoder import TokenIdsDifferError
from batchllm_operator.prompts.template import PromptRenderer, RenderedPrompts
from batchllm_operator.prompts.tokenizer import Tokenizer, length_fault, load_tokenizer
from batchllm_operator.prompts.values import has_text

__all__ = [
    "PromptRenderer",
    "RenderedPrompts",
    "TokenIdsDifferError",
    "Tokenizer",
    "has_text",
    "length_fault",
    "load_tokenizer",
]
