"""The plan's data about requests and jobs, as vLLM carries it to the scheduler.

A request's hints travel in `SamplingParams.extra_args` or `PoolingParams.extra_kwargs`, a job's in
`additional_config`: all are plain JSON, reach the scheduler in any process, and change nothing else
in vLLM.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any, Final, TypeVar

from pydantic import ConfigDict, Field, TypeAdapter, ValidationError
from pydantic.dataclasses import dataclass

from batchllm_operator.errors import SpecError

if TYPE_CHECKING:
    from vllm.v1.request import Request

KEY: Final = "batchllm"
"""Key in `extra_args` and in `additional_config`."""

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
            return cls.from_extra_args(request.pooling_params.extra_kwargs)
        params = request.sampling_params
        return cls.from_extra_args(params.extra_args if params is not None else None)

    @classmethod
    def from_extra_args(cls, extra_args: Mapping[str, Any] | None) -> RequestHints | None:
        """The hints from `to_extra_args`; None if there are none.

        Raises:
            SpecError: they aren't valid.
        """
        if not extra_args or KEY not in extra_args:
            return None
        return validated(_HINTS, KEY, extra_args[KEY])


@dataclass(frozen=True, slots=True, config=_CONFIG)
class StepCost:
    """A step's time on the device, as a function of its tokens."""

    token_s: float = 0.0
    """Seconds per token in all matrices."""
    weights_s: float = 0.0
    """Seconds to read all weights: a lower bound."""
    overhead_s: float = 1.0
    """Seconds added to each step. The defaults count steps."""

    def seconds(self, num_tokens: float) -> float:
        """Seconds of a step with so many tokens, without its attention."""
        return max(num_tokens * self.token_s, self.weights_s) + self.overhead_s


@dataclass(frozen=True, slots=True, config=_CONFIG)
class SchedulerSettings:
    """Settings of the scheduler; the defaults are for an unknown job."""

    memory_threshold: Annotated[float, Field(gt=0, le=1)] | None = None
    """M_threshold of Algorithm 2: share of the KV blocks that may be planned to be in use.
    Unset: all but one in a thousand."""
    chunk_size: Annotated[int, Field(ge=1)] | None = None
    """Most tokens of a step. Unset: vLLM's `max_num_batched_tokens`, which is a limit in any
    case."""
    pace: bool = True
    """Whether prefill is spread over steps, as far as that pays."""
    step_cost: StepCost | None = None
    """Decides how far it pays. Unset: only the number of steps counts."""
    num_requests: int | None = None
    """Requests that the engine will get in all; None if unknown."""
    trace_path: str | None = None
    """Parquet file to write, with a row per step; complete once the engine is shut down."""

    def to_additional_config(self) -> dict[str, Any]:
        """For vLLM's `additional_config`."""
        return {KEY: asdict(self)}

    @classmethod
    def from_additional_config(cls, config: object) -> SchedulerSettings:
        """The settings from `to_additional_config`, or the defaults.

        Raises:
            SpecError: they aren't valid.
        """
        if not isinstance(config, Mapping) or KEY not in config:
            return cls()
        return validated(_SETTINGS, KEY, config[KEY])


_Kind = TypeVar("_Kind")
_HINTS: Final = TypeAdapter(RequestHints)
_SETTINGS: Final = TypeAdapter(SchedulerSettings)


def validated(kind: TypeAdapter[_Kind], key: str, value: object) -> _Kind:
    """The value under a key of vLLM's, as one of our dataclasses.

    Raises:
        SpecError: it isn't valid; names the key, and all fields at fault.
    """
    try:
        return kind.validate_python(value)
    except ValidationError as error:
        faults = error.errors(include_input=False, include_url=False)
        lines = (f"{'.'.join(map(str, (key, *fault['loc'])))}: {fault['msg']}" for fault in faults)
        raise SpecError("; ".join(lines)) from error
