"""The plan's data about requests and jobs, as vLLM carries it to the scheduler: plain JSON.

A request's hints travel in `SamplingParams.extra_args` or `PoolingParams.extra_kwargs`, a job's in
`additional_config`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from functools import cache
from typing import TYPE_CHECKING, Annotated, Any, Final, TypeVar, cast

from pydantic import ConfigDict, Field, TypeAdapter, ValidationError
from pydantic.dataclasses import dataclass

from batchllm_operator.errors import SpecError

if TYPE_CHECKING:
    from vllm.v1.request import Request

KEY: Final = "batchllm"
_CONFIG: Final = ConfigDict(extra="forbid")
_Length = Annotated[int, Field(strict=True, ge=0)]
_Positive = Annotated[int, Field(strict=True, ge=1)]


@dataclass(frozen=True, slots=True, config=_CONFIG)
class RequestHints:
    """What the plan knows about a request. Lengths are in tokens."""

    group_id: Annotated[int, Field(strict=True)]
    num_prefix_tokens: _Length = 0
    """All requests with this group id begin with the same `num_prefix_tokens` tokens."""
    group_size: _Positive = 1
    """Requests with this group id that this engine will get."""
    num_output_tokens: _Positive | None = None
    """Estimated; None where only the limit `max_tokens` is known."""

    def to_extra_args(self) -> dict[str, Any]:
        """For `SamplingParams.extra_args` and `PoolingParams.extra_kwargs`."""
        return {KEY: asdict(self)}

    @classmethod
    def of(cls, request: Request) -> RequestHints | None:
        """The hints of vLLM's request; None if there are none.

        Raises:
            SpecError: they aren't valid.
        """
        if request.pooling_params is not None:
            return read_under(KEY, request.pooling_params.extra_kwargs, cls)
        return read_under(KEY, getattr(request.sampling_params, "extra_args", None), cls)


@dataclass(frozen=True, slots=True, config=_CONFIG)
class StepCost:
    """A step's time on the device, as a function of its tokens."""

    token_s: float = 0.0
    weights_s: float = 0.0
    """To read all weights: a lower bound."""
    overhead_s: float = 1.0
    """Of each step. The defaults count steps."""

    def seconds(self, num_tokens: float) -> float:
        """Seconds of a step with so many tokens, without its attention."""
        return max(num_tokens * self.token_s, self.weights_s) + self.overhead_s


@dataclass(frozen=True, slots=True, config=_CONFIG)
class SchedulerSettings:
    """Settings of the scheduler; the defaults are for an unknown job."""

    memory_threshold: Annotated[float, Field(gt=0, le=1)] | None = None
    """M_threshold of Algorithm 2: share of KV blocks to plan with. Unset: all but 1 in 1,000."""
    chunk_size: Annotated[int, Field(ge=1)] | None = None
    """Most tokens of a step. Unset: vLLM's `max_num_batched_tokens`, a limit in any case."""
    pace: bool = True
    """Whether prefill is spread over steps, as far as that pays."""
    step_cost: StepCost | None = None
    """Decides how far it pays. Unset: only the number of steps counts."""
    num_requests: int | None = None
    """Requests that the engine will get in all; None if unknown."""
    trace_path: str | None = None
    """Parquet file to write, with a row per step; complete once the engine is shut down."""

    def to_additional_config(self) -> dict[str, Any]:
        return {KEY: asdict(self)}

    @classmethod
    def from_additional_config(cls, config: object) -> SchedulerSettings:
        """The settings from `to_additional_config`, or the defaults.

        Raises:
            SpecError: they aren't valid.
        """
        return read_under(KEY, config, cls) or cls()


_Kind = TypeVar("_Kind")
_adapter: Final[Any] = cache(TypeAdapter)


def read_under(key: str, carrier: object, kind: type[_Kind]) -> _Kind | None:
    """What lies under a key in vLLM's arguments, as one of our dataclasses; None if nothing does.

    Raises:
        SpecError: it isn't valid; names the key, and all fields at fault.
    """
    if not isinstance(carrier, Mapping) or key not in carrier:
        return None
    try:
        return cast(_Kind, _adapter(kind).validate_python(carrier[key]))
    except ValidationError as error:
        faults = error.errors(include_input=False, include_url=False)
        lines = (f"{'.'.join(map(str, (key, *fault['loc'])))}: {fault['msg']}" for fault in faults)
        raise SpecError("; ".join(lines)) from error
