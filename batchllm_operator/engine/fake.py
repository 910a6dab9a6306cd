"""An engine without a model, to try and test everything around it.

It answers a prompt with a digest of its token ids and its adapter's name, so outputs are
deterministic and differ between prompts. `engine.extra_args` can ask for faults, delays, and plans
without a model's tokenizer:

    byte_tokens        the tokens of a prompt are its bytes (default false: the model's)
    delay_s            seconds for each request
    error_token_id     a request whose prompt has this token gets an error
    fatal_token_id     ... kills the engine
    invalid_every      of so many prompts, about one has answers without the `response_format`
    invalid_tries      ... until it has been tried so often (default: always)
    max_in_flight      requests that run at a time (default 16)
    nan_token_id       a vector of a prompt with this token isn't of numbers
    num_characters     of each text (default 21)

What a prompt has in common with the one before counts as cached, in whole KV blocks.
`arguments` checks their names and types before an engine starts.
"""

from __future__ import annotations

import hashlib
import math
import time
from collections.abc import Iterator
from itertools import islice, takewhile
from operator import eq
from typing import Annotated, Any, Final

from pydantic import Field

from batchllm_operator.answers.labels import LOGPROBS_FIELD
from batchllm_operator.answers.logprobs import TOKENS_FIELD, TOP_FIELD
from batchllm_operator.answers.reasoning import REASONING_FIELD
from batchllm_operator.answers.samples import TEXTS_FIELD
from batchllm_operator.answers.vectors import VECTOR_FIELD
from batchllm_operator.engine.fake_answers import digest_of, fake_answer
from batchllm_operator.engine.gpus import block_size_of
from batchllm_operator.engine.protocol import EngineDiedError, EngineOutput, EngineRequest
from batchllm_operator.spec import JobSpec
from batchllm_operator.spec.sections import MAX_COUNT

ARGUMENTS: Final[dict[str, Any]] = {
    "byte_tokens": bool,
    "delay_s": Annotated[float, Field(ge=0)],
    "error_token_id": int,
    "fatal_token_id": int,
    "invalid_every": Annotated[int, Field(ge=1)],
    "invalid_tries": Annotated[int, Field(ge=1)],
    "max_in_flight": Annotated[int, Field(ge=1)],
    "nan_token_id": int,
    "num_characters": Annotated[int, Field(ge=0)],
}
"""Types by name."""
_NUM_CHARACTERS = 21
FAKE_SIZE: Final = 8
"""Numbers of a vector, unless the spec says otherwise."""


