"""A model's folder or hub name: its version, its tokenizer and its chat template."""

from batchllm_operator.model.chat_template import ChatRefusedError, ChatTemplate
from batchllm_operator.model.folder import folder_digest
from batchllm_operator.model.stored_tokenizer import StoredTokenizer, read_stored
from batchllm_operator.model.transformers_tokenizer import TransformersTokenizer

__all__ = [
    "ChatRefusedError",
    "ChatTemplate",
    "StoredTokenizer",
    "TransformersTokenizer",
    "folder_digest",
    "read_stored",
]
