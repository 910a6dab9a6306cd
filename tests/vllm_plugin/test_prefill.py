"""Steps that our kernel and vLLM's FlashAttention share: the same outputs, each with its rows."""

from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support.attention_cases import NAN, AttentionCase, Group, make_case
from support.attention_checks import CPU, MIXED, SHAPE
from support.flash_attention import VarlenReference, common_of, install
from torch import Tensor
from vllm.v1.attention.backends import fa_utils, flash_attn
from vllm.v1.kv_cache_interface import FullAttentionSpec

from batchllm_kernels.prefix_attention import PagedBatch, StepPlanner, prefix_shared_attention
from batchllm_operator.errors import SpecError
from batchllm_operator.vllm_plugin.attention import prefill
from batchllm_operator.vllm_plugin.attention.backend import (
    PrefixAttentionBackend,
    PrefixAttentionImpl,
    report_attention,
)
from batchllm_operator.vllm_plugin.attention.builder import (
    PrefixAttentionBuilder,
    PrefixAttentionMetadata,
)

THRESHOLD = 4
ONES = torch.ones(1)
LAYER = SimpleNamespace(_q_scale=ONES, _k_scale=ONES, _v_scale=ONES)
DECODES = [Group(64, ((5, 1), (70, 1), (0, 1))), Group(0, ((30, 1),))]
PREFILLS = [Group(32, ((0, 40), (3, 7))), Group(0, ((0, 90),))]
AT_THE_THRESHOLD = [Group(48, ((3, 4), (0, 4), (20, 2))), Group(0, ((9, 5), (0, 6), (16, 3)))]
ON_BOTH_SIDES = [Group(64, ((5, 1), (70, 1), (0, 20), (3, 9)))]


@pytest.fixture
def flash(monkeypatch: pytest.MonkeyPatch) -> VarlenReference:
    return install(partial(monkeypatch.setattr, raising=False))


def in_order_of_lengths(case: AttentionCase) -> AttentionCase:
    """The batch with its shortest queries first, as vLLM orders it; padding stays last."""
    starts = case.batch.query_start_loc
    lens = starts.diff()
    order = torch.where(lens == 0, 2**30, lens).argsort(stable=True)
    tokens = torch.cat([torch.arange(int(starts[row]), int(starts[row + 1])) for row in order])
    bounds = torch.cat([starts[:1], lens[order].cumsum(0).int()])
    batch = PagedBatch(bounds, case.batch.seq_lens[order], case.batch.block_table[order])
    return replace(case, batch=batch, q=case.q[tokens])


def make_config(layer: Any, settings: dict[str, Any], drafts: int = 0) -> Any:
    """What the builders read of vLLM's settings, with one layer."""
    mode = SimpleNamespace(has_full_cudagraphs=lambda: False)
    return SimpleNamespace(
        additional_config={"batchllm_attention": settings},
        compilation_config=SimpleNamespace(
            static_forward_context={"layer": SimpleNamespace(num_heads=8, impl=layer)},
            cudagraph_mode=mode,
            max_cudagraph_capture_size=0,
        ),
        scheduler_config=SimpleNamespace(max_num_seqs=16, max_num_batched_tokens=512),
        speculative_config=SimpleNamespace(num_speculative_tokens=drafts) if drafts else None,
        model_config=SimpleNamespace(
            dtype=torch.float32,
            rswa_window=None,
            is_mm_prefix_lm=False,
            hf_config=SimpleNamespace(model_type="llama"),
            get_num_attention_heads=lambda _: 8,
            get_num_kv_heads=lambda _: 2,
            get_head_size=lambda: 64,
        ),
        parallel_config=SimpleNamespace(
            cp_kv_cache_interleave_size=1, decode_context_parallel_size=1
        ),
        cache_config=SimpleNamespace(cache_dtype="auto"),
        attention_config=SimpleNamespace(flash_attn_version=None),
        kernel_config=SimpleNamespace(enable_jit_warmup=False),
    )


def make_spec(dtype: torch.dtype = torch.float32, window: int | None = None) -> FullAttentionSpec:
    return FullAttentionSpec(
        block_size=16, num_kv_heads=2, head_size=64, dtype=dtype, sliding_window=window
    )


def make(
    *, window: int | None = None, soft_cap: float | None = None, drafts: int = 0, **settings: Any
) -> tuple[PrefixAttentionImpl, PrefixAttentionBuilder]:
    """A layer and the builder of its group."""
    layer = PrefixAttentionImpl(
        8, 64, 0.125, num_kv_heads=2, sliding_window=window, logits_soft_cap=soft_cap
    )
    config = make_config(layer, {"decode_threshold": THRESHOLD, **settings}, drafts)
    return layer, PrefixAttentionBuilder(make_spec(window=window), ["layer"], config, CPU)