class FakeEngine:
    """Serves requests in waves of `max_in_flight`, with made-up outputs."""

    def __init__(self, spec: JobSpec, max_model_len: int) -> None:
        args = {name: each for name, each in spec.engine.extra_args.items() if each is not None}
        self._delay_s = float(str(args.get("delay_s", 0)))
        self._error_token_id = args.get("error_token_id")
        self._fatal_token_id = args.get("fatal_token_id")
        self._invalid_every = int(str(args.get("invalid_every", 0)))
        self._invalid_tries = int(str(args.get("invalid_tries", MAX_COUNT)))
        self._nan_token_id = args.get("nan_token_id")
        self._max_in_flight = int(str(args.get("max_in_flight", 16)))
        self._num_characters = int(str(args.get("num_characters", _NUM_CHARACTERS)))
        self._spec, self._max_tokens = spec, spec.sampling.max_tokens
        self._block_size = block_size_of(spec)
        self._max_model_len = max_model_len

    def stream(self, requests: Iterator[EngineRequest]) -> Iterator[EngineOutput]:
        before: list[int] = []  # with the adapter
        while wave := list(islice(requests, self._max_in_flight)):
            for idx, request in enumerate(wave):
                if self._fatal_token_id in request.prompt_token_ids:
                    raise EngineDiedError("fatal token in the batch", wave[idx:])
                if self._delay_s:
                    time.sleep(self._delay_s)
                prompt = _with_adapter(request)
                num_shared = sum(takewhile(bool, map(eq, before, prompt[:-1])))
                num_shared -= len(prompt) - len(request.prompt_token_ids)
                before = prompt
                num_cached = max(num_shared, 0) // self._block_size * self._block_size
                yield self._answer(request, num_cached)

    def close(self) -> None:
        pass

    def _answer(self, request: EngineRequest, num_cached_tokens: int) -> EngineOutput:
        if self._error_token_id in request.prompt_token_ids:
            return EngineOutput.failed(request, "error token in the prompt")
        num_prompt_tokens, prompt = len(request.prompt_token_ids), _with_adapter(request)
        pooled, num_left = self._spec.is_pooled, self._max_model_len - num_prompt_tokens
        return EngineOutput(
            request_idx=request.request_idx,
            text="" if pooled else self._text(request, prompt),
            raw=self._raw(prompt),
            finish_reason="length",
            num_prompt_tokens=num_prompt_tokens,
            num_cached_tokens=num_cached_tokens,
            num_output_tokens=0 if pooled else min(self._max_tokens, num_left),
            error=None,
        )

    def _text(self, request: EngineRequest, prompt: list[int]) -> str:
        form = self._spec.response_format
        if form is None:
            return fake_text(prompt, self._num_characters)
        answer = fake_answer(form, prompt)
        every = self._invalid_every
        if every and not digest_of(prompt) % every and request.num_tries < self._invalid_tries:
            return answer[: len(answer) // 2]
        return answer

    def _raw(self, prompt_token_ids: list[int]) -> dict[str, Any]:
        """What the job asks for beside a text."""
        sampling, raw = self._spec.sampling, dict[str, Any]()
        if labels := self._spec.labels:
            raw[LOGPROBS_FIELD.name] = fake_logprobs(prompt_token_ids, len(labels))
        if self._spec.is_pooled:
            size = self._spec.embedding.dimensions or FAKE_SIZE
            is_nan = self._nan_token_id in prompt_token_ids
            raw[VECTOR_FIELD.name] = (
                [math.nan] * size if is_nan else fake_vector(prompt_token_ids, size)
            )
        if sampling.n > 1:
            prompts = ([*prompt_token_ids, -sample] for sample in range(1, sampling.n))
            others = [fake_text(each, self._num_characters) for each in prompts]
            first = fake_text(prompt_token_ids, self._num_characters)
            raw[TEXTS_FIELD.name] = [first, *others]
        if self._spec.model.reasoning_parser is not None:
            raw[REASONING_FIELD.name] = "reasoning of " + fake_text(prompt_token_ids)
        if (num_top := sampling.logprobs) is not None:
            logprobs = fake_logprobs(prompt_token_ids, sampling.max_tokens)
            raw[TOKENS_FIELD.name] = logprobs
            top = [{"token": f"token {rank}", "logprob": -rank / 8} for rank in range(num_top)]
            raw[TOP_FIELD.name] = [top for _ in logprobs]
        return raw


def fake_logprobs(prompt_token_ids: list[int], num_labels: int) -> list[float]:
    """The fake engine's log-probabilities of labels for a prompt."""
    digest = hashlib.shake_256(repr(prompt_token_ids).encode()).digest(num_labels)
    return [-1 - byte / 64 for byte in digest]


def fake_vector(prompt_token_ids: list[int], size: int) -> list[float]:
    """The fake engine's vector for a prompt."""
    digest = hashlib.shake_256(repr(prompt_token_ids).encode()).digest(size)
    return [byte / 128 - 1 for byte in digest]


def _with_adapter(request: EngineRequest) -> list[int]:
    return [*_adapter_ids(request.adapter), *request.prompt_token_ids]


def _adapter_ids(adapter: str | None) -> list[int]:
    """What stands for an adapter in front of a prompt's token ids."""
    return [-1 - byte for byte in (adapter or "").encode()]


def fake_text(
    prompt_token_ids: list[int], num_characters: int = _NUM_CHARACTERS, adapter: str | None = None
) -> str:
    """The fake engine's output for a prompt."""
    prompt = repr([*_adapter_ids(adapter), *prompt_token_ids]).encode()
    text = "fake " + hashlib.sha256(prompt).hexdigest()[:16]
    if num_characters > len(text):
        text += hashlib.shake_256(prompt).hexdigest((num_characters - len(text) + 1) // 2)
    return text[:num_characters]
