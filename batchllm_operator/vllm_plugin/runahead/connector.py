"""vLLM's KV connector for KV-Runahead: a prefix computed in chunks, by all replicas of a chain.

For each group a replica runs two requests (`plan.RunaheadShare`):

- The *chunk* has the prompt up to the end of this replica's chunk. The scheduler treats the tokens
  before the chunk as external, so it allocates their blocks and computes only the chunk. Each
  layer's attention waits for that layer of the earlier KV, which the previous replica sends, and
  passes all of it on as soon as this replica's own keys and values are written.
- The *fill* receives what later replicas compute, while this one computes or waits: the last one
  sends each layer back up the chain. It shares the chunk's blocks, and its own blocks enter the
  prefix cache when they are complete.

The scheduler's half and the worker's half are two objects, perhaps in two processes.
`RunaheadMetadata` carries the work of a step from one to the other.
"""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, Any, Final

import vllm
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
)
from vllm.v1.kv_cache_interface import FullAttentionSpec

from batchllm_operator.errors import SpecError
from batchllm_operator.vllm_plugin import compat
from batchllm_operator.vllm_plugin.runahead.blocks import KVBlocks
from batchllm_operator.vllm_plugin.runahead.plan import ChainLimits, ChainSettings
from batchllm_operator.vllm_plugin.runahead.scheduling import (
    RunaheadConnectorScheduler,
    RunaheadMetadata,
)
from batchllm_operator.vllm_plugin.runahead.working import RunaheadConnectorWorker

if TYPE_CHECKING:
    import torch

_WEIGHT_SAMPLES: Final = 64


