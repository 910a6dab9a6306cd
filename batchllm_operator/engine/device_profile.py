"""Measured times of a device's steps, where they are kept, and the settings that follow.

The smallest step that computes tokens about as fast as the largest is the chunk size (the "one-time
profiling" of Sarathi-Serve, Sec. 4.3). Times of steps say how far spreading prefill pays.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any, Final, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from batchllm_operator.errors import StorageError
from batchllm_operator.spec import JobSpec
from batchllm_operator.storage import Folder
from batchllm_operator.vllm_plugin.scheduler.hints import StepCost

if TYPE_CHECKING:
    from batchllm_operator.runahead.groups import ChainProfile

_FAST_ENOUGH: Final = 0.97  # of the best rate
_Profile = TypeVar("_Profile", "DeviceProfile", "ChainProfile")
_log = logging.getLogger(__name__)

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


class StoredProfiles:
    """Profiles of devices and of chains of replicas: a JSON file in the lake for each subject."""

    def __init__(self, folder: Folder) -> None:
        self._folder = folder

    @classmethod
    def of(cls, spec: JobSpec) -> StoredProfiles:
        """Those beside a job's plans."""
        return cls(Folder.open(spec.output.staging_folder).child("_batchllm", "profiles"))

    def find(self, kind: type[_Profile], subject: Mapping[str, str]) -> _Profile | None:
        """The profile of a subject; None if there is none or it can't be read."""
        name = f"{profile_key(subject)}.json"
        try:
            profile = kind.model_validate_json(self._folder.read_bytes(name))
        except FileNotFoundError:
            return None
        except (ValidationError, StorageError) as error:
            _log.warning("%s/%s doesn't count: %s", self._folder.uri, name, type(error).__name__)
            return None
        return profile if profile.subject == dict(subject) else None

    def keep(self, profile: DeviceProfile | ChainProfile) -> None:
        """Store a profile, in place of an earlier one of the same subject."""
        try:
            data = profile.model_dump_json(indent=1).encode()
            self._folder.write_bytes(f"{profile_key(profile.subject)}.json", data)
        except StorageError as error:  # it can be measured again
            _log.warning("the device's profile can't be kept: %s", error)


def profile_key(subject: Mapping[str, Any]) -> str:
    """The first 32 hex digits of a subject's digest."""
    return hashlib.sha256(json.dumps(subject, sort_keys=True).encode()).hexdigest()[:32]


def step_sizes(most_tokens: int) -> Sequence[int]:
    """Sizes to measure, ascending: powers of two from 64, and `most_tokens`."""
    sizes = [64 << power for power in range(20) if 64 << power < most_tokens]
    return [*sizes, most_tokens]
