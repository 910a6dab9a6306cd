"""Bodies of responses of OpenAI's API, by vLLM's classes and as its server fills them."""

import base64
import json
from collections.abc import Iterable, Sequence
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray
from vllm import SamplingParams
from vllm.entrypoints.openai.chat_completion.protocol import (
    ChatCompletionResponse,
    ChatCompletionResponseChoice,
    ChatMessage,
)
from vllm.entrypoints.openai.completion.protocol import CompletionResponse, CompletionResponseChoice
from vllm.entrypoints.pooling.embed.protocol import EmbeddingResponse

from batchllm_operator.engine.protocol import EngineRequest
from batchllm_operator.engine.vllm.openai_requests import CHAT, EMBEDDINGS, KINDS
from batchllm_operator.spec import JobSpec

_LEAST: Final = -9999.0  # where JSON has no infinity
_LEAST_SIZE: Final = 1e-12
Vectors = NDArray[np.float32]


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
    vectors: Vectors, lengths: Sequence[int], texts: Sequence[str], url: str, **how: Any
) -> dict[str, Any]:
    """The body of an answer that is made of vectors, without a model.

    Args:
        vectors: [num_texts, size] as pooled: neither cut nor of length 1.
        lengths: tokens of each text.
        texts: only to rank them.
        how: the rest of `Asked.parameters`.
    """
    usage = {"prompt_tokens": sum(lengths), "total_tokens": sum(lengths)}
    if url == EMBEDDINGS:
        return _embedding_body(vectors, usage, **how)
    return _score_body(vectors, texts, usage, **how)


def _embedding_body(
    vectors: Vectors,
    usage: Any,
    normalize: bool,
    dimensions: int | None,
    encoding_format: str,
) -> dict[str, Any]:
    vectors = vectors[:, :dimensions]
    if normalize:
        vectors = vectors / np.maximum(_sizes(vectors), _LEAST_SIZE)[:, None]
    data: Any = [
        {
            "index": idx,
            "embedding": base64.b64encode(vector.tobytes()).decode()
            if encoding_format == "base64"
            else vector.tolist(),
        }
        for idx, vector in enumerate(vectors)
    ]
    return EmbeddingResponse(data=data, usage=usage).model_dump(mode="json")


def _score_body(
    vectors: Vectors,
    texts: Sequence[str],
    usage: Any,
    has_one_query: bool,
    top_n: int | None = None,
) -> dict[str, Any]:
    """Cosines.

    Args:
        has_one_query: whether the first vector is the query of all others, or the first half are
            queries of the second.
        top_n: rank the documents, and keep so many; 0 for all.
    """
    from vllm.entrypoints.pooling.scoring.protocol import RerankResponse, ScoreResponse

    num_queries = 1 if has_one_query else len(vectors) // 2
    queries, documents = np.split(vectors, [num_queries])
    sizes = _sizes(queries) * _sizes(documents)
    scores = ((queries * documents).sum(1) / np.maximum(sizes, _LEAST_SIZE)).tolist()
    if top_n is None:
        data: Any = [{"index": idx, "score": score} for idx, score in enumerate(scores)]
        scored = ScoreResponse(id="score", model="", data=data, usage=usage)
        return scored.model_dump(mode="json")
    results: Any = [
        {"index": idx, "document": {"text": texts[num_queries + idx]}, "relevance_score": score}
        for idx, score in enumerate(scores)
    ]
    results = sorted(results, key=lambda result: -result["relevance_score"])[: top_n or None]
    ranked = RerankResponse(id="score", model="", results=results, usage=usage)
    return ranked.model_dump(mode="json")


def _sizes(vectors: Vectors) -> Vectors:
    sizes: Vectors = np.linalg.norm(vectors, axis=1)
    return sizes
