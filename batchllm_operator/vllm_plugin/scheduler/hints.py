"""The plan's data about requests and jobs, as vLLM carries it to the scheduler.

A request's hints travel in `SamplingParams.extra_args` or `PoolingParams.extra_kwargs`, a job's in
`additional_config`: all are plain JSON, reach the scheduler in any process, and change nothing else
in vLLM.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import TYPE_CHECKING, Any, Final

from pydantic import TypeAdapter, ValidationError

from batchllm_operator.errors import SpecError

if TYPE_CHECKING:
    from vllm.v1.request import Request

KEY: Final = "batchllm"
"""Key in `extra_args` and in `additional_config`."""


@dataclass(frozen=True, slots=True)
class RequestHints:
    """What the plan knows about a request. Lengths are in tokens."""

    group_id: int
    num_prefix_tokens: int = 0
    """All requests with this group id begin with the same `num_prefix_tokens` tokens."""
    group_size: int = 1
    """Requests with this group id that this engine will get."""
    num_output_tokens: int | None = None
    """Estimated; None where only the limit `max_tokens` is known."""

    def __post_init__(self) -> None:
        least = {"num_prefix_tokens": 0, "group_size": 1, "num_output_tokens": 1}
        for name in ("group_id", *least):
            value = getattr(self, name)
            if name == "num_output_tokens" and value is None:
                continue
            if not isinstance(value, int) or isinstance(value, bool):
                raise SpecError(f"{KEY}.{name}: must be an integer, not {value!r}")
            if value < least.get(name, value):
                raise SpecError(f"{KEY}.{name}: must be at least {least[name]}, not {value}")

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
        given = extra_args[KEY]
        _check_names(cls, given)
        try:
            return cls(**given)
        except TypeError as error:
            raise SpecError(f"{KEY}: {error}") from error


@dataclass(frozen=True, slots=True)
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


@dataclass(frozen=True, slots=True)
class SchedulerSettings:
    """Settings of the scheduler; the defaults are for an unknown job."""

    memory_threshold: float | None = None
    """M_threshold of Algorithm 2: share of the KV blocks that may be planned to be in use.
    Unset: all but one in a thousand."""
    chunk_size: int | None = None
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
        given = config[KEY]
        _check_names(cls, given)
        if (step_cost := given.get("step_cost")) is not None:
            _check_names(StepCost, step_cost)
        try:
            settings = TypeAdapter(cls).validate_python(given)
        except ValidationError as error:
            [fault, *_] = error.errors(include_input=False, include_url=False)
            where = ".".join(map(str, (KEY, *fault["loc"])))
            raise SpecError(f"{where}: {fault['msg']}") from error
        if not 0 < (settings.memory_threshold or 1.0) <= 1 or settings.memory_threshold == 0:
            raise SpecError(f"{KEY}.memory_threshold: must be above 0 and at most 1")
        if settings.chunk_size is not None and settings.chunk_size < 1:
            raise SpecError(f"{KEY}.chunk_size: must be at least 1")
        return settings


def _check_names(kind: type[RequestHints | SchedulerSettings | StepCost], value: object) -> None:
    if not isinstance(value, Mapping):
        raise SpecError(f"{KEY}: must be an object, not {type(value).__name__}")
    if unknown := sorted(set(value) - {field.name for field in fields(kind)}):
        raise SpecError(f"{KEY}: has no {', '.join(map(str, unknown))}")
