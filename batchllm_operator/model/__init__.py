"""A model's folder or hub name: its version, its tokenizer, its chat template, its adapters."""

from batchllm_operator.model.adapters import check_adapters as check_adapters
from batchllm_operator.model.adapters import find_adapters as find_adapters
from batchllm_operator.model.chat_template import ChatRefusedError as ChatRefusedError
from batchllm_operator.model.chat_template import ChatTemplate as ChatTemplate
from batchllm_operator.model.files import ModelFiles as ModelFiles
from batchllm_operator.model.files import folder_digest as folder_digest
from batchllm_operator.model.length import choose_length as choose_length
from batchllm_operator.model.length import find_length as find_length
from batchllm_operator.model.sampling import with_models_sampling as with_models_sampling
from batchllm_operator.model.tokenizer import copy_backend as copy_backend
from batchllm_operator.model.tokenizer import fingerprint_of as fingerprint_of
from batchllm_operator.model.tokenizer import load_pretrained as load_pretrained
from batchllm_operator.model.weights import check_weights as check_weights
