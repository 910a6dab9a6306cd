"""Creates vLLM's scheduler, or ours, without an engine."""

import json
import logging
import os
import sys
import tempfile
from pathlib import Path
from typing import Final

# Before the import, in which vLLM reads these and warns of a device that isn't used here.
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
if os.environ["VLLM_LOGGING_LEVEL"].upper() == "ERROR":
    logging.getLogger("vllm").setLevel(logging.ERROR)
# vLLM does without these: they resample audio, decode videos, and compile models.
if _spared := {"scipy.signal", "cv2", "torch._inductor.lowering"} - sys.modules.keys():
    sys.modules.update(dict.fromkeys(_spared))  # type: ignore[arg-type]
    os.environ["TORCHDYNAMO_DISABLE"] = "1"

import torch
from vllm import ModelRegistry
from vllm.config import CacheConfig, DeviceConfig, ModelConfig, SchedulerConfig, VllmConfig
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.structured_output import StructuredOutputManager

from batchllm_operator.simulate.machine import Machine, Policy
from batchllm_operator.vllm_plugin.scheduler.hints import SchedulerSettings
from batchllm_operator.vllm_plugin.scheduler.scheduler import BatchLLMScheduler

for _name in _spared:
    del sys.modules[_name]
os.environ.pop("TORCHDYNAMO_DISABLE", None)


class _Model(torch.nn.Module):
    """A model that is never built; vLLM would start a process to inspect one of its own."""

    forward = embed_input_ids = compute_logits = torch.nn.Module.__call__


ModelRegistry.register_model(_Model.__name__, _Model)
_CONFIG: Final = {
    "architectures": [_Model.__name__],
    "model_type": "llama",
    "max_position_embeddings": 1 << 20,
}


def make_scheduler(
    policy: Policy,
    machine: Machine,
    max_model_len: int,
    settings: SchedulerSettings,
    *,
    async_scheduling: bool = False,
) -> AsyncScheduler:
    """The scheduler that vLLM would make for this policy, with the machine's KV cache.

    Args:
        max_model_len: most tokens of a request.
        settings: of our scheduler.
        async_scheduling: whether a step is scheduled before the previous one has ended.
    """
    config = _config(policy, machine, max_model_len)
    config.additional_config = settings.to_additional_config()
    # A platform may change it.
    config.scheduler_config.async_scheduling = async_scheduling
    config.cache_config.block_size = machine.block_size
    config.cache_config.num_gpu_blocks = machine.num_blocks
    attention = FullAttentionSpec(
        block_size=machine.block_size,
        num_kv_heads=machine.model.num_kv_heads,
        head_size=machine.model.head_size,
        dtype=torch.bfloat16,
    )
    kv_cache_config = KVCacheConfig(
        num_blocks=machine.num_blocks,
        kv_cache_tensors=[],
        kv_cache_groups=[KVCacheGroupSpec(["layer"], attention)],
    )
    kind = BatchLLMScheduler if policy.scheduler == "batchllm" else AsyncScheduler
    return kind(
        vllm_config=config,
        kv_cache_config=kv_cache_config,
        structured_output_manager=StructuredOutputManager(config),
        block_size=machine.block_size,
    )


def _config(policy: Policy, machine: Machine, max_model_len: int) -> VllmConfig:
    most_tokens = machine.max_num_batched_tokens
    if not policy.chunked_prefill:
        most_tokens = max(most_tokens, max_model_len)
    with tempfile.TemporaryDirectory(prefix="batchllm-simulate-") as folder:
        Path(folder, "config.json").write_text(json.dumps(_CONFIG), encoding="utf-8")
        model = ModelConfig(
            model=folder,
            tokenizer=folder,
            skip_tokenizer_init=True,
            dtype="bfloat16",
            max_model_len=max_model_len,
        )
        return VllmConfig(
            model_config=model,
            scheduler_config=SchedulerConfig(
                max_num_seqs=min(machine.max_num_seqs or policy.max_num_seqs, most_tokens),
                max_num_batched_tokens=most_tokens,
                max_model_len=max_model_len,
                enable_chunked_prefill=policy.chunked_prefill,
                is_encoder_decoder=False,
                async_scheduling=False,
            ),
            cache_config=CacheConfig(
                block_size=machine.block_size, enable_prefix_caching=policy.prefix_caching
            ),
            device_config=DeviceConfig("cpu"),
        )
