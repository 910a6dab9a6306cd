"""What a model's folder or name on the hub stands for: its version, and its own tokenizer."""

from batchllm_operator.model.folder import folder_digest
from batchllm_operator.model.stored_tokenizer import StoredTokenizer, read_stored
from batchllm_operator.model.transformers_tokenizer import TransformersTokenizer

__all__ = ["StoredTokenizer", "TransformersTokenizer", "folder_digest", "read_stored"]
