"""vLLM's KV connector for KV-Runahead: a prefix computed in chunks, by all replicas of a chain.

For each group a replica runs two requests, which the scheduler admits in one step:

- The *chunk* has the prompt up to the end of this replica's chunk. Tokens before it are external:
  vLLM allocates their blocks, and each layer's attention waits for that layer of earlier chunks.
- The *fill*, on all replicas but the last, has the whole prefix and one token more. What later
  replicas compute is written into its blocks, which then enter the prefix cache.

vLLM's scheduler and its worker have a connector each, both in this process.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import vllm
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
)
from vllm.v1.kv_cache_interface import FullAttentionSpec

from batchllm_operator.errors import SpecError
from batchllm_operator.runahead.blocks import KVBlocks
from batchllm_operator.runahead.chain import Chain, Transfer, mark
from batchllm_operator.runahead.groups import ChainLimits, Part, RunaheadGroup
from batchllm_operator.vllm_plugin import compat

if TYPE_CHECKING:
    import torch


@dataclass(slots=True)
class Turn:
    """A group while this replica computes it."""

    group: RunaheadGroup
    rank: int
    block_ids: dict[Part, list[int]] = field(default_factory=dict)
    fill_id: str | None = None
    transfer: Transfer | None = None
    failure: str | None = None
    """Why this replica can't take part."""

    @property
    def last_part(self) -> Part:
        """The request whose blocks get the whole prefix: the last replica needs no fill."""
        return "fill" if self.rank < len(self.group.split) - 1 else "chunk"


@dataclass
class RunaheadMetadata(KVConnectorMetadata):
    """The turn whose chunk is computed in this step."""

    turn: Turn | None = None


