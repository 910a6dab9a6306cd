"""Prefix-shared attention as a backend of vLLM, one for GPUs and for CPUs.

    vLLM's block tables -> PrefixAttentionBuilder (once a step) -> PrefixAttentionImpl (each layer)

A GPU runs the Triton kernel, and on CUDA vLLM's FlashAttention for prefill; a CPU runs the
reference in plain torch.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor
from vllm.platforms import current_platform
from vllm.v1.attention.backend import AttentionBackend, AttentionImpl, AttentionType, MultipleOf

from batchllm_kernels.prefix_attention import StepPlanner, prefix_attention
from batchllm_kernels.prefix_attention.batch import HEAD_DIMS, MAX_BLOCK_SIZE, MIN_BLOCK_SIZE
from batchllm_kernels.prefix_attention.config import ARCHITECTURES, detect_arch, load_config
from batchllm_operator.vllm_plugin import compat
from batchllm_operator.vllm_plugin.attention.builder import (
    PrefixAttentionBuilder,
    PrefixAttentionMetadata,
    chosen_impl,
    refusal,
)
from batchllm_operator.vllm_plugin.attention.settings import AttentionSettings


class PrefixAttentionImpl(AttentionImpl[PrefixAttentionMetadata]):
    """Attention of one layer.

    Raises:
        SpecError: the layer needs something unsupported; the message names it.
    """

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: int | None = None,
        alibi_slopes: list[float] | None = None,
        sliding_window: int | None = None,
        kv_cache_dtype: str = "auto",
        logits_soft_cap: float | None = None,
        attn_type: str = AttentionType.DECODER,
        kv_sharing_target_layer_name: str | None = None,
        **others: Any,
    ) -> None:
        if alibi_slopes is not None:
            raise refusal("ALiBi")
        if attn_type != AttentionType.DECODER:
            raise refusal(f"attention of the type {attn_type}")
        for name, value in others.items():
            if value is not None and value is not False:
                raise refusal(f"{name} (of a layer's attention)")
        if getattr(self, "dcp_world_size", 1) > 1 or getattr(self, "pcp_world_size", 1) > 1:
            raise refusal("context parallelism")
        if kv_cache_dtype not in PrefixAttentionBackend.supported_kv_cache_dtypes:
            raise refusal(f"kv_cache_dtype {kv_cache_dtype}")
        if kv_cache_dtype == "fp8_e5m2" and current_platform.is_rocm():
            raise refusal("kv_cache_dtype fp8_e5m2 on ROCm, whose caches vLLM writes as e4m3")
        self.num_heads, self.head_size, self.scale = num_heads, head_size, float(scale)
        self.num_kv_heads = num_kv_heads or num_heads
        self.window = sliding_window  # the number of keys that a query sees, its own included
        self.soft_cap = logits_soft_cap or None
        self.kv_cache_dtype = kv_cache_dtype
        self.kv_sharing_target_layer_name = kv_sharing_target_layer_name
        # Set by the builder of the layer's KV cache group: the planner, vLLM's FlashAttention for
        # prefill unless ours computes all rows, and what computes prefill and why, for a log line.
        self.planner: StepPlanner | None = None
        self.flash: Any = None
        self.prefill = ""
        self._fp8 = fp8_dtype(kv_cache_dtype)

    def warm_up(self, kv_cache: Tensor, dtype: torch.dtype) -> None:
        """Compile this layer's kernels for queries of a dtype by a step that changes no tensor."""
        assert self.planner is not None
        k_cache, v_cache = self._caches(kv_cache)
        shape = (1, self.num_heads, self.head_size)
        query = torch.empty(shape, dtype=dtype, device=kv_cache.device)
        self.planner.warm_up(query, k_cache, v_cache, window=self.window, soft_cap=self.soft_cap)

    def _caches(self, kv_cache: Tensor) -> tuple[Tensor, Tensor]:
        k_cache, v_cache = compat.kv_cache_views(kv_cache, self.head_size)
        if self._fp8 is not None:
            k_cache, v_cache = k_cache.view(self._fp8), v_cache.view(self._fp8)
        return k_cache, v_cache

    def forward(
        self,
        layer: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        kv_cache: Tensor,
        attn_metadata: PrefixAttentionMetadata | None,
        output: Tensor,
        output_scale: Tensor | None = None,
        output_block_scale: Tensor | None = None,
    ) -> Tensor:
        """Attend to the cache, which already has the step's keys and values.

        Args:
            layer: holds the scales of an FP8 cache.
            query: [num_tokens, num_heads, head_size]; more tokens than the plan's are padding.
            kv_cache: the layer's, as `compat.kv_cache_views` takes it.
            attn_metadata: the step's; None while vLLM measures memory.
            output: like `query`; written except for padding.

        Returns:
            `output`.

        Raises:
            SpecError: vLLM asks for quantized output.
            UnsupportedError: a tensor's shape, dtype or strides aren't supported.
        """
        if output_scale is not None or output_block_scale is not None:
            raise refusal("outputs that attention is to quantize")
        if attn_metadata is None:
            return output.fill_(0)
        if attn_metadata.plan is not None:
            k_cache, v_cache = self._caches(kv_cache)
            scales = (layer._k_scale_float, layer._v_scale_float) if self._fp8 else (1.0, 1.0)
            prefix_attention(
                query,
                k_cache,
                v_cache,
                attn_metadata.plan,
                scale=self.scale,
                window=self.window,
                soft_cap=self.soft_cap,
                k_scale=scales[0],
                v_scale=scales[1],
                out=output,
            )
        if attn_metadata.prefill is not None:
            rows = slice(attn_metadata.prefill_token, None)
            self.flash.forward(
                layer, query[rows], key, value, kv_cache, attn_metadata.prefill, output[rows]
            )
        return output

    def do_kv_cache_update(
        self, layer: Any, key: Tensor, value: Tensor, kv_cache: Tensor, slot_mapping: Tensor
    ) -> None:
        """Write a step's keys and values, before `forward`: on a GPU by vLLM's operations.

        Args:
            layer: holds the scales of an FP8 cache.
            key: [num_tokens, num_kv_heads, head_size]; tokens after the last slot are padding.
            value: like `key`.
            kv_cache: the layer's.
            slot_mapping: [num_slots], block * block_size + offset of each token; negative ones are
                skipped.
        """
        caches = compat.kv_cache_views(kv_cache, self.head_size)
        scales = (layer._k_scale, layer._v_scale)
        if key.device.type == "cpu":
            for rows, cache, scale in zip((key, value), caches, scales, strict=True):
                _write(rows, cache, slot_mapping, self._fp8, scale)
            return
        if current_platform.is_cuda():
            # FlashAttention's operation takes any strides and both FP8 formats, also before sm89.
            from vllm._custom_ops import reshape_and_cache_flash as write
        else:
            from vllm.v1.attention.ops.triton_reshape_and_cache_flash import (
                triton_reshape_and_cache_flash as write,
            )
        write(key, value, *caches, slot_mapping, self.kv_cache_dtype, *scales)


