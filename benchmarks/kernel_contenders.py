"""Who is measured on a step: our kernel, and the attention that others ship.

A baseline gets what its engine gives it, and does before the layers what its engine does before
them. What can't be had on this machine is named with the reason, never left out in silence.
"""

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor

from batchllm_kernels.prefix_attention import (
    AttentionShape,
    BatchLimits,
    PagedBatch,
    StepPlanner,
    prefix_attention,
)
from benchmarks.kernel_workloads import Layer, Step

_MAX_SPLITS_IN_GRAPHS = 32  # vLLM's flash_attn_max_num_splits_for_cuda_graph
_MIN_LAUNCH_GRID = 128  # vLLM's MIN_LAUNCH_GRID_SIZE_2D
_NUM_SEGMENTS = 16  # vLLM's NUM_PAR_SOFTMAX_SEGMENTS
_WORKSPACE_BYTES = 256 << 20


@dataclass(frozen=True, slots=True)
class Prepared:
    """A step's layers, ready to be attended with."""

    calls: list[Callable[[], Tensor]]
    """One for each layer, nothing in it but that layer's attention. Returns its output."""
    token_order: Tensor | None = None
    """[num_tokens]: token of the batch behind each row of an output; None: as in the batch."""

    def output(self, layer: int) -> Tensor:
        """A layer's output, its rows as in the batch."""
        out = self.calls[layer]()
        if self.token_order is None:
            return out
        in_order = torch.empty_like(out)
        in_order[self.token_order] = out
        return in_order


def prepared(
    attend: Callable[..., object], step: Step, layers: Sequence[Layer], **more: Any
) -> Prepared:
    """By one of vLLM's functions, which name a layer's tensors and a step's lengths alike."""
    common = {
        "cu_seqlens_q": step.batch.query_start_loc,
        "max_seqlen_q": max(step.query_lens),
        "seqused_k": step.batch.seq_lens,
        "max_seqlen_k": max(step.seq_lens),
        "softmax_scale": step.shape.head_dim**-0.5,
        "causal": True,
        "block_table": step.batch.block_table,
    }

    def call(layer: Layer) -> Tensor:
        attend(q=layer.q, k=layer.k_cache, v=layer.v_cache, out=layer.out, **common, **more)
        return layer.out

    return Prepared([partial(call, layer) for layer in layers])


class Contender(Protocol):
    """One attention. `prepare` is what happens once a step."""

    name: str

    def prepare(self, step: Step, layers: Sequence[Layer]) -> Prepared: ...


class Ours:
    """`prefix_attention`: planned once, attended with in every layer."""

    name = "ours"

    def __init__(self, shape: AttentionShape, limits: BatchLimits, device: torch.device) -> None:
        self.planner = StepPlanner(shape, limits, impl="triton", device=device)

    def prepare(self, step: Step, layers: Sequence[Layer]) -> Prepared:
        return self.prepare_batch(step.batch, layers)

    def prepare_batch(self, batch: PagedBatch, layers: Sequence[Layer]) -> Prepared:
        plan = self.planner.plan(batch)
        attend = partial(prefix_attention, plan=plan, scale=self.planner.shape.head_dim**-0.5)
        calls = [
            partial(attend, layer.q, layer.k_cache, layer.v_cache, out=layer.out)
            for layer in layers
        ]
        return Prepared(calls)


class FlashAttention3:
    """As vLLM's FlashAttention backend calls it: its schedule made ahead, once a step.

    Args:
        max_num_splits: 0: FlashAttention's own choice, as vLLM has it without CUDA graphs; 32: as
            with full graphs.
    """

    def __init__(self, max_num_splits: int) -> None:
        from vllm.vllm_flash_attn import flash_attn_varlen_func, get_scheduler_metadata

        try:
            from vllm.vllm_flash_attn import is_fa_version_supported
        except ImportError:  # where vLLM 0.25 has it
            from vllm.vllm_flash_attn.flash_attn_interface import is_fa_version_supported
        if not is_fa_version_supported(3):
            raise ImportError("vLLM's FlashAttention 3 doesn't support this device")
        self.name = f"fa3_{max_num_splits}_splits" if max_num_splits else "fa3"
        self._attend: Any = flash_attn_varlen_func
        self._schedule: Any = get_scheduler_metadata
        self._max_num_splits = max_num_splits

    def prepare(self, step: Step, layers: Sequence[Layer]) -> Prepared:
        shape, batch = step.shape, step.batch
        metadata = self._schedule(
            batch_size=batch.num_requests,
            max_seqlen_q=max(step.query_lens),
            max_seqlen_k=max(step.seq_lens),
            num_heads_q=shape.num_q_heads,
            num_heads_kv=shape.num_kv_heads,
            headdim=shape.head_dim,
            cache_seqlens=batch.seq_lens,
            qkv_dtype=layers[0].q.dtype,
            cu_seqlens_q=batch.query_start_loc,
            page_size=shape.block_size,
            causal=True,
            window_size=(-1, -1),
            num_splits=self._max_num_splits,
        )
        return prepared(
            self._attend,
            step,
            layers,
            window_size=[-1, -1],
            softcap=0.0,
            scheduler_metadata=metadata,
            fa_version=3,
            num_splits=self._max_num_splits,
        )