class RunaheadConnector(KVConnectorBase_V1):
    """The connector of `TRANSFER_CONFIG`. Does nothing for ordinary requests.

    Attributes:
        turn: in the scheduler, the group whose requests may come.
        chain: in the worker, this replica's chain, once it is open.
        blocks: in the worker, the KV caches.
        writes_first: whether keys and values are in the cache before a layer's attention runs.

    Raises:
        SpecError: the engine's KV can't be passed on.
    """

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        _check_engine(vllm_config, kv_cache_config)
        self.limits = _limits(vllm_config, kv_cache_config)
        self.turn: Turn | None = None
        self.chain: Chain | None = None
        self.blocks: KVBlocks
        self.writes_first = False
        self._step: Turn | None = None
        self._filling: Turn | None = None

    @classmethod
    def requires_piecewise_for_cudagraph(cls, extra_config: dict[str, Any]) -> bool:
        return True  # hooks between the layers

    # In the scheduler

    def get_num_new_matched_tokens(
        self, request: Any, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        turn, part = self.turn, _part(request)
        if turn is None or part is None or part in turn.block_ids or turn.failure is not None:
            return 0, False
        begin, end = turn.group.bounds(turn.rank)
        if part == "chunk":
            return max(begin - num_computed_tokens, 0), False
        if num_computed_tokens < end:
            turn.failure = "the fill doesn't find its chunk"
            return 0, False
        num_missing = turn.group.num_whole(self.limits.block_size) - num_computed_tokens
        return (num_missing, True) if num_missing > 0 else (0, False)

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        turn, part = self.turn, _part(request)
        if turn is None or part is None or part in turn.block_ids:
            return
        turn.block_ids[part] = list(blocks.get_block_ids()[0])
        if part == "fill" and num_external_tokens:
            turn.fill_id = request.request_id

    def build_connector_meta(self, scheduler_output: Any) -> RunaheadMetadata:
        turn = self.turn
        if turn is None or turn.transfer is not None or "chunk" not in turn.block_ids:
            return RunaheadMetadata()
        _, end = turn.group.bounds(turn.rank)
        for new in scheduler_output.scheduled_new_reqs:
            if new.num_computed_tokens + scheduler_output.num_scheduled_tokens[new.req_id] < end:
                turn.failure = "a chunk didn't fit one step"
        if turn.last_part not in turn.block_ids:
            turn.failure = "the fill didn't begin with its chunk"
        block_ids = turn.block_ids.get(turn.last_part, [])
        turn.transfer = Transfer(turn.group.extents(self.limits.block_size), block_ids)
        return RunaheadMetadata(turn)

    def request_finished(
        self, request: Any, block_ids: list[int]
    ) -> tuple[bool, dict[str, Any] | None]:
        return False, None  # nothing else runs before the transfer is over

    # In the worker

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        self.blocks = KVBlocks(kv_caches, self.limits.num_blocks)
        self.writes_first = compat.writes_kv_before_attention(self._vllm_config)

    def bind_connector_metadata(self, connector_metadata: KVConnectorMetadata) -> None:
        super().bind_connector_metadata(connector_metadata)
        # Not in `start_load_kv`: in some steps vLLM calls it after the forward pass.
        assert isinstance(connector_metadata, RunaheadMetadata)
        if (turn := connector_metadata.turn) is None:
            return
        assert turn.transfer is not None
        assert self.chain is not None
        self._step = self._filling = turn
        if turn.failure is not None:
            self.chain.fail(turn.failure)
        turn.transfer.writable = mark(self.blocks.device)
        self.chain.begin(turn.transfer)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        pass

    def wait_for_layer_load(self, layer_name: str) -> None:
        if (layer := self._layer(layer_name)) is None:
            return
        transfer, layer_idx = layer
        assert self.chain is not None
        transfer.wait_for_earlier(layer_idx, self.chain.rank)
        if self.writes_first:
            self._note_written(transfer, layer_idx)

    def save_kv_layer(
        self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **kwargs: Any
    ) -> None:
        if not self.writes_first and (layer := self._layer(layer_name)) is not None:
            self._note_written(*layer)

    def wait_for_save(self) -> None:
        self._step = None

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        """The fill, once nothing more is written; after a fault too, for its KV isn't used."""
        turn = self._filling
        if turn is None or turn.transfer is None or not turn.transfer.is_over:
            return None, None
        self._filling = None
        return None, {turn.fill_id} if turn.fill_id is not None else None

    def shutdown(self) -> None:
        if self.chain is not None:
            self.chain.fail("this replica has left the chain")

    def _layer(self, name: str) -> tuple[Transfer, int] | None:
        """The transfer of this step and the index of a layer; None if nothing is passed on."""
        if self._step is None or self._step.transfer is None:
            return None
        layer_idx = self.blocks.layer_idxs.get(name)
        return (self._step.transfer, layer_idx) if layer_idx is not None else None

    def _note_written(self, transfer: Transfer, layer_idx: int) -> None:
        transfer.note_written(layer_idx, mark(self.blocks.device))

    def fingerprint(self) -> dict[str, Any]:
        """What must be equal on all replicas of a chain, as JSON values by name.

        Causes come before effects, such as attention by AMX in bfloat16. Only in the worker.
        """
        model, blocks = self._vllm_config.model_config, self.blocks
        return {
            "vllm": vllm.__version__,
            "dtype": str(model.dtype),
            "kv_cache_dtype": str(self._vllm_config.cache_config.cache_dtype),
            "block_size": self.limits.block_size,
            "max_chunk": self.limits.max_chunk,
            "device": blocks.device.type,
            "kv_layout": blocks.layout(),
            "attention": compat.attention_kinds(self._vllm_config),
        }


def _part(request: Any) -> Part | None:
    """Which of a turn's requests it is; None for an ordinary request."""
    params = request.kv_transfer_params
    return params.get("runahead") if params else None


def _check_engine(vllm_config: Any, kv_cache_config: Any) -> None:
    cache, groups = vllm_config.cache_config, kv_cache_config.kv_cache_groups
    requirements = {
        "enable_prefix_caching must be on: that is where the KV goes": cache.enable_prefix_caching,
        "a replica must be one worker (tensor, pipeline and context parallel sizes of 1)": (
            vllm_config.parallel_config.world_size == 1
        ),
        "speculative decoding has KV of its own, which isn't passed on": (
            vllm_config.speculative_config is None
        ),
        "scales of FP8 KV that are found while running (calculate_kv_scales) differ by replica": (
            not getattr(cache, "calculate_kv_scales", False)
        ),
        "the model must have attention with full KV in all layers, in one KV cache group": (
            [isinstance(group.kv_cache_spec, FullAttentionSpec) for group in groups] == [True]
        ),
    }
    for requirement, is_met in requirements.items():
        if not is_met:
            raise SpecError(f"runahead: {requirement}")


def _limits(vllm_config: Any, kv_cache_config: Any) -> ChainLimits:
    scheduler = vllm_config.scheduler_config
    threshold = int(scheduler.long_prefill_token_threshold or 0)
    most = int(scheduler.max_num_batched_tokens) - 1
    return ChainLimits(
        block_size=int(kv_cache_config.kv_cache_groups[0].kv_cache_spec.block_size),
        num_blocks=int(kv_cache_config.num_blocks),
        max_chunk=min(most, threshold) if threshold > 0 else most,
        max_model_len=int(vllm_config.model_config.max_model_len),
    )