class PrefixAttentionBackend(AttentionBackend):
    """The backend that vLLM chooses, with what it supports."""

    supported_dtypes: ClassVar[list[torch.dtype]] = [torch.float16, torch.bfloat16]
    supported_kv_cache_dtypes: ClassVar[list[Any]] = [
        *("auto", "float16", "bfloat16"),
        *("fp8", "fp8_e4m3", "fp8_e5m2"),
    ]
    forward_includes_kv_cache_update = False
    # vLLM before 0.30 calls it.
    get_kv_cache_shape = staticmethod(compat.method_of_triton_backend("get_kv_cache_shape"))
    get_kv_cache_stride_order = staticmethod(
        compat.method_of_triton_backend("get_kv_cache_stride_order")
    )

    @staticmethod
    def get_name() -> str:
        """The member of vLLM's enumeration that the backend is registered as."""
        return "CPU_ATTN" if current_platform.is_cpu() else "CUSTOM"

    @staticmethod
    def get_impl_cls() -> type[PrefixAttentionImpl]:
        return PrefixAttentionImpl

    @staticmethod
    def get_builder_cls() -> type[PrefixAttentionBuilder]:
        return PrefixAttentionBuilder

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec: Any = None) -> list[int | MultipleOf]:
        """On a GPU each size by itself, so that vLLM splits larger blocks into one of these."""
        if current_platform.is_cpu():
            return [MultipleOf(1)]
        return list(range(MIN_BLOCK_SIZE, MAX_BLOCK_SIZE + 1, MIN_BLOCK_SIZE))

    @classmethod
    def get_supported_head_sizes(cls) -> list[int]:
        """Supported head sizes; empty for any."""
        return [] if current_platform.is_cpu() else list(HEAD_DIMS)

    @classmethod
    def supports_sliding_window(cls) -> bool:
        return True

    @classmethod
    def supports_compute_capability(cls, capability: Any) -> bool:
        """Whether settings ship for the architecture; on ROCm the builder checks it by name."""
        return not current_platform.is_cuda() or f"sm{capability.to_int()}" in ARCHITECTURES


