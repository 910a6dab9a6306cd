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
RERANK: Final = "/rerank"
"""Both with anything before it, as vLLM takes them."""
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
_KNOWN: Final = {
    CHAT: _PARAMETERS | _OF_PROMPTS | {"messages"},
    COMPLETIONS: _PARAMETERS | {"prompt"},
    EMBEDDINGS: {"input", "encoding_format", "dimensions", "use_activation"},
    SCORES: {"queries", "documents", "items", "use_activation"}
    | {f"{name}_{number}" for name in ("text", "data") for number in (1, 2)},
    RERANK: {"query", "documents", "top_n", "use_activation"},
}
_ALWAYS: Final = ("add_generation_prompt", "continue_final_message")


class RefusedRequestError(Exception):
    """A request has no answer: the field at fault, if vLLM's server would name it.

    `param` is False where `vllm run-batch` itself refuses a line, with a text for its error.
    """

    def __init__(
        self, message: str, param: str | Literal[False] | None = None, status: int = 400
    ) -> None:
        super().__init__(message)
        self.param, self.status = param, status


@dataclass(frozen=True, slots=True)
class Asked:
    """What a request asks."""

    parameters: dict[str, Any]
    """One of a job's `prompts`, which takes its text from the column `PROMPT`; of vectors, what
    `vector_body` makes of them, with the `url`."""
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
        self.is_pooled: bool = self._config.runner_type == "pooling"

    def asked(self, url: str, body: Mapping[str, Any]) -> Asked:
        """What a request asks; a RefusedRequestError says why it can't be answered."""
        with catch_warnings(action="ignore", category=DeprecationWarning):  # of `max_tokens`
            return self._asked(url, body)

    def _asked(self, url: str, body: Mapping[str, Any]) -> Asked:
        kind = next((each for each in (SCORES, RERANK) if url.endswith(each)), url)
        if kind not in _KNOWN:
            known = ", ".join(_KNOWN)
            raise RefusedRequestError(f"URL {url} was used. Supported endpoints: {known}", False)
        if self.is_pooled != (kind in (EMBEDDINGS, SCORES, RERANK)):
            raise RefusedRequestError(f"Model does not support endpoint: {url}", False)
        try:
            if kind in (SCORES, RERANK):
                return self._scores(kind, body)
            request = KINDS[kind].model_validate(body)
            request.build_tok_params(self._config)
            _check_fields(request, kind)
            if kind == EMBEDDINGS:
                return self._embeddings(request)
            read = self._text(request, kind, body)
            if kind == CHAT:
                return Asked(read, [json.dumps(body["messages"])], request.model)
            return Asked(read, _texts(request.prompt, "prompt"), request.model)
        except ValidationError as error:
            fault = error.errors(include_url=False)[0]
            where = ".".join(map(str, fault["loc"]))
            raise RefusedRequestError(f"{where}: {fault['msg']}", where or None) from error
        except (ValueError, VLLMValidationError) as error:
            raise RefusedRequestError(str(error), getattr(error, "parameter", None)) from error

    def _embeddings(self, request: Any) -> Asked:
        params = request.to_pooling_params()
        params.verify(self._config)
        how = {"normalize": params.use_activation, "dimensions": params.dimensions}
        how |= {"url": EMBEDDINGS, "encoding_format": request.encoding_format}
        return Asked(how, _texts(request.input, "input"), request.model)

    def _scores(self, url: str, body: Mapping[str, Any]) -> Asked:
        """The similarities of queries and documents, each of which is embedded."""
        from vllm.entrypoints.pooling.scoring.protocol import RerankRequest, ScoreRequest

        how: dict[str, Any] = {"url": url}
        if (score_type := self._config.score_type) != "bi-encoder":
            raise ValueError(f"scores of a {score_type} model aren't computed here")
        kind: Any = RerankRequest if url == RERANK else ScoreRequest
        request: Any = TypeAdapter(kind).validate_python(body)
        _check_fields(request, url)
        if url == RERANK:
            given, how["top_n"] = (request.query, request.documents), request.top_n
        else:
            given = (request.data_1, request.data_2)
        queries, documents = map(_texts, given, ("queries", "documents"))
        if len(queries) not in (1, len(documents)):
            raise ValueError("there must be one query, or as many as documents")
        how["has_one_query"] = len(queries) == 1
        return Asked(how, [*queries, *documents], request.model)

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
        return {**spec, "request": json.dumps({"url": url, **given})}

    def _max_tokens(self, wanted: int | None) -> int:
        """See `get_max_tokens` in vLLM; the engine ends an output where the model's length does."""
        config, suggested = self._config, self._defaults.get("max_tokens")
        limit = suggested
        if config.generation_config in ("auto", "vllm"):
            limit = config.override_generation_config.get("max_new_tokens")
        numbers = (config.max_model_len, suggested if wanted is None else wanted, limit)
        return min(number for number in numbers if number is not None)


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
        raise ValueError(f"{where}: must be a text or a list of texts; token ids aren't taken")
    for text in texts:
        text.encode()  # half a surrogate pair is a ValueError
    return list(texts)
