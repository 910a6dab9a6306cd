"""Data of KV-Runahead: the chain of replicas, and the groups that they prefill together.

KV-Runahead (Cho et al., 2024, section 4) cuts a prefix into one chunk per replica. Replica i of p
computes chunk i against the KV of the earlier chunks, which it gets from replica i - 1, and passes
all of it on. Settings are in vLLM's `kv_connector_extra_config`, a request's part in
`SamplingParams.extra_args`; both are plain JSON.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from itertools import accumulate
from typing import Any, Final, Literal, TypeVar

import numpy as np

from batchllm_operator.errors import SpecError

KEY: Final = "kv_transfer_params"
"""Key in `SamplingParams.extra_args`; vLLM passes its value to connectors with the request."""
CONNECTOR: Final = "RunaheadConnector"
MODULE: Final = "batchllm_operator.vllm_plugin.runahead.connector"
_NAME: Final = "runahead"

Part = Literal["chunk", "fill"]


@dataclass(frozen=True, slots=True)
class ChainSettings:
    """A replica's place in a chain, and how it finds the others. Times are in seconds."""

    rank: int
    """Of this replica, from 0, in the order of the chunks."""
    world_size: int
    """Replicas in the chain, p."""
    store: str
    """Rendezvous: "file:///path" on a disk that all share; for one start of the chain."""
    connect_timeout_s: float = 600.0
    """Longest wait for the other replicas to connect."""
    start_timeout_s: float = 300.0
    """Longest wait for a group's first layer."""
    layer_timeout_s: float = 60.0
    """Longest wait between two layers."""

    def __post_init__(self) -> None:
        for name in ("rank", "world_size"):
            _check_int(name, getattr(self, name))
        if self.world_size < 2:
            raise SpecError(f"{_NAME}.world_size: must be at least 2, not {self.world_size}")
        if not 0 <= self.rank < self.world_size:
            raise SpecError(
                f"{_NAME}.rank: must be from 0 to {self.world_size - 1}, not {self.rank}"
            )
        if not isinstance(self.store, str) or not self.store.startswith("file:///"):
            raise SpecError(f"{_NAME}.store: must be file:///path")
        for name in ("connect_timeout_s", "start_timeout_s", "layer_timeout_s"):
            value = getattr(self, name)
            if not isinstance(value, int | float) or isinstance(value, bool) or not value > 0:
                raise SpecError(f"{_NAME}.{name}: must be a number above 0, not {value!r}")

    def to_kv_transfer_config(self) -> dict[str, Any]:
        """For vLLM's `kv_transfer_config`.

        A load that fails ends its request, and its blocks leave the prefix cache at once.
        """
        return {
            "kv_connector": CONNECTOR,
            "kv_connector_module_path": MODULE,
            "kv_role": "kv_both",
            "kv_load_failure_policy": "fail",
            "kv_connector_extra_config": asdict(self),
        }

    @classmethod
    def from_extra_config(cls, config: Mapping[str, Any]) -> ChainSettings:
        """The settings from `to_kv_transfer_config`.

        Raises:
            SpecError: `config` isn't valid.
        """
        return _from_json(cls, config)


@dataclass(frozen=True, slots=True)
class ChainLimits:
    """Limits of one engine; the handshake makes sure that all replicas of a chain have the same."""

    block_size: int
    """Tokens of a KV block."""
    num_blocks: int
    """Blocks of the KV cache."""
    max_step_tokens: int
    """Most tokens of one request that a step may compute."""
    max_model_len: int


@dataclass(frozen=True, slots=True)
class RunaheadGroup:
    """A prefix that all replicas of a chain prefill together."""

    group_id: int
    """From 0; all replicas take groups in the same order, and no two have the same id."""
    prefix_token_ids: Sequence[int]
    split: tuple[int, ...]
    """Tokens of each replica's chunk. They sum to the prefix; each but the last is a multiple of
    the block size."""

    def check(self, world_size: int, limits: ChainLimits) -> None:
        """Check that a chain can compute the group, before anything is sent.

        Raises:
            SpecError: it can't; the message says why.
        """
        where, block_size = f"{_NAME} group {self.group_id}", limits.block_size
        if not 0 <= self.group_id < 1 << 62:
            raise SpecError(f"{where}: its id must be at least 0, and below 2^62")
        _check_split(where, self.split)
        num_tokens = len(self.prefix_token_ids)
        if len(self.split) != world_size:
            raise SpecError(
                f"{where}: split in {len(self.split)} chunks for {world_size} replicas; each"
                " replica computes one"
            )
        if sum(self.split) != num_tokens:
            raise SpecError(
                f"{where}: its chunks have {sum(self.split)} tokens, its prefix {num_tokens}"
            )
        for rank, chunk in enumerate(self.split):
            if chunk % block_size and rank < world_size - 1:
                raise SpecError(
                    f"{where}: chunk {rank} of {chunk} tokens doesn't end with a KV block; every"
                    f" chunk but the last must be a multiple of {block_size} tokens"
                )
            if chunk > limits.max_step_tokens:
                raise SpecError(
                    f"{where}: chunk {rank} of {chunk} tokens is larger than a step of"
                    f" {limits.max_step_tokens}; over several steps a replica would delay all"
                    " later ones. Raise max_num_batched_tokens, or split over more replicas"
                )
        if num_tokens + 1 > limits.max_model_len:
            raise SpecError(
                f"{where}: {num_tokens} tokens and one more don't fit max_model_len"
                f" {limits.max_model_len}"
            )

    def num_blocks(self, block_size: int) -> int:
        """KV blocks that the prefix takes on a replica while it is prefilled."""
        return len(self.prefix_token_ids) // block_size + 2  # ends of the chunk and of the fill

    def share(self, part: Part) -> RunaheadShare:
        """The share for one of this group's requests."""
        return RunaheadShare(self.group_id, self.split, prefix_digest(self.prefix_token_ids), part)


