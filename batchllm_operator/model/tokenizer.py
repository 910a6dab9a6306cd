"""A model's tokenizer, as transformers loads it; what identifies it, and what it is made of."""

import hashlib
import json
import os
from typing import Any, Final

from tokenizers import Tokenizer

from batchllm_operator.errors import MissingLibraryError, ModelError, one_line
from batchllm_operator.model.files import ModelFiles, pointer_fault
from batchllm_operator.spec import ModelSpec

_CONFIG_FILE: Final = "config.json"
_MISTRAL_FILE: Final = "tekken.json"
_TOKENIZERS: Final = frozenset({"tokenizer.json", "tokenizer.model", "vocab.json"})


def load_pretrained(model: ModelSpec, files: ModelFiles) -> tuple[Any, Any]:
    """The tokenizer and the configuration of a model, of transformers' classes.

    Raises `ModelError`, or `MissingLibraryError`: transformers isn't installed.
    """
    _check_format(files)
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")  # "PyTorch was not found"
    try:
        from transformers import AutoConfig, AutoTokenizer  # seconds to import
    except ModuleNotFoundError as error:
        raise MissingLibraryError.of(error, files.where) from error
    origin: dict[str, Any] = {
        "revision": model.revision,
        "trust_remote_code": model.trust_remote_code,
        "local_files_only": files.is_cached,
    }
    # Of Mistral's models with both, transformers would take its own format.
    one_format = {"mistral_format": False} if _MISTRAL_FILE in files.names else {}
    try:
        config = AutoConfig.from_pretrained(model.path, **origin)
        tokenizer = AutoTokenizer.from_pretrained(model.path, **origin, **one_format)
        is_empty = not tokenizer.get_vocab().keys() - tokenizer.get_added_vocab().keys()
    # A damaged folder, a missing package: each library has its own errors, and all mean that the
    # spec's model can't be used.
    except Exception as error:
        absent = [n for n in (_CONFIG_FILE, "tokenizer.json") if n not in files.names]
        hint = f" (there is no {' and no '.join(absent)})" if absent else ""
        raise ModelError(f"{files.where}: can't be loaded{hint}: {one_line(error)}") from error
    if is_empty:  # as transformers makes it where the files are missing
        raise ModelError(f"{files.where}: has no tokenizer: there is no tokenizer.json")
    return tokenizer, config


def _check_format(files: ModelFiles) -> None:
    """Refuse formats at which transformers fails with a message of its own code."""
    has_config = files.read_json(_CONFIG_FILE) is not None
    if not has_config and any(name.lower().endswith(".gguf") for name in files.names):
        raise files.gguf_error()
    if _MISTRAL_FILE in files.names and not (has_config and files.names & _TOKENIZERS):
        raise ModelError(
            f"{files.where}: is in Mistral's own format ({_MISTRAL_FILE}), which isn't supported;"
            f" use a copy of the model that has {_CONFIG_FILE} and tokenizer.json, as transformers"
            " writes them"
        )
    for name in sorted(files.names & _TOKENIZERS):
        if files.folder and (fault := pointer_fault((files.folder / name).read_bytes())):
            raise ModelError(f"{files.where}: its {name} {fault}")


def copy_backend(tokenizer: Any) -> Tokenizer | None:
    """What the call of transformers' tokenizer passes texts to, not cutting or padding; None if it
    does more than that."""
    kind = type(tokenizer)
    if not tokenizer.is_fast or kind.__module__.partition(".")[0] != "transformers":
        return None
    from transformers import PreTrainedTokenizerFast  # seconds to import

    is_usual = all(
        getattr(kind, name) is getattr(PreTrainedTokenizerFast, name)
        for name in ("__call__", "_encode_plus")
    )
    if not is_usual or hasattr(tokenizer, "_switch_to_input_mode"):
        return None
    backend = Tokenizer.from_str(tokenizer.backend_tokenizer.to_str())
    backend.no_truncation()
    backend.no_padding()
    backend.encode_special_tokens = bool(tokenizer.split_special_tokens)
    return backend


def fingerprint_of(tokenizer: Any, chat_template: str) -> str:
    """A digest of all that the token ids of transformers' tokenizer depend on, to be taken before
    encoding, which changes the tokenizer's own JSON."""
    special = json.dumps(tokenizer.special_tokens_map, sort_keys=True, default=str)
    if tokenizer.is_fast:
        return _digest(without_limits(tokenizer.backend_tokenizer), special, chat_template)
    vocabulary = json.dumps(tokenizer.get_vocab(), sort_keys=True)
    return _digest(type(tokenizer).__name__, vocabulary, special, chat_template)


def without_limits(tokenizer: Tokenizer) -> str:
    """The JSON of a tokenizer without what each call that encodes sets: how it cuts and pads."""
    content = json.loads(tokenizer.to_str())
    content.pop("truncation", None)
    content.pop("padding", None)
    return json.dumps(content, sort_keys=True)


def _digest(*parts: str) -> str:
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()