def cache_of(case: AttentionCase) -> Tensor:
    """The layer's cache, in the shape that the FlashAttention of this vLLM takes."""
    halves = [case.k_cache, case.v_cache]
    has_shapes = hasattr(flash_attn.FlashAttentionBackend, "get_kv_cache_shape")
    if has_shapes and len(PrefixAttentionBackend.get_kv_cache_shape(1, 16, 2, 64)) == 5:
        return torch.stack(halves, dim=1)  # 0.25
    return torch.cat(halves, dim=-1).transpose(1, 2)


def attend(
    impl: PrefixAttentionImpl, case: AttentionCase, metadata: PrefixAttentionMetadata
) -> Tensor:
    """The step's output, NaN before, with three rows of padding that stay NaN."""
    q = torch.cat([case.q, torch.zeros(3, 8, 64)])
    output = torch.full(q.shape, NAN)
    assert impl.forward(LAYER, q, q, q, cache_of(case), metadata, output) is output
    assert output[case.num_tokens :].isnan().all()
    return output[: case.num_tokens]


def expected(case: AttentionCase, **settings: Any) -> Tensor:
    """Plain paged attention of the whole step."""
    caches = case.k_cache, case.v_cache
    return prefix_shared_attention(case.q, *caches, case.batch, [], scale=0.125, **settings)


BATCHES = {
    "decodes": DECODES,
    "prefills": PREFILLS,
    "mixed": [*DECODES, *PREFILLS],
    "at the threshold": AT_THE_THRESHOLD,
    "a group on both sides": ON_BOTH_SIDES,
    "one decode": [Group(0, ((7, 1),))],
    "one prompt": [Group(0, ((0, 33),))],
}


@pytest.mark.parametrize("num_padding", [0, 2])
@pytest.mark.parametrize("name", BATCHES)
def test_each_row_is_computed_once(name: str, num_padding: int, flash: VarlenReference) -> None:
    case = make_case(SHAPE, BATCHES[name], seed=3, num_padding=num_padding)
    case = in_order_of_lengths(case)
    lens = case.batch.query_start_loc.diff().tolist()
    impl, builder = make()
    metadata = builder.build(0, common_of(case.batch, case.num_tokens))
    torch.testing.assert_close(attend(impl, case, metadata), expected(case))
    long = [length for length in lens if length > THRESHOLD]
    assert flash.query_lens == ([[*long, *[0] * num_padding]] if long else [])
    ours = metadata.plan.batch.query_start_loc.diff().tolist() if metadata.plan else []
    assert ours == [length for length in lens if 0 < length <= THRESHOLD] + (
        [] if long else [0] * num_padding
    )


@pytest.mark.parametrize(("window", "soft_cap"), [(20, None), (None, 3.0), (1, 5.0)])
def test_layers_keep_their_window_and_cap(
    window: int | None, soft_cap: float | None, flash: VarlenReference
) -> None:
    case = in_order_of_lengths(make_case(SHAPE, [*DECODES, *PREFILLS], seed=6))
    impl, builder = make(window=window, soft_cap=soft_cap)
    found = attend(impl, case, builder.build(0, common_of(case.batch, case.num_tokens)))
    torch.testing.assert_close(found, expected(case, window=window, soft_cap=soft_cap))
    assert len(flash.query_lens) == 1
    assert builder._flash is not None
    assert builder._flash._builder.aot_sliding_window == ((window or 0) - 1, 0 if window else -1)


def test_short_rows_behind_a_long_one_go_with_it(flash: VarlenReference) -> None:
    case = make_case(SHAPE, [*DECODES, *PREFILLS], seed=8)
    lens = case.batch.query_start_loc.diff().tolist()
    first = next(idx for idx, length in enumerate(lens) if length > THRESHOLD)
    assert 1 in lens[:first]
    assert 1 in lens[first:]
    impl, builder = make()
    metadata = builder.build(0, common_of(case.batch, case.num_tokens))
    torch.testing.assert_close(attend(impl, case, metadata), expected(case))
    assert flash.query_lens == [lens[first:]]


def test_only_rows_that_ours_computes_are_grouped(flash: VarlenReference) -> None:
    case = in_order_of_lengths(make_case(SHAPE, ON_BOTH_SIDES, seed=9))
    plan = make()[1].build(0, common_of(case.batch, case.num_tokens)).plan
    assert plan is not None
    assert plan.prefixes is not None
    assert [(each.requests, each.num_tokens) for each in plan.prefixes] == [((0, 1), 64)]