class RunaheadConnector(KVConnectorBase_V1):
    """The connector of `ChainSettings.to_kv_transfer_config`. Does nothing for ordinary requests.

    Raises:
        SpecError: the settings are wrong, or the engine's KV can't be passed on.
    """

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self.settings = ChainSettings.from_extra_config(
            vllm_config.kv_transfer_config.kv_connector_extra_config
        )
        _check_engine(vllm_config, kv_cache_config)
        self.limits = _limits(vllm_config, kv_cache_config)
        self.scheduling = RunaheadConnectorScheduler(self.settings, self.limits)
        self.working = RunaheadConnectorWorker(self.limits)

    @classmethod
    def requires_piecewise_for_cudagraph(cls, extra_config: dict[str, Any]) -> bool:
        return True  # hooks between the layers

    # In the scheduler

    def get_num_new_matched_tokens(
        self, request: Any, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        return self.scheduling.match(request, num_computed_tokens)

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        self.scheduling.on_blocks(request, blocks.get_block_ids()[0], num_external_tokens)

    def build_connector_meta(self, scheduler_output: Any) -> RunaheadMetadata:
        return self.scheduling.next_step(scheduler_output)

    def update_connector_output(self, connector_output: Any) -> None:
        self.scheduling.on_loaded(connector_output.finished_recving or ())

    def request_finished(
        self, request: Any, block_ids: list[int]
    ) -> tuple[bool, dict[str, Any] | None]:
        return self.scheduling.on_finished(request), None

    # In the worker

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        self.working.blocks = KVBlocks(
            {name: compat.as_kv_cache(cache) for name, cache in kv_caches.items()},
            self.limits.num_blocks,
        )
        self.working.writes_first = compat.writes_kv_before_attention(self._vllm_config)

    def bind_connector_metadata(self, connector_metadata: KVConnectorMetadata) -> None:
        super().bind_connector_metadata(connector_metadata)
        # Not in `start_load_kv`: in some steps vLLM calls it after the forward pass.
        assert isinstance(connector_metadata, RunaheadMetadata)
        self.working.begin_step(connector_metadata)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        pass

    def wait_for_layer_load(self, layer_name: str) -> None:
        self.working.before_attention(layer_name)

    def save_kv_layer(
        self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **kwargs: Any
    ) -> None:
        self.working.after_attention(layer_name)

    def wait_for_save(self) -> None:
        self.working.end_step()

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        return self.working.take_finished(finished_req_ids)

    def get_block_ids_with_load_errors(self) -> set[int]:
        return self.working.take_invalid_blocks()

    def shutdown(self) -> None:
        self.working.close()


def _check_engine(vllm_config: Any, kv_cache_config: Any) -> None:
    parallel, cache = vllm_config.parallel_config, vllm_config.cache_config
    groups = kv_cache_config.kv_cache_groups
    policy = vllm_config.kv_transfer_config.kv_load_failure_policy
    reasons = {
        "kv_load_failure_policy must be fail: with recompute, blocks that a failed load left empty"
        " stay in the prefix cache until they are computed again, and others hit them": (
            policy != "fail"
        ),
        "enable_prefix_caching must be on: that is where the KV goes": (
            not cache.enable_prefix_caching
        ),
        "a replica must be one worker (tensor, pipeline and context parallel sizes of 1)": (
            parallel.world_size != 1
        ),
        "speculative decoding has KV of its own, which isn't passed on": (
            vllm_config.speculative_config is not None
        ),
        "scales of FP8 KV that are found while running (calculate_kv_scales) differ by replica": (
            bool(getattr(cache, "calculate_kv_scales", False))
        ),
        "the model must have attention with full KV in all layers, in one KV cache group": (
            len(groups) != 1 or not isinstance(groups[0].kv_cache_spec, FullAttentionSpec)
        ),
    }
    for reason, is_met in reasons.items():
        if is_met:
            raise SpecError(f"runahead: {reason}")


def _limits(vllm_config: Any, kv_cache_config: Any) -> ChainLimits:
    scheduler = vllm_config.scheduler_config
    threshold = int(scheduler.long_prefill_token_threshold or 0)
    most = int(scheduler.max_num_batched_tokens)
    return ChainLimits(
        block_size=int(kv_cache_config.kv_cache_groups[0].kv_cache_spec.block_size),
        num_blocks=int(kv_cache_config.num_blocks),
        max_step_tokens=min(most, threshold) if threshold > 0 else most,
        max_model_len=int(vllm_config.model_config.max_model_len),
    )


def fingerprint(vllm_config: Any, working: RunaheadConnectorWorker, weights: str) -> dict[str, Any]:
    """What must be equal on all replicas of a chain, as JSON values by name.

    Causes come before their effects. A CPU with AMX uses it for attention if
    `dtype` is bfloat16, so engines with different dtypes differ in both.

    Args:
        vllm_config: the engine's.
        working: after the KV caches have been registered.
        weights: a digest of them.
    """
    model, blocks = vllm_config.model_config, working.blocks
    assert blocks is not None
    attention = compat.attention_by_layer(vllm_config)
    return {
        "vllm": vllm.__version__,
        "dtype": str(model.dtype),
        "kv_cache_dtype": str(vllm_config.cache_config.cache_dtype),
        "block_size": working.limits.block_size,
        "max_model_len": working.limits.max_model_len,
        "max_step_tokens": working.limits.max_step_tokens,
        "device": blocks.device.type,
        "model": hashlib.sha256(model.hf_config.to_json_string().encode()).hexdigest()[:16],
        "weights": weights,
        "kv_layout": blocks.layout(),
        "attention": sorted(set(attention.values())),
    }


def weights_digest(worker: Any) -> str:
    """A digest of the weights; runs in the worker, through `collective_rpc`.

    It covers a few evenly spaced elements of each parameter.
    """
    digest = hashlib.sha256()
    for name, parameter in sorted(worker.get_model().named_parameters()):
        flat = parameter.detach().reshape(-1)
        sample = flat[:: max(1, flat.numel() // _WEIGHT_SAMPLES)].float().cpu()
        digest.update(f"{name} {tuple(parameter.shape)} {parameter.dtype}".encode())
        digest.update(sample.numpy().tobytes())
    return digest.hexdigest()[:16]