class TritonUnified:
    """vLLM's `unified_attention`, with the buffers that its Triton backend gives it."""

    name = "triton_unified"

    def __init__(self) -> None:
        from vllm.v1.attention.ops.triton_unified_attention import unified_attention

        self._attend: Any = unified_attention
        self._known = set(inspect.signature(unified_attention).parameters)

    def prepare(self, step: Step, layers: Sequence[Layer]) -> Prepared:
        shape = step.shape
        threshold = _MIN_LAUNCH_GRID // shape.num_kv_heads
        padded = 1 << (shape.head_dim - 1).bit_length()
        segments = (threshold, shape.num_q_heads, _NUM_SEGMENTS)
        device = step.batch.seq_lens.device
        for_short_batches: dict[str, Any] = {
            "seq_threshold_3D": threshold,
            "num_par_softmax_segments": _NUM_SEGMENTS,
            "softmax_segm_output": torch.empty(*segments, padded, device=device),
            "softmax_segm_max": torch.empty(segments, device=device),
            "softmax_segm_expsum": torch.empty(segments, device=device),
        }
        more = {name: value for name, value in for_short_batches.items() if name in self._known}
        more |= dict.fromkeys(("q_descale", "k_descale", "v_descale"))
        return prepared(self._attend, step, layers, window_size=(-1, -1), softcap=0, **more)


class FlashInferCascade:
    """FlashInfer's cascade: shared prefixes in one launch, own parts in another, then a merge.

    It wants the queries of a group next to each other. They are given so, and the output is left
    so: putting them in order isn't part of its time.
    """

    name = "flashinfer_cascade"

    def __init__(self, device: torch.device) -> None:
        import flashinfer

        self._wrapper: Any = flashinfer.MultiLevelCascadeAttentionWrapper
        self._workspace = torch.empty(_WORKSPACE_BYTES, dtype=torch.uint8, device=device)

    def prepare(self, step: Step, layers: Sequence[Layer]) -> Prepared:
        shape, device = step.shape, step.batch.seq_lens.device
        size, table = shape.block_size, step.batch.block_table.cpu()
        starts = step.batch.query_start_loc.tolist()
        grouped = {row for prefix in step.prefixes for row in prefix.requests}
        all_groups = [(prefix.requests, prefix.num_tokens // size) for prefix in step.prefixes]
        alone = [((row,), 0) for row in range(step.batch.num_requests) if row not in grouped]
        ends, pages = ([0], [0]), ([0], [0])  # of both levels
        last: tuple[list[int], list[int]] = ([], [])
        blocks: tuple[list[Tensor], list[Tensor]] = ([], [])
        tokens: list[Tensor] = []

        def add(level: int, num_queries: int, row: int, first: int, end: int, used: int) -> None:
            ends[level].append(ends[level][-1] + num_queries)
            pages[level].append(pages[level][-1] + end - first)
            blocks[level].append(table[row, first:end])
            last[level].append(used)

        for rows, num_shared in [*all_groups, *alone]:
            num_queries = sum(step.query_lens[row] for row in rows)
            add(0, num_queries, rows[0], 0, num_shared, size if num_shared else 0)
            for row in rows:
                tokens.append(torch.arange(starts[row], starts[row + 1]))
                length = step.seq_lens[row]
                used = (length - 1) % size + 1
                add(1, step.query_lens[row], row, num_shared, -(-length // size), used)

        def on_device(values: Sequence[int]) -> Tensor:
            return torch.tensor(values, dtype=torch.int32, device=device)

        wrapper = self._wrapper(2, self._workspace, "NHD")
        wrapper.plan(
            [on_device(each) for each in ends],
            [on_device(each) for each in pages],
            [torch.cat(each).to(device) for each in blocks],
            [on_device(each) for each in last],
            shape.num_q_heads,
            shape.num_kv_heads,
            shape.head_dim,
            size,
            causal=True,
            sm_scale=shape.head_dim**-0.5,
            q_data_type=layers[0].q.dtype,
        )
        order = torch.cat(tokens).to(device)

        calls = [
            partial(wrapper.run, layer.q[order], (layer.k_cache, layer.v_cache)) for layer in layers
        ]
        return Prepared(calls, order)


def find_baselines(device: torch.device) -> tuple[list[Contender], dict[str, str]]:
    """Those that this machine has, and why it doesn't have the others, by name."""
    if device.type == "cpu":
        names = ("fa3", "triton_unified", "flashinfer_cascade")
        return [], dict.fromkeys(names, "there is no GPU")
    contenders: list[Contender] = []
    missing: dict[str, str] = {}
    makers: dict[str, Callable[[], Contender]] = {
        "fa3": lambda: FlashAttention3(0),
        f"fa3_{_MAX_SPLITS_IN_GRAPHS}_splits": lambda: FlashAttention3(_MAX_SPLITS_IN_GRAPHS),
        "triton_unified": TritonUnified,
        "flashinfer_cascade": lambda: FlashInferCascade(device),
    }
    for name, make in makers.items():
        try:
            contenders.append(make())
        # Any error while another library loads is the reported reason.
        except Exception as error:  # noqa: BLE001
            missing[name] = f"{type(error).__name__}: {error}"
    return contenders, missing
