"""What the job needs of an inference engine."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Final, Protocol

from batchllm_operator.engine.device_profile import ProfileStore
from batchllm_operator.errors import EngineError
from batchllm_operator.vllm_plugin.scheduler.hints import StepCost

if TYPE_CHECKING:
    from batchllm_operator.engine.replicas.chain_profile import ChainProfile
    from batchllm_operator.vllm_plugin.runahead.plan import RunaheadGroup

ENGINE_ERROR: Final = "engine_error"


@dataclass(frozen=True, slots=True)
class ChainedGroup:
    """A group whose prefix all replicas compute together."""

    prefix: RunaheadGroup
    num_members: int
    """Requests with its group_id that the engine will be given."""


@dataclass(frozen=True, slots=True)
class ChainJob:
    """What replicas that can compute prefixes together are asked to (ADR 26)."""

    groups: tuple[ChainedGroup, ...] = ()
    """In the order in which their requests come."""
    keep_profile: Callable[[ChainProfile], None] | None = None
    """Takes what the chain was measured at; None: it isn't measured."""
    subject: Mapping[str, str] = field(default_factory=dict)
    """What is measured, as a later plan will look it up: see `chain_subject`. By the spec as it
    was planned with; an engine's has the model's commit in place of a branch."""


@dataclass(frozen=True, slots=True)
class EngineJob:
    """What an engine is started for, as far as the plan knows."""

    max_model_len: int
    """Most tokens of a prompt and its output together."""
    num_requests: int | None = None
    """That it will be given; None if that isn't known."""
    step_cost: StepCost | None = None
    """Of the GPU that was planned for, until a profile of the real one is there."""
    profiles: ProfileStore | None = None
    """Remembers profiles of devices; without it, every engine makes its own."""
    trace_folder: Path | None = None
    """Local folder for traces of the engine's steps, a Parquet file for each engine; None for
    none. Traces of replicas but the first are in folders of their own there."""
    spread_groups: frozenset[int] = frozenset()
    """Groups whose requests are for all replicas in turn; the others each for one of them."""
    chain: ChainJob | None = None
    """None: replicas don't compute prefixes together."""


@dataclass(frozen=True, slots=True)
class EngineRequest:
    """One prompt to generate for."""

    request_idx: int
    prompt_token_ids: list[int]
    group_id: int
    """Requests with the same group_id share their first `num_prefix_tokens` tokens."""
    num_prefix_tokens: int
    group_size: int = 1
    """Requests with this group_id that the engine will be given."""
    num_output_tokens: int | None = None
    """Estimated; None for as many as the spec allows."""


@dataclass(frozen=True, slots=True)
class EngineOutput:
    """What became of one request: a text, or an error."""

    request_idx: int
    text: str | None
    finish_reason: str | None
    """`stop` or `length`; None with an error."""
    num_prompt_tokens: int
    num_cached_tokens: int
    """Prompt tokens whose KV was found in the cache instead of computed."""
    num_output_tokens: int
    error: str | None

    @classmethod
    def failed(cls, request: EngineRequest, reason: str) -> EngineOutput:
        """The output of a request that the engine could not serve."""
        reason = " ".join(reason.split())
        return cls(
            request_idx=request.request_idx,
            text=None,
            finish_reason=None,
            num_prompt_tokens=len(request.prompt_token_ids),
            num_cached_tokens=0,
            num_output_tokens=0,
            error=f"{ENGINE_ERROR}: {reason}",
        )


class EngineDiedError(EngineError):
    """The engine failed as a whole, and can't be used again.

    `in_flight` are the requests, in the order they were taken, that it had accepted
    and not answered: one of them may be the cause.
    """

    def __init__(self, message: str, in_flight: Sequence[EngineRequest]) -> None:
        super().__init__(message)
        self.in_flight = tuple(in_flight)


class Engine(Protocol):
    """Generates for a stream of requests."""

    def stream(self, requests: Iterator[EngineRequest]) -> Iterator[EngineOutput]:
        """Generate for each request, and yield outputs as they are finished, in any order.

        Takes requests only as it needs them, with a bounded look-ahead, in the given
        order. Every request taken gets exactly one output.

        Raises:
            EngineDiedError: the engine failed; outputs yielded so far stand.
        """

    def close(self) -> None:
        """Release memory and processes. The engine can't be used afterwards."""
