"""Bodies of responses of OpenAI's API, by vLLM's classes and as its server fills them."""

import base64
import json
import struct
from collections.abc import Iterable, Sequence
from math import fsum, hypot
from operator import mul
from typing import Any, Final

from vllm import SamplingParams
from vllm.entrypoints.openai.chat_completion.protocol import (
    ChatCompletionResponse,
    ChatCompletionResponseChoice,
    ChatMessage,
)
from vllm.entrypoints.openai.completion.protocol import CompletionResponse, CompletionResponseChoice
from vllm.entrypoints.pooling.embed.protocol import EmbeddingResponse

from batchllm_operator.engine.protocol import EngineRequest
from batchllm_operator.engine.vllm.openai_requests import CHAT, KINDS
from batchllm_operator.spec import JobSpec

_LEAST: Final = -9999.0  # where JSON has no infinity


class Responses:
    """vLLM's parameters (`params`) for a spec's `request`, and the bodies of its answers.

    Raises:
        ValueError: vLLM refuses the parameters.
    """

    def __init__(self, spec: JobSpec) -> None:
        assert spec.request is not None
        given = json.loads(spec.request)
        url = given.pop("url")
        self._is_chat = url == CHAT
        some = {"messages": [{"role": "user", "content": "-"}], "prompt": "-"}
        self._request = KINDS[url].model_validate({**some, **given})
        # What the request leaves out is the model's, which the spec has.
        self.params: SamplingParams = self._request.to_sampling_params(
            spec.sampling.max_tokens, spec.sampling.model_dump(exclude={"stop_token_ids"})
        )
        self.params.skip_clone = False  # it serves many requests

    def body(
        self, request: EngineRequest, completions: Sequence[Any], text: str, reasoning: str | None
    ) -> str:
        """The body of an answer, as JSON, without a model; `text` is a single completion's."""
        num_prompt_tokens = len(request.prompt_token_ids)
        num_tokens = sum(len(completion.token_ids) for completion in completions)
        usage: Any = {
            "prompt_tokens": num_prompt_tokens,
            "completion_tokens": num_tokens,
            "total_tokens": num_prompt_tokens + num_tokens,
        }
        texts = [text] if len(completions) == 1 else [each.text for each in completions]
        choices: Any = [
            self._choice(completion, text, reasoning)
            for completion, text in zip(completions, texts, strict=True)
        ]
        kind: Any = ChatCompletionResponse if self._is_chat else CompletionResponse
        return str(kind(model="", choices=choices, usage=usage).model_dump_json())

    def _choice(self, completion: Any, text: str, reasoning: str | None) -> Any:
        known = completion.logprobs if self._request.logprobs not in (None, False) else None
        ends: Any = {
            "index": completion.index,
            "finish_reason": completion.finish_reason,
            "stop_reason": completion.stop_reason,
        }
        if not self._is_chat:
            logprobs = None if known is None else self._of_text(completion.token_ids, known)
            return CompletionResponseChoice(**ends, text=text, logprobs=logprobs)
        message = ChatMessage(role="assistant", content=text, reasoning=reasoning)
        logprobs = None if known is None else self._of_chat(completion.token_ids, known)
        return ChatCompletionResponseChoice(**ends, message=message, logprobs=logprobs)

    def _of_chat(self, token_ids: Iterable[int], known: Iterable[dict[int, Any]]) -> Any:
        """Log-probabilities of a chat's answer; see `_create_chat_logprobs` in vLLM."""
        num_top = self._request.top_logprobs
        content = []
        for token_id, place in zip(token_ids, known, strict=True):
            top = list(place.values())[: None if num_top == -1 else num_top]
            content.append({**_token(place[token_id]), "top_logprobs": [*map(_token, top)]})
        return {"content": content}

    def _of_text(self, token_ids: Iterable[int], known: Iterable[dict[int, Any]]) -> Any:
        """Log-probabilities of a completion; see `_create_completion_logprobs` in vLLM."""
        num_top = self._request.logprobs
        offset, offsets, tokens, values, tops = 0, [], [], [], []
        for token_id, place in zip(token_ids, known, strict=True):
            chosen, top = place[token_id], list(place.values())
            offsets.append(offset)
            tokens.append(chosen.decoded_token)
            values.append(max(chosen.logprob, _LEAST))
            top = top[: None if num_top == -1 else num_top + 1]
            tops.append({each.decoded_token: max(each.logprob, _LEAST) for each in top})
            offset += len(chosen.decoded_token)
        names = ("text_offset", "tokens", "token_logprobs", "top_logprobs")
        return dict(zip(names, (offsets, tokens, values, tops), strict=True))


def _token(known: Any) -> dict[str, Any]:
    token = known.decoded_token
    number = max(known.logprob, _LEAST)
    return {"token": token, "logprob": number, "bytes": list(token.encode(errors="replace"))}


def vector_body(
    vectors: Sequence[Sequence[float]],
    lengths: Sequence[int],
    encoding_format: str | None,
    num_padding: int = 0,
    has_one_query: bool | None = None,
) -> dict[str, Any]:
    """The body of an answer of vectors, or of their scores, without a model.

    Args:
        lengths: tokens of each vector's text.
        has_one_query: for scores, whether the first vector is the query of all others, or the first
            half are queries of the second. `num_padding` tokens are counted for each pair.
    """
    if has_one_query is not None:
        return _score_body([*zip(vectors, lengths, strict=True)], num_padding, has_one_query)
    num_tokens = sum(lengths)
    data: Any = [
        {"index": idx, "embedding": _packed(vector) if encoding_format == "base64" else vector}
        for idx, vector in enumerate(vectors)
    ]
    usage: Any = {"prompt_tokens": num_tokens, "total_tokens": num_tokens}
    return EmbeddingResponse(data=data, usage=usage).model_dump(mode="json")


def _score_body(
    texts: list[tuple[Sequence[float], int]], num_padding: int, has_one_query: bool
) -> dict[str, Any]:
    from vllm.entrypoints.pooling.scoring.protocol import ScoreResponse

    num_queries = 1 if has_one_query else len(texts) // 2
    documents = texts[num_queries:]
    queries = texts[:num_queries] * (len(documents) if has_one_query else 1)
    pairs = [*zip(queries, documents, strict=True)]
    scores = [fsum(map(mul, a, b)) / (hypot(*a) * hypot(*b)) for (a, _), (b, _) in pairs]
    num_tokens = sum(num + num_padding + other for (_, num), (_, other) in pairs)
    data: Any = [{"index": idx, "score": score} for idx, score in enumerate(scores)]
    usage: Any = {"prompt_tokens": num_tokens, "total_tokens": num_tokens}
    return ScoreResponse(model="", data=data, usage=usage).model_dump(mode="json")


def _packed(vector: Sequence[float]) -> str:
    return base64.b64encode(struct.pack(f"<{len(vector)}f", *vector)).decode()
