"""Measurements of a device, and the scheduler's settings that follow from them.

Steps of growing size are timed with made-up prompts. The smallest step that computes tokens about
as fast as the largest is the chunk size (the "one-time profiling" of Sarathi-Serve, Sec. 4.3). From
the times of steps the scheduler derives how far spreading prefill pays.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Final, Literal, Protocol

from pydantic import BaseModel, ConfigDict, Field, field_validator

from batchllm_operator.vllm_plugin.scheduler.hints import StepCost

_FAST_ENOUGH: Final = 0.97  # of the best rate

_Tokens = Annotated[int, Field(ge=1)]
_Seconds = Annotated[float, Field(gt=0, allow_inf_nan=False)]


class DeviceProfile(BaseModel):
    """Measurements of one kind of device, with one model and one set of engine arguments."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    profile_version: Literal[1] = 1
    subject: Mapping[str, str]
    """Device, model, versions and relevant engine arguments."""
    steps: tuple[tuple[_Tokens, _Seconds], ...] = Field(min_length=1)
    """(tokens, seconds) of each step size, ascending."""

    @field_validator("steps")
    @classmethod
    def _check_steps(cls, steps: tuple[tuple[int, float], ...]) -> tuple[tuple[int, float], ...]:
        tokens = [size for size, _ in steps]
        if tokens != sorted(set(tokens)):
            raise ValueError("tokens aren't ascending")
        return steps

    @property
    def key(self) -> str:
        """The subject's key, in hex."""
        return profile_key(self.subject)

    @property
    def chunk_size(self) -> int:
        """Tokens of the smallest step that has about the best rate."""
        rates = {tokens: tokens / seconds for tokens, seconds in self.steps}
        best = max(rates.values())
        return min(tokens for tokens, rate in rates.items() if rate >= _FAST_ENOUGH * best)

    @property
    def step_cost(self) -> StepCost:
        """A line through the two largest steps, with the smallest step's time as a lower bound."""
        least_s = self.steps[0][1]
        if len(self.steps) == 1:
            return StepCost(token_s=0.0, weights_s=least_s, overhead_s=0.0)
        (fewer, fewer_s), (more, more_s) = self.steps[-2:]
        token_s = max(0.0, (more_s - fewer_s) / (more - fewer))
        overhead_s = min(max(0.0, more_s - more * token_s), least_s)
        return StepCost(token_s=token_s, weights_s=least_s - overhead_s, overhead_s=overhead_s)


class ProfileStore(Protocol):
    """Keeps profiles between runs."""

    def find(self, subject: Mapping[str, str]) -> DeviceProfile | None:
        """The profile of a subject; None if there is none or it can't be read."""

    def keep(self, profile: DeviceProfile) -> None:
        """Store a profile, in place of an earlier one of the same subject."""


def profile_key(subject: Mapping[str, Any]) -> str:
    """The first 32 hex digits of a subject's digest."""
    return hashlib.sha256(json.dumps(subject, sort_keys=True).encode()).hexdigest()[:32]


def step_sizes(most_tokens: int) -> Sequence[int]:
    """Sizes to measure, ascending: powers of two from 64, and `most_tokens`."""
    sizes = [64 << power for power in range(20) if 64 << power < most_tokens]
    return [*sizes, most_tokens]