def test_nothing_waits_for_the_device(
    flash: VarlenReference, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tensors of the device have no data here: reading any of it is an error."""
    case = in_order_of_lengths(make_case(SHAPE, [*DECODES, *PREFILLS], seed=3))
    common = common_of(case.batch, case.num_tokens)
    on_device = {
        name: getattr(common, name).to("meta")
        for name in ("query_start_loc", "seq_lens", "block_table_tensor", "slot_mapping")
    }
    impl, builder = make()
    planned: list[PagedBatch] = []
    monkeypatch.setattr(StepPlanner, "plan", lambda _, batch: planned.append(batch))
    metadata = builder.build(0, replace(common, **on_device))
    attended: list[tuple[int, ...]] = []
    monkeypatch.setattr(
        flash_attn, "flash_attn_varlen_func", lambda **given: attended.append(given["q"].shape)
    )
    q, cache = case.q.to("meta"), torch.empty(30, 2, 16, 128, device="meta")
    layer = SimpleNamespace(**{name: ONES.to("meta") for name in vars(LAYER)})
    impl.forward(layer, q, q, q, cache, metadata, torch.empty_like(q))
    assert [batch.num_requests for batch in planned] == [4]
    assert attended == [(137, 8, 64)]


def test_the_threshold_is_the_gates_unless_chosen(flash: VarlenReference) -> None:
    # 64 in cpu.json; a decode with its drafts is never prefill
    for chosen, drafts, threshold in [(None, 0, 64), (9, 0, 9), (1, 3, 4)]:
        impl, builder = make(decode_threshold=chosen, drafts=drafts)
        assert builder.reorder_batch_threshold == threshold
        assert impl.prefill == f"prefill (more than {threshold} tokens) by vLLM's FlashAttention 2"


@pytest.mark.parametrize(
    ("settings", "dtype", "windows", "named"),
    [
        ({"prefill": "batchllm"}, torch.float32, [None], "as engine.extra_args says"),
        ({}, torch.uint8, [None], "an FP8 cache needs FP8 queries there"),
        ({}, torch.float32, [None, 20], "layers with different windows share a KV cache group"),
        ({"version": None}, torch.float32, [None], "this vLLM has no FlashAttention for the GPU"),
        ({"cuda": False}, torch.float32, [None], "FlashAttention needs CUDA"),
    ],
)
def test_elsewhere_ours_computes_all_rows(
    settings: dict[str, Any],
    dtype: torch.dtype,
    windows: list[int | None],
    named: str,
    flash: VarlenReference,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if "version" in settings:
        monkeypatch.setattr(fa_utils, "get_flash_attn_version", lambda **_: None)
    if "cuda" in settings:
        monkeypatch.setattr(prefill, "current_platform", SimpleNamespace(is_cuda=lambda: False))
    chosen = {name: value for name, value in settings.items() if name == "prefill"}
    impls = [PrefixAttentionImpl(8, 64, 0.125, 2, sliding_window=each) for each in windows]
    config = make_config(impls[0], chosen)
    names = [f"layer {idx}" for idx in range(len(impls))]
    layers = [SimpleNamespace(num_heads=8, impl=impl) for impl in impls]
    config.compilation_config.static_forward_context = dict(zip(names, layers, strict=True))
    builder = PrefixAttentionBuilder(make_spec(dtype), names, config, CPU)
    assert builder.reorder_batch_threshold is None
    assert {impl.prefill for impl in impls} == {f"prefill in the same kernel ({named})"}
    case = in_order_of_lengths(make_case(SHAPE, MIXED, seed=3))
    metadata = builder.build(0, common_of(case.batch, case.num_tokens))
    assert metadata.prefill is None
    assert metadata.plan is not None
    assert metadata.plan.batch.num_requests == case.batch.num_requests
    if not chosen:
        config.additional_config["batchllm_attention"] = {"prefill": "flash_attention"}
        with pytest.raises(SpecError, match="prefill: flash_attention here: "):
            PrefixAttentionBuilder(make_spec(dtype), names, config, CPU)


def test_the_report_says_what_computes_prefill(flash: VarlenReference) -> None:
    impl, builder = make()
    layer = SimpleNamespace(impl=impl, get_attn_backend=lambda: PrefixAttentionBackend)
    config = builder.vllm_config
    config.compilation_config.static_forward_context = {"layer": layer}
    report = report_attention(SimpleNamespace(vllm_config=config, device=CPU))
    assert report.description == (
        "in plain torch on cpu, prefill (more than 4 tokens) by vLLM's FlashAttention 2"
    )
