"""A model's folder or hub name: its version, its tokenizer, its chat template, its adapters."""

from batchllm_operator.model.adapter_tokenizer import check_adapter_tokenizers
from batchllm_operator.model.adapters import Adapter, find_adapters, warn_of_other_models
from batchllm_operator.model.chat_template import ChatRefusedError, ChatTemplate
from batchllm_operator.model.files import ModelFiles
from batchllm_operator.model.folder import folder_digest
from batchllm_operator.model.length import choose_length, find_length
from batchllm_operator.model.sampling import with_models_sampling
from batchllm_operator.model.stored_tokenizer import StoredTokenizer, read_stored
from batchllm_operator.model.transformers_tokenizer import TransformersTokenizer
from batchllm_operator.model.weights import check_weights

__all__ = [
    "Adapter",
    "ChatRefusedError",
    "ChatTemplate",
    "ModelFiles",
    "StoredTokenizer",
    "TransformersTokenizer",
    "check_adapter_tokenizers",
    "check_weights",
    "choose_length",
    "find_adapters",
    "find_length",
    "folder_digest",
    "read_stored",
    "warn_of_other_models",
    "with_models_sampling",
]
