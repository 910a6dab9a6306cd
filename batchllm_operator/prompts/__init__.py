"""From rows to token ids: the template, the tokenizer."""

from batchllm_operator.prompts.chats import has_messages as has_messages
from batchllm_operator.prompts.chats import sample_chat as sample_chat
from batchllm_operator.prompts.prompt_encoder import TokenIdsDifferError as TokenIdsDifferError
from batchllm_operator.prompts.template import NULL_VALUE as NULL_VALUE
from batchllm_operator.prompts.template import PromptRenderer as PromptRenderer
from batchllm_operator.prompts.template import RenderedPrompts as RenderedPrompts
from batchllm_operator.prompts.tokenizer import PROMPT_TOO_LONG as PROMPT_TOO_LONG
from batchllm_operator.prompts.tokenizer import Tokenizer as Tokenizer
from batchllm_operator.prompts.tokenizer import joint_fingerprint as joint_fingerprint
from batchllm_operator.prompts.tokenizer import length_fault as length_fault
from batchllm_operator.prompts.tokenizer import load_tokenizer as load_tokenizer
from batchllm_operator.prompts.tokenizer import load_tokenizers as load_tokenizers
from batchllm_operator.prompts.values import has_text as has_text
from batchllm_operator.prompts.values import text_column as text_column
