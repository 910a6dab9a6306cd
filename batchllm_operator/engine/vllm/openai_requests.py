"""Requests of OpenAI's API as parts of a job spec, by vLLM's own classes and defaults."""

import argparse
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal, NoReturn
from warnings import catch_warnings

from pydantic import TypeAdapter, ValidationError
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.entrypoints.openai.completion.protocol import CompletionRequest
from vllm.entrypoints.pooling.embed.protocol import EmbeddingCompletionRequest
from vllm.exceptions import VLLMValidationError
from vllm.utils.argparse_utils import FlexibleArgumentParser

from batchllm_operator.errors import SpecError, one_line

CHAT: Final = "/v1/chat/completions"
COMPLETIONS: Final = "/v1/completions"
EMBEDDINGS: Final = "/v1/embeddings"
SCORES: Final = "/score"
"""With anything before it, as vLLM takes it."""
PROMPT: Final = "prompt"
"""The column of a request's texts."""
KINDS: Final[dict[str, Any]] = {
    CHAT: ChatCompletionRequest,
    COMPLETIONS: CompletionRequest,
    EMBEDDINGS: EmbeddingCompletionRequest,
}
_SAMPLED: Final = (
    *("temperature", "top_p", "top_k", "min_p", "seed", "n", "max_tokens", "min_tokens"),
    *("repetition_penalty", "presence_penalty", "frequency_penalty"),
)
"""Fields of vLLM's sampling parameters that a spec has, too."""
_PARAMETERS: Final = frozenset(
    {
        *(set(_SAMPLED) | {"max_completion_tokens", "logprobs", "top_logprobs", "logit_bias"}),
        *("stop", "stop_token_ids", "include_stop_str_in_output", "ignore_eos", "bad_words"),
        *("skip_special_tokens", "spaces_between_special_tokens", "allowed_token_ids"),
        *("response_format", "structured_outputs", "thinking_token_budget", "length_penalty"),
    }
)
"""Fields that vLLM's own classes make sampling parameters of."""
_OF_PROMPTS: Final = frozenset(
    {"chat_template_kwargs", "reasoning_effort", "tools", "tool_choice", "parallel_tool_calls"}
)
_WITHOUT_EFFECT: Final = frozenset({"model", "user", "request_id", "session_id", "cache_salt"})
_OF_VECTORS: Final = frozenset({"encoding_format", "dimensions", "use_activation"})
_OF_SCORES: Final = frozenset(
    {"text_1", "text_2", "queries", "documents", "items", "data_1", "data_2", "use_activation"}
)
_KNOWN: Final = {
    CHAT: _PARAMETERS | _OF_PROMPTS | {"messages"},
    COMPLETIONS: _PARAMETERS | {"prompt"},
    EMBEDDINGS: _OF_VECTORS | {"input"},
    SCORES: _OF_SCORES,
}
_ALWAYS: Final = ("add_generation_prompt", "continue_final_message")


class RefusedRequestError(Exception):
    """A request has no answer: the field at fault, if vLLM's server would name it.

    `param` is False where `vllm run-batch` itself refuses a line, with a text for its error.
    """

    def __init__(self, message: str, param: str | Literal[False] | None = None) -> None:
        super().__init__(message)
        self.param = param


@dataclass(frozen=True, slots=True)
class Asked:
    """What a request asks."""

    parameters: dict[str, Any]
    """`spec`: one of its `prompts`, which takes its text from the column `PROMPT`; of vectors
    sections of a job of their own, and beside `spec` the rest of the arguments of `vector_body`."""
    texts: list[str]
    """A prompt each, or a chat's messages as JSON; of scores the queries before the documents."""
    model: str | None


