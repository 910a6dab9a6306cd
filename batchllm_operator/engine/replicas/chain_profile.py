"""What was measured of replicas that compute prefixes together: their link, and prefill steps."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

from batchllm_operator.engine.device_profile import profile_key
from batchllm_operator.spec import JobSpec

# What no machine will leave; beyond, predictions would overflow.
_Seconds = Annotated[float, Field(ge=1e-9, le=1e6)]
_Tokens = Annotated[int, Field(ge=0, lt=1 << 31)]


class ChainProfile(BaseModel):
    """Measured on one kind of GPU, with one model and number of replicas."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    chain_profile_version: Literal[1] = 1
    subject: Mapping[str, str]
    """What was measured, see `chain_subject`."""
    device: str
    """What vLLM calls it; for people."""
    link_bytes_per_s: float = Field(ge=1.0, le=1e15)
    """Of the slowest hop between two replicas."""
    steps: tuple[tuple[Annotated[_Tokens, Field(ge=1)], _Tokens, _Seconds], ...]
    """Tokens of a prefill step, tokens before them that are cached, and the seconds it takes."""

    @property
    def key(self) -> str:
        """Names the subject, in hex."""
        return profile_key(self.subject)


def chain_subject(spec: JobSpec) -> dict[str, str]:
    """What a chain's profile is a profile of, as far as a plan knows it.

    A plan is made without a GPU: it takes the spec's word for which one its runs have.
    """
    engine = spec.engine
    return {
        "subject": "chain of replicas",
        "gpu": str(spec.planner.target_gpu),
        "replicas": str(engine.replicas),
        "model": spec.model.path,
        "revision": str(spec.model.revision),
        "dtype": engine.dtype,
        **{
            name: str(engine.extra_args[name])
            for name in ("quantization", "kv_cache_dtype")
            if name in engine.extra_args
        },
    }
