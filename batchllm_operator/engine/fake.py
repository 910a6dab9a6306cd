"""An engine without a model, to try and test everything around it.

It answers a prompt with a digest of its token ids and its adapter's name. What a prompt has in
common with the one before counts as cached, in whole KV blocks.
"""

import time
from collections.abc import Iterator, Sequence
from itertools import islice, takewhile
from operator import eq
from typing import Any, Final

from pydantic import BaseModel, ConfigDict, Field

from batchllm_operator.answers import Answers, FakePrompt
from batchllm_operator.answers.fakes import NUM_CHARACTERS, adapter_ids, digest_of
from batchllm_operator.engine.gpus import block_size_of
from batchllm_operator.engine.protocol import EngineDiedError, EngineOutput, EngineRequest
from batchllm_operator.spec import JobSpec
from batchllm_operator.spec.fields import MAX_COUNT


class FakeArguments(BaseModel):
    """`engine.extra_args` of this engine; `check_arguments` refuses others."""

    model_config = ConfigDict(frozen=True)

    byte_tokens: bool = False
    """The tokens of a prompt are its bytes, so that no model's tokenizer is needed."""
    delay_s: float = Field(default=0.0, ge=0)
    """Seconds for each request."""
    error_token_id: int | None = None
    """A request whose prompt has this token gets an error."""
    fatal_token_id: int | None = None
    """A request whose prompt has this token kills the engine."""
    invalid_every: int | None = Field(default=None, ge=1)
    """Of so many prompts, about one has answers without the `response_format`."""
    invalid_tries: int = Field(default=MAX_COUNT, ge=1)
    """How often such a prompt is tried until its answer has the form."""
    max_in_flight: int = Field(default=16, ge=1)
    """Requests that run at a time."""
    num_characters: int = Field(default=NUM_CHARACTERS, ge=0)
    """Length of each text."""


ARGUMENTS: Final[dict[str, Any]] = {  # types by name
    name: field.rebuild_annotation() for name, field in FakeArguments.model_fields.items()
}


class FakeEngine:
    """Serves requests in waves of `max_in_flight`, with made-up outputs."""

    def __init__(self, spec: JobSpec, max_model_len: int) -> None:
        given = {name: arg for name, arg in spec.engine.extra_args.items() if arg is not None}
        self._args, self._answers = FakeArguments.model_validate(given), Answers.of_all(spec)
        self._most = [0 if q.is_pooled else q.sampling.max_tokens for q in spec.questions]
        """Tokens of an answer to each question."""
        self._block_size, self._max_model_len = block_size_of(spec), max_model_len

    unread: Sequence[EngineOutput] = ()  # it computes one at a time
    chain = None

    def stream(self, requests: Iterator[EngineRequest]) -> Iterator[EngineOutput]:
        before: list[int] = []  # with the adapter
        while wave := list(islice(requests, self._args.max_in_flight)):
            for idx, request in enumerate(wave):
                if self._args.fatal_token_id in request.prompt_token_ids:
                    raise EngineDiedError("fatal token in the batch", wave[idx:])
                if self._args.delay_s:
                    time.sleep(self._args.delay_s)
                prompt = _with_adapter(request)
                num_shared = sum(takewhile(bool, map(eq, before, prompt[:-1])))
                num_shared -= len(prompt) - len(request.prompt_token_ids)
                before = prompt
                num_cached = max(num_shared, 0) // self._block_size * self._block_size
                yield self._answer(request, num_cached)

    def close(self) -> None:
        pass

    def _answer(self, request: EngineRequest, num_cached_tokens: int) -> EngineOutput:
        if self._args.error_token_id in request.prompt_token_ids:
            return EngineOutput.failed(request, "error token in the prompt")
        num_prompt_tokens, token_ids = len(request.prompt_token_ids), _with_adapter(request)
        every, is_tried = self._args.invalid_every, request.num_tries >= self._args.invalid_tries
        prompt = FakePrompt(
            token_ids,
            self._args.num_characters,
            is_invalid=every is not None and not is_tried and not digest_of(token_ids) % every,
        )
        question = request.question
        text, raw = self._answers[question].fake(prompt)
        num_output_tokens = min(self._most[question], self._max_model_len - num_prompt_tokens)
        counts = (num_prompt_tokens, num_cached_tokens, num_output_tokens)
        return EngineOutput(request.request_idx, text, "length", *counts, None, raw, question)


def _with_adapter(request: EngineRequest) -> list[int]:
    return [*adapter_ids(request.adapter), *request.prompt_token_ids]
