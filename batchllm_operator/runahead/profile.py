"""Measurements of replicas that compute prefixes together: link rate and prefill steps."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

from batchllm_operator.spec import JobSpec

# No machine leaves these bounds; beyond them, predictions would overflow.
_Seconds = Annotated[float, Field(ge=1e-9, le=1e6)]
_Tokens = Annotated[int, Field(ge=0, lt=1 << 31)]


class ChainProfile(BaseModel):
    """Measurements of one kind of GPU, with one model and one number of replicas."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    chain_profile_version: Literal[1] = 1
    subject: Mapping[str, str]
    """See `chain_subject`."""
    link_bytes_per_s: float = Field(ge=1.0, le=1e15)
    """Rate of the slowest hop between two replicas."""
    steps: tuple[tuple[Annotated[_Tokens, Field(ge=1)], _Tokens, _Seconds], ...]
    """(tokens, cached tokens before them, seconds) of each prefill step."""


def chain_subject(spec: JobSpec) -> dict[str, str]:
    """The subject of a chain's profile, as far as a plan knows it.

    A plan is made without a GPU, so the GPU is the one that the spec names.
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
