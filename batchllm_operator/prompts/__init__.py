"""From rows to token ids: the template, the tokenizer, exact duplicates."""

from batchllm_operator.prompts.duplicates import first_occurrences
from batchllm_operator.prompts.orders import TemplatePieces, column_orders, take_apart
from batchllm_operator.prompts.prompt_encoder import TokenIdsDifferError
from batchllm_operator.prompts.template import PromptRenderer, RenderedPrompts
from batchllm_operator.prompts.tokenizer import Tokenizer, length_fault, load_tokenizer
from batchllm_operator.prompts.values import has_text

__all__ = [
    "PromptRenderer",
    "RenderedPrompts",
    "TemplatePieces",
    "TokenIdsDifferError",
    "Tokenizer",
    "column_orders",
    "first_occurrences",
    "has_text",
    "length_fault",
    "load_tokenizer",
    "take_apart",
]
