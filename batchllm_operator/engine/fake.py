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

import time
from collections.abc import Iterator
from itertools import islice, takewhile
from operator import eq
from typing import Annotated, Any, Final

from pydantic import Field

from batchllm_operator.answers import Answers, FakePrompt
from batchllm_operator.answers.fakes import NUM_CHARACTERS, adapter_ids, digest_of
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
        self._num_characters = int(str(args.get("num_characters", NUM_CHARACTERS)))
        self._answers = Answers.of(spec)
        self._max_tokens = 0 if spec.is_pooled else spec.sampling.max_tokens
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
        num_prompt_tokens, token_ids = len(request.prompt_token_ids), _with_adapter(request)
        every = self._invalid_every
        prompt = FakePrompt(
            token_ids,
            self._num_characters,
            is_invalid=bool(every)
            and not digest_of(token_ids) % every
            and request.num_tries < self._invalid_tries,
            is_nan=self._nan_token_id in token_ids,
        )
        text, raw = self._answers.fake(prompt)
        return EngineOutput(
            request_idx=request.request_idx,
            text=text,
            raw=raw,
            finish_reason="length",
            num_prompt_tokens=num_prompt_tokens,
            num_cached_tokens=num_cached_tokens,
            num_output_tokens=min(self._max_tokens, self._max_model_len - num_prompt_tokens),
            error=None,
        )


def _with_adapter(request: EngineRequest) -> list[int]:
    return [*adapter_ids(request.adapter), *request.prompt_token_ids]
