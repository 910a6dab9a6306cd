"""From rows to token ids: the template, the tokenizer, exact duplicates."""

from batchllm_operator.prompts.duplicates import first_occurrences
from batchllm_operator.prompts.prompt_encoder import TokenIdsDifferError
from batchllm_operator.prompts.template import PromptRenderer, RenderedPrompts
from batchllm_operator.prompts.tokenizer import Tokenizer, length_fault, load_tokenizer
from batchllm_operator.prompts.values import has_text

__all__ = [
    "PromptRenderer",
    "RenderedPrompts",
    "TokenIdsDifferError",
    "Tokenizer",
    "first_occurrences",
    "has_text",
    "length_fault",
    "load_tokenizer",
]
