"""The protocol between a run and its inference engine."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from batchllm_operator.answers import PlannedAnswers
from batchllm_operator.engine.device_profile import StoredProfiles
from batchllm_operator.errors import EngineError
from batchllm_operator.row_error import RowError
from batchllm_operator.vllm_plugin.scheduler.hints import StepCost

if TYPE_CHECKING:
    from batchllm_operator.runahead.phase import ChainedEngine


@dataclass(frozen=True, slots=True)
class EngineJob:
    """The work of an engine, as far as the plan knows it."""

    max_model_len: int
    """Most tokens of a prompt with its output."""
    num_requests: int | None = None
    """Requests that it will get; None if unknown."""
    step_cost: StepCost | None = None
    """For the planned GPU, until the real one has a profile."""
    profiles: StoredProfiles | None = None
    """Stores profiles of devices; without it, every engine measures its own."""
    trace_folder: Path | None = None
    """Local folder for traces of the engine's steps, a Parquet file per engine; None for none."""
    answers: Sequence[PlannedAnswers] | None = None
    """What planning has found out about the answers to each question."""
    is_chained: bool = False
    """Whether replicas may compute prefixes together (ADR 24)."""


@dataclass(frozen=True, slots=True)
class EngineRequest:
    """One prompt to generate for."""

    request_idx: int
    prompt_token_ids: list[int]
    group_id: int
    """Requests with the same group_id share their first `num_prefix_tokens` tokens."""
    num_prefix_tokens: int
    group_size: int = 1
    """Requests with this group_id that the engine will get."""
    num_output_tokens: int | None = None
    """Estimated; None for the spec's maximum."""
    adapter: str | None = None
    """Its name in the spec; None for the model itself."""
    num_tries: int = 0
    """Answers to it that couldn't be used; each has a seed of its own."""
    question: int = 0
    """What it asks, of the spec's questions."""


@dataclass(frozen=True, slots=True)
class EngineOutput:
    """The result of one request: an answer or an error, or an answer that can't be used and why."""

    request_idx: int
    text: str | None
    finish_reason: str | None
    """`stop` or `length`; None if the engine couldn't serve it."""
    num_prompt_tokens: int
    num_cached_tokens: int
    """Prompt tokens whose KV was in the cache; of several answers, for the first one."""
    num_output_tokens: int
    error: RowError | None
    raw: Mapping[str, Any] = field(default_factory=dict)
    """What the job asks for beside a text: `Answers.raw_fields`, by name."""
    question: int = 0
    """The request's."""

    @property
    def is_served(self) -> bool:
        """Whether the engine has answered, even if the answer can't be used."""
        return self.finish_reason is not None

    @classmethod
    def failed(cls, request: EngineRequest, reason: str) -> EngineOutput:
        """The output of a request that the engine couldn't serve."""
        error = RowError("engine_error", " ".join(reason.split()))
        num_prompt_tokens = len(request.prompt_token_ids)
        counts = (num_prompt_tokens, 0, 0)
        return cls(request.request_idx, None, None, *counts, error, question=request.question)


class EngineDiedError(EngineError):
    """The engine failed as a whole, and can't be used again.

    `in_flight` are its unanswered requests, in the order in which it took them: one of them may be
    the cause.
    """

    def __init__(self, message: str, in_flight: Sequence[EngineRequest]) -> None:
        super().__init__(message)
        self.in_flight = tuple(in_flight)


class Engine(Protocol):
    """Generates for a stream of requests."""

    def stream(self, requests: Iterator[EngineRequest]) -> Iterator[EngineOutput]:
        """Generate for each request, and yield outputs as they finish, in any order.

        Takes requests in order, a bounded number ahead; each gets exactly one output.

        Raises:
            EngineDiedError: the engine failed; outputs yielded so far stand.
        """

    @property
    def unread(self) -> Sequence[EngineOutput]:
        """Outputs that are computed when an error or a signal stops `stream`'s reader; the first
        may be the one that it got last."""

    @property
    def chain(self) -> ChainedEngine | None:
        """The engine as a replica of a chain; None if it can't be in one."""

    def close(self) -> None:
        """Release memory and processes. The engine can't be used afterwards."""