@dataclass(frozen=True, slots=True)
class RunaheadShare:
    """A request's part in a group: the chunk that its replica computes, or the fill.

    The request for the chunk has the prompt up to the chunk's end. The fill receives what later
    replicas have computed, in whole blocks, and has one token more.
    """

    group_id: int
    split: tuple[int, ...]
    digest: int
    """`prefix_digest` of the whole prefix."""
    part: Part

    def __post_init__(self) -> None:
        _check_int("group_id", self.group_id)
        _check_int("digest", self.digest)
        object.__setattr__(self, "split", tuple(self.split))  # JSON has lists
        _check_split(f"{_NAME} group {self.group_id}", self.split)
        if self.part not in ("chunk", "fill"):
            raise SpecError(f"{KEY}.part: must be chunk or fill, not {self.part!r}")

    def to_extra_args(self) -> dict[str, Any]:
        """For `SamplingParams.extra_args`."""
        return {KEY: {_NAME: asdict(self) | {"split": list(self.split)}}}

    @classmethod
    def from_params(cls, params: Mapping[str, Any] | None) -> RunaheadShare | None:
        """The share that `to_extra_args` put into a request's `kv_transfer_params`; None if absent.

        Raises:
            SpecError: it isn't what `to_extra_args` makes.
        """
        if not params or _NAME not in params:
            return None
        return _from_json(cls, params[_NAME])

    def bounds(self, rank: int, block_size: int) -> ShareBounds:
        """The bounds of a replica's part, in tokens of the prefix."""
        ends = list(accumulate(self.split))
        begin = ends[rank - 1] if rank else 0
        whole = ends[-1] // block_size * block_size
        return ShareBounds(begin, ends[rank], whole, rank == len(ends) - 1)


@dataclass(frozen=True, slots=True)
class ShareBounds:
    """A replica's part of a prefix: [begin, end) is its chunk, [0, whole) fills whole blocks."""

    begin: int
    end: int
    whole: int
    """Tokens of the prefix in whole blocks, which a prefix cache holds."""
    is_last: bool

    @property
    def received(self) -> tuple[int, int]:
        """Tokens received from later replicas: [end, whole)."""
        return min(self.end, self.whole), self.whole

    @property
    def returned(self) -> tuple[int, int]:
        """Tokens sent back to the previous replica: [begin, whole)."""
        return self.begin, self.whole


def prefix_digest(token_ids: Sequence[int]) -> int:
    """63 bits of a hash of the ids, the same on all machines."""
    digest = hashlib.sha256(np.asarray(token_ids, dtype="<i8").tobytes()).digest()
    return int.from_bytes(digest[:8], "little") >> 1


def _check_int(name: str, value: object) -> None:
    if not isinstance(value, int) or isinstance(value, bool):
        raise SpecError(f"{_NAME}.{name}: must be an integer, not {value!r}")


def _check_split(where: str, split: Sequence[object]) -> None:
    for chunk in split:
        if not isinstance(chunk, int) or isinstance(chunk, bool) or chunk < 1:
            raise SpecError(f"{where}: a chunk must be at least one token, not {chunk!r}")


_Settings = TypeVar("_Settings", ChainSettings, RunaheadShare)


def _from_json(kind: type[_Settings], value: object) -> _Settings:
    if not isinstance(value, Mapping):
        raise SpecError(f"{_NAME}: must be an object, not {type(value).__name__}")
    if unknown := sorted(set(value) - {field.name for field in fields(kind)}):
        raise SpecError(f"{_NAME}: has no {', '.join(map(str, unknown))}")
    try:
        return kind(**value)
    except TypeError as error:
        raise SpecError(f"{_NAME}: {error}") from error