class _Parser(FlexibleArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ValueError(message)


def parse_arguments(texts: Sequence[str]) -> dict[str, Any]:
    """Those of vLLM's engine arguments that a command line gives, by their Python names.

    Raises ValueError, as vLLM words it: one is unknown, or has a wrong value.
    """
    kind: Any = _Parser
    parser: Any = AsyncEngineArgs.add_cli_args(kind(add_help=False, allow_abbrev=False))
    for action in parser._actions:
        action.default = argparse.SUPPRESS
    return dict(vars(parser.parse_args(list(texts))))


class ServedModel:
    """What vLLM's server knows of a model before its engine starts.

    Raises `SpecError`: vLLM refuses an argument, or the model.
    """

    def __init__(self, arguments: Mapping[str, Any]) -> None:
        try:
            self._config: Any = AsyncEngineArgs(**arguments).create_model_config()
            self._defaults = self._config.get_diff_sampling_param()
        except (ValueError, TypeError, OSError) as error:
            raise SpecError(f"vLLM refuses the arguments: {one_line(error)}") from error
        self.names: list[str] = arguments.get("served_model_name") or [arguments["model"]]
        self._is_pooled = self._config.runner_type == "pooling"

    def asked(self, url: str, body: Mapping[str, Any]) -> Asked:
        """What a request asks; a RefusedRequestError says why it can't be answered."""
        with catch_warnings(action="ignore", category=DeprecationWarning):  # of `max_tokens`
            return self._asked(url, body)

    def _asked(self, url: str, body: Mapping[str, Any]) -> Asked:
        url = SCORES if url.endswith(SCORES) else url
        if url not in (*KINDS, SCORES):
            known = ", ".join((*KINDS, SCORES))
            raise RefusedRequestError(f"URL {url} was used. Supported endpoints: {known}", False)
        is_vector = url in (EMBEDDINGS, SCORES)
        if self._is_pooled != is_vector:
            raise RefusedRequestError(f"Model does not support endpoint: {url}", False)
        try:
            if url == SCORES:
                return self._scores(body)
            request = KINDS[url].model_validate(body)
            request.build_tok_params(self._config)
            _check_fields(request, url)
            read = _vector(request) if is_vector else self._text(request, url, body)
            if url == CHAT:
                return Asked(read, [json.dumps(body["messages"])], request.model)
            where = "input" if is_vector else "prompt"
            return Asked(read, _texts(getattr(request, where), where), request.model)
        except ValidationError as error:
            fault = error.errors(include_url=False)[0]
            where = ".".join(map(str, fault["loc"]))
            raise RefusedRequestError(f"{where}: {fault['msg']}", where or None) from error
        except (ValueError, VLLMValidationError) as error:
            raise RefusedRequestError(str(error), getattr(error, "parameter", None)) from error

    def _scores(self, body: Mapping[str, Any]) -> Asked:
        """The similarities of queries and documents, each of which is embedded."""
        from vllm.entrypoints.pooling.scoring.protocol import ScoreRequest
        from vllm.tokenizers import cached_tokenizer_from_config

        config = self._config
        if config.score_type != "bi-encoder":
            raise ValueError(f"scores of a {config.score_type} model aren't computed here")
        request: Any = TypeAdapter(ScoreRequest).validate_python(body)
        _check_fields(request, SCORES)
        queries, documents = _texts(request.data_1, "queries"), _texts(request.data_2, "documents")
        if len(queries) not in (1, len(documents)):
            raise ValueError("there must be one query, or as many as documents")
        # What vLLM counts between a query and a document.
        num_padding = int(cached_tokenizer_from_config(config).pad_token_id is not None)
        rest = {"has_one_query": len(queries) == 1, "num_padding": num_padding}
        return Asked({**_vector(request), **rest}, [*queries, *documents], request.model)

    def _text(self, request: Any, url: str, body: Mapping[str, Any]) -> dict[str, Any]:
        wanted = request.max_tokens
        if url == CHAT and request.max_completion_tokens is not None:
            wanted = request.max_completion_tokens
        params = request.to_sampling_params(self._max_tokens(wanted), self._defaults)
        given = {name: body[name] for name in sorted(_PARAMETERS & body.keys())}
        spec: dict[str, Any] = {"template": f"{{{PROMPT}}}"}
        if url == CHAT:
            spec = _chat(request)
        spec["sampling"] = {name: getattr(params, name) for name in _SAMPLED}
        return {"spec": {**spec, "request": json.dumps({"url": url, **given})}}

    def _max_tokens(self, wanted: int | None) -> int:
        """See `get_max_tokens` in vLLM; the engine ends an output where the model's length does."""
        config, suggested = self._config, self._defaults.get("max_tokens")
        limit = suggested
        if config.generation_config in ("auto", "vllm"):
            limit = config.override_generation_config.get("max_new_tokens")
        numbers = (config.max_model_len, suggested if wanted is None else wanted, limit)
        return min(number for number in numbers if number is not None)


def _vector(request: Any) -> dict[str, Any]:
    normalize, size = request.use_activation is not False, getattr(request, "dimensions", None)
    embedding = {"normalize": normalize, "dimensions": size}
    spec = {"task": "embed", "embedding": embedding, "prompt": {"template": f"{{{PROMPT}}}"}}
    return {"spec": spec, "encoding_format": getattr(request, "encoding_format", None)}


def _check_fields(request: Any, url: str) -> None:
    """Refuse fields that ask for what a job doesn't do."""
    known = _WITHOUT_EFFECT | _KNOWN[url]
    fields = type(request).model_fields
    for name in sorted(request.model_fields_set & fields.keys() - known):
        if getattr(request, name) != fields[name].get_default(call_default_factory=True):
            raise RefusedRequestError(f"{name}: isn't supported in batches planned here", name)
    if url == CHAT and request.tool_choice not in (None, "none"):
        raise RefusedRequestError(
            "tool_choice: calls of tools aren't parsed here; with none, the template describes"
            " them, and the answer is text",
            "tool_choice",
        )
    if url == EMBEDDINGS and request.encoding_format not in ("float", "base64"):
        raise RefusedRequestError("encoding_format: must be float or base64", "encoding_format")


def _chat(request: Any) -> dict[str, Any]:
    arguments = request.build_chat_params(None, "auto").chat_template_kwargs
    arguments = {name: arguments[name] for name in arguments if name not in _ALWAYS}
    tools = [tool.model_dump() for tool in request.tools or ()]
    prompt = {"messages": PROMPT, "chat_template_kwargs": arguments or None, "tools": tools or None}
    return prompt | {"special_tokens": "keep"}  # as vLLM does


def _texts(given: Any, where: str) -> list[str]:
    texts = [given] if isinstance(given, str) else given
    if not texts or not all(isinstance(text, str) for text in texts):
        raise RefusedRequestError(
            f"{where}: must be a text or a list of texts; token ids aren't taken", where
        )
    for text in texts:
        text.encode()  # half a surrogate pair is a ValueError
    return list(texts)
