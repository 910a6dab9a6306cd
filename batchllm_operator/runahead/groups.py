"""Prefixes that replicas compute together, what an engine can compute of one, and measurements."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Annotated, Any, Final, Literal

from pydantic import BaseModel, ConfigDict, Field

from batchllm_operator.spec import JobSpec

KEY: Final = "kv_transfer_params"  # in `SamplingParams.extra_args`; vLLM passes it to connectors
TRANSFER_CONFIG: Final[Mapping[str, Any]] = {
    "kv_connector": "RunaheadConnector",
    "kv_connector_module_path": "batchllm_operator.runahead.connector",
    "kv_role": "kv_both",
}
"""vLLM's `kv_transfer_config` of a replica."""

Part = Literal["chunk", "fill"]

# No machine leaves these bounds; beyond them, predictions would overflow.
_Seconds = Annotated[float, Field(ge=1e-9, le=1e6)]
_Tokens = Annotated[int, Field(ge=0, lt=1 << 31)]


@dataclass(frozen=True, slots=True)
class ChainLimits:
    """What one engine can compute; only `num_blocks` may differ between the replicas of a chain."""

    block_size: int
    """Tokens of a KV block."""
    num_blocks: int
    """Blocks of the KV cache."""
    max_chunk: int
    """Most tokens of a chunk: those of a step, less one for the fill that starts with it."""
    max_model_len: int


@dataclass(frozen=True, slots=True)
class RunaheadGroup:
    """A prefix that all replicas of a chain prefill together (KV-Runahead, section 4)."""

    group_id: int
    prefix_token_ids: Sequence[int]
    split: tuple[int, ...]
    """Tokens of each replica's chunk. They sum to the prefix; each but the last is a multiple of
    the block size."""

    def reason_against(self, world_size: int, limits: ChainLimits) -> str | None:
        """Why a chain can't compute the group; None if it can."""
        num_tokens, block_size = len(self.prefix_token_ids), limits.block_size
        if len(self.split) != world_size or min(self.split) < 1:
            return (
                f"split in chunks of {self.split} tokens for {world_size} replicas; each replica"
                " computes one"
            )
        if sum(self.split) != num_tokens:
            return f"its chunks have {sum(self.split)} tokens, its prefix {num_tokens}"
        for rank, chunk in enumerate(self.split):
            if chunk % block_size and rank < world_size - 1:
                return (
                    f"chunk {rank} of {chunk} tokens doesn't end with a KV block; every chunk but"
                    f" the last must be a multiple of {block_size} tokens"
                )
            if chunk > limits.max_chunk:
                return (
                    f"chunk {rank} of {chunk} tokens is larger than the {limits.max_chunk} that fit"
                    " a step; over several steps a replica would delay all later ones. Raise"
                    " max_num_batched_tokens, or split over more replicas"
                )
        if num_tokens + 1 > limits.max_model_len:
            most = limits.max_model_len
            return f"{num_tokens} tokens and one more don't fit max_model_len {most}"
        if self.num_blocks(block_size) >= limits.num_blocks:
            return "its prefix fills the KV cache"
        return None

    def num_blocks(self, block_size: int) -> int:
        """KV blocks that the prefix takes on a replica while it is prefilled."""
        return len(self.prefix_token_ids) // block_size + 2  # ends of the chunk and of the fill

    def num_whole(self, block_size: int) -> int:
        """Tokens of the prefix in whole blocks, which a prefix cache holds."""
        return len(self.prefix_token_ids) // block_size * block_size

    def bounds(self, rank: int) -> tuple[int, int]:
        """The replica's chunk: tokens [begin, end) of the prefix."""
        ends = list(accumulate(self.split))
        return ends[rank] - self.split[rank], ends[rank]

    def extents(self, block_size: int) -> list[tuple[int, int]]:
        """The whole blocks [first, last) that each replica computes; none if its chunk ends before
        its first block does."""
        last = len(self.prefix_token_ids) // block_size
        bounds = [self.bounds(rank) for rank in range(len(self.split))]
        return [(begin // block_size, min(end // block_size, last)) for begin, end in bounds]


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