def fp8_dtype(kv_cache_dtype: str) -> torch.dtype | None:
    """The dtype of an FP8 cache by vLLM's name; None if the cache isn't FP8."""
    if not kv_cache_dtype.startswith("fp8"):
        return None
    is_e5m2 = kv_cache_dtype == "fp8_e5m2"
    dtype: torch.dtype = torch.float8_e5m2 if is_e5m2 else current_platform.fp8_dtype()
    return dtype


def _write(
    rows: Tensor, cache: Tensor, slots: Tensor, fp8: torch.dtype | None, scale: Tensor
) -> None:
    rows = rows[: len(slots)]
    if fp8 is not None:
        limit = torch.finfo(fp8).max  # above it, torch gives NaN; vLLM's operations saturate
        rows = (rows.float() / scale).clamp(-limit, limit).to(fp8).view(torch.uint8)
        cache = cache.view(torch.uint8)
    is_written = slots >= 0
    places, block_size = slots[is_written], cache.shape[1]
    cache[places // block_size, places % block_size] = rows[is_written].to(cache.dtype)


def check_model(vllm_config: Any) -> None:
    """Refuse an unsupported model before it is loaded, by name; vLLM would just fail to start.

    Raises:
        SpecError: the GPU, the model's kind of attention, its head size or its dtype isn't
            supported, or vLLM would run micro-batches.
    """
    model, parallel = vllm_config.model_config, vllm_config.parallel_config
    if parallel.enable_dbo or getattr(parallel, "use_ubatching", False):
        # Micro-batches run on two streams; the planner's buffers are for one.
        raise refusal("micro-batches (enable_dbo, ubatch_size)")
    if model.attn_type == "encoder_only":
        raise refusal("models whose tokens see those after them (encoders)")
    if current_platform.is_cpu():
        return
    capability = current_platform.get_device_capability()
    if capability and not PrefixAttentionBackend.supports_compute_capability(capability):
        known = ", ".join(ARCHITECTURES)
        raise refusal(f"GPUs of sm{capability.to_int()} yet; there are settings for {known}")
    if not PrefixAttentionBackend.supports_head_size(model.get_head_size()):
        raise refusal(f"heads of {model.get_head_size()} elements, only {HEAD_DIMS}")
    if not PrefixAttentionBackend.supports_dtype(model.dtype):
        raise refusal(f"models in {model.dtype}")
    if current_platform.is_rocm() and vllm_config.speculative_config is not None:
        # vLLM's drafters have a fixed list of backends there.
        raise refusal("speculative decoding on ROCm")


@dataclass(frozen=True, slots=True)
class AttentionReport:
    """The attention of one worker's layers."""

    num_ours: int
    """Layers with our attention."""
    others: Sequence[str]
    """Other layers, as "layer: backend"."""
    description: str
    """Of ours, for a log line."""


def report_attention(worker: Any) -> AttentionReport:
    """Report a worker's layers; runs in the worker, through vLLM's `collective_rpc`."""
    config = worker.vllm_config
    num_ours, others, prefill = 0, [], set()
    for name, layer in compat.attention_layers(config):
        backend = layer.get_attn_backend()
        if issubclass(backend, PrefixAttentionBackend):
            num_ours += 1
            prefill.add(layer.impl.prefill)
        else:
            others.append(f"{name}: {backend.get_name()}")
    settings = AttentionSettings.from_additional_config(config.additional_config)
    description = ", ".join([_describe(settings, worker.device), *sorted(prefill)])
    return AttentionReport(num_ours, others, description)


def warm_up_attention(worker: Any) -> None:
    """Compile the kernels of a worker's layers before the first step; runs in the worker, too."""
    config = worker.vllm_config
    for layer in config.compilation_config.static_forward_context.values():
        impl = getattr(layer, "impl", None)
        if isinstance(impl, PrefixAttentionImpl) and impl.planner is not None:
            impl.warm_up(layer.kv_cache, config.model_config.dtype)


def _describe(settings: AttentionSettings, device: Any) -> str:
    arch = detect_arch(device)
    config = load_config(arch)
    if chosen_impl(settings) == "reference":
        return f"in plain torch on {arch}"
    vendor = ARCHITECTURES.get(arch)
    file = f"{vendor}/{arch}.json" if vendor else f"{arch}.json"
    tuned = f"tuned on {config.tuned_on}" if config.tuned_on else "not tuned on a GPU"
    graphs = ", decode in full CUDA graphs" if settings.decode_graphs else ""
    return f"Triton on {arch}, settings {file}, {tuned}{graphs}"
