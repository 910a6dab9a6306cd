"""Our backend as vLLM calls it, without an engine: caches, plans, and what is refused."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support.flash_attention import common_of
from torch import Tensor
from vllm.v1.attention.backend import AttentionCGSupport, CommonAttentionMetadata
from vllm.v1.kv_cache_interface import FullAttentionSpec

from batchllm_kernels.prefix_attention import PagedBatch, UnsupportedError
from batchllm_operator.errors import SpecError
from batchllm_operator.vllm_plugin import compat
from batchllm_operator.vllm_plugin.attention import backend as attention
from batchllm_operator.vllm_plugin.attention.backend import (
    PrefixAttentionBackend,
    PrefixAttentionImpl,
    fp8_dtype,
    warm_up_attention,
)
from batchllm_operator.vllm_plugin.attention.builder import PrefixAttentionBuilder, layer_shape

BLOCK_SIZE, HEADS, KV_HEADS, HEAD_SIZE, NUM_BLOCKS = 16, 4, 2, 64, 12
CPU = torch.device("cpu")
LAYER = SimpleNamespace(
    _k_scale=torch.tensor(0.5),
    _v_scale=torch.tensor(0.25),
    _k_scale_float=0.5,
    _v_scale_float=0.25,
    num_heads=HEADS,
    impl=SimpleNamespace(planner=None),
)
LAYOUTS = ("heads first", "tokens first")


def make_cache(layout: str, dtype: torch.dtype = torch.float32) -> Tensor:
    """A cache full of NaN (zeros for bytes), in one of vLLM's orders in memory: HND or NHD."""
    fill = 0 if dtype == torch.uint8 else float("nan")
    if layout == "heads first":
        return torch.full((NUM_BLOCKS, KV_HEADS, BLOCK_SIZE, 2 * HEAD_SIZE), fill, dtype=dtype)
    size = (NUM_BLOCKS, BLOCK_SIZE, KV_HEADS, 2 * HEAD_SIZE)
    return torch.full(size, fill, dtype=dtype).transpose(1, 2)


def make_builder(impl: str | None = None, **changes: Any) -> PrefixAttentionBuilder:
    """A builder for one group of one layer; `changes` are for what is known of vLLM's settings."""
    settings = {"impl": impl} if impl else {}
    given = {
        "additional_config": {"batchllm_attention": settings},
        "compilation_config": SimpleNamespace(static_forward_context={"layer": LAYER}),
        "scheduler_config": SimpleNamespace(max_num_seqs=8, max_num_batched_tokens=64),
        "speculative_config": None,
        "model_config": SimpleNamespace(dtype=torch.float32),
        "cache_config": SimpleNamespace(),
        **changes,
    }
    spec = given.pop("spec", None) or make_spec()
    return PrefixAttentionBuilder(spec, ["layer"], SimpleNamespace(**given), CPU)


def make_spec(dtype: torch.dtype = torch.float32, **changes: Any) -> FullAttentionSpec:
    given = {"block_size": BLOCK_SIZE, "num_kv_heads": KV_HEADS, "head_size": HEAD_SIZE}
    return FullAttentionSpec(dtype=dtype, **{**given, **changes})


def make_impl(**changes: Any) -> PrefixAttentionImpl:
    given = {"num_heads": HEADS, "head_size": HEAD_SIZE, "scale": HEAD_SIZE**-0.5}
    return PrefixAttentionImpl(**{**given, "num_kv_heads": KV_HEADS, **changes})


def ints(values: Any) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


# Two requests that share two blocks, one with a chunk of two, one that is padding. A step later,
# everything but the last tokens has been computed.
TABLE = [[3, 7, 1, 0], [3, 7, 9, 0], [5, 2, 11, 4], [0, 0, 0, 0]]
LENGTHS, QUERIES = [40, 37, 50, 0], [1, 1, 2, 0]


def make_step(**changes: Any) -> CommonAttentionMetadata:
    starts = ints([0, *torch.tensor(QUERIES).cumsum(0).tolist()])
    slots = []
    for blocks, length, query in zip(TABLE, LENGTHS, QUERIES, strict=True):
        for at in range(length - query, length):
            slots.append(blocks[at // BLOCK_SIZE] * BLOCK_SIZE + at % BLOCK_SIZE)
    batch = PagedBatch(starts, ints(LENGTHS), ints(TABLE))
    return common_of(batch, sum(QUERIES), **{"slot_mapping": torch.tensor(slots), **changes})


def fill(impl: PrefixAttentionImpl, cache: Tensor) -> tuple[Tensor, Tensor]:
    """Write keys and values of all contexts, as steps would have; returns them by block."""
    generator = torch.Generator().manual_seed(1)
    shape = (NUM_BLOCKS * BLOCK_SIZE, KV_HEADS, HEAD_SIZE)
    keys, values = (torch.randn(shape, generator=generator) for _ in range(2))
    used = [
        blocks[at // BLOCK_SIZE] * BLOCK_SIZE + at % BLOCK_SIZE
        for blocks, length in zip(TABLE, LENGTHS, strict=True)
        for at in range(length)
    ]
    slots = torch.tensor(sorted(set(used)))
    rows = torch.cat([slots, slots[:3]])  # behind the slots, padding
    impl.do_kv_cache_update(LAYER, keys[rows], values[rows], cache, slots)
    return keys, values


def expected(q: Tensor, keys: Tensor, values: Tensor, window: int | None = None) -> Tensor:
    """Attention of each query token on its own, in double precision."""
    rows, token = [], 0
    for blocks, length, query in zip(TABLE, LENGTHS, QUERIES, strict=True):
        for position in range(length - query, length):
            first = 0 if window is None else max(0, position - window + 1)
            slots = [
                blocks[at // BLOCK_SIZE] * BLOCK_SIZE + at % BLOCK_SIZE
                for at in range(first, position + 1)
            ]
            k, v = (each[slots].double().repeat_interleave(2, dim=1) for each in (keys, values))
            scores = torch.einsum("hd,shd->hs", q[token].double(), k) * HEAD_SIZE**-0.5
            rows.append(torch.einsum("hs,shd->hd", scores.softmax(-1), v))
            token += 1
    return torch.stack(rows).float()


def queries(num_padding: int = 3) -> Tensor:
    generator = torch.Generator().manual_seed(2)
    return torch.randn(sum(QUERIES) + num_padding, HEADS, HEAD_SIZE, generator=generator)


def attend(impl: PrefixAttentionImpl, cache: Tensor, kernel: str | None = None, **spec: Any) -> Any:
    """Output of the step's tokens; the padding behind them must stay as it was."""
    metadata = make_builder(kernel, spec=make_spec(**spec)).build(0, make_step())
    q = queries()
    output = torch.full_like(q, 7.0)
    assert impl.forward(LAYER, q, q, q, cache, metadata, output) is output
    assert (output[sum(QUERIES) :] == 7.0).all()
    return output[: sum(QUERIES)]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("window", [None, 20])
def test_what_is_written_is_attended_to_in_every_layout(layout: str, window: int | None) -> None:
    impl, cache = make_impl(sliding_window=window), make_cache(layout)
    keys, values = fill(impl, cache)
    found = attend(impl, cache)
    torch.testing.assert_close(found, expected(queries(), keys, values, window))


@pytest.mark.parametrize("name", ["fp8", "fp8_e4m3", "fp8_e5m2"])
def test_fp8_caches(name: str) -> None:
    impl, cache = make_impl(kv_cache_dtype=name), make_cache("tokens first", torch.uint8)
    keys, values = fill(impl, cache)
    fp8 = fp8_dtype(name)
    assert fp8 is not None

    def stored(rows: Tensor, scale: float) -> Tensor:
        return (rows / scale).to(fp8).float() * scale

    found = attend(impl, cache, dtype=torch.uint8)
    exact = expected(queries(), stored(keys, 0.5), stored(values, 0.25))
    torch.testing.assert_close(found, exact)


def test_fp8_stays_within_its_range() -> None:
    impl, cache = make_impl(kv_cache_dtype="fp8"), make_cache("tokens first", torch.uint8)
    rows = torch.full((1, KV_HEADS, HEAD_SIZE), 1e6)
    impl.do_kv_cache_update(LAYER, rows, -rows, cache, torch.tensor([5]))
    for view, limit in zip(compat.kv_cache_views(cache, HEAD_SIZE), (448.0, -448.0), strict=True):
        assert (view.view(torch.float8_e4m3fn)[0, 5].float() == limit).all()


def test_tokens_without_a_slot_are_not_written() -> None:
    impl, cache = make_impl(), make_cache("heads first")
    rows = torch.ones(3, KV_HEADS, HEAD_SIZE)
    impl.do_kv_cache_update(LAYER, rows, rows, cache, torch.tensor([17, -1, -1]))
    keys, _ = compat.kv_cache_views(cache, HEAD_SIZE)
    assert (keys[1, 1] == 1).all()
    assert int((~keys.isnan()).sum()) == KV_HEADS * HEAD_SIZE


def test_a_cache_of_another_shape_is_named() -> None:
    with pytest.raises(ValueError, match=r"shape \(3, 4, 5\) isn't known"):
        compat.kv_cache_views(torch.zeros(3, 4, 5), HEAD_SIZE)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_gpus_kernel_gives_the_same_in_tritons_interpreter(layout: str) -> None:
    pytest.importorskip("triton", reason="no Triton beside this vLLM")
    impl, cache = make_impl(), make_cache(layout)
    keys, values = fill(impl, cache)
    found = attend(impl, cache, "triton")
    torch.testing.assert_close(found, expected(queries(), keys, values), atol=1e-3, rtol=1e-3)


def test_while_memory_is_measured_nothing_is_attended_to() -> None:
    output = torch.full((2, HEADS, HEAD_SIZE), 7.0)
    make_impl().forward(LAYER, output, output, output, torch.zeros(0), None, output)
    assert (output == 0).all()


def test_a_step_to_capture_has_short_contexts() -> None:
    step = make_step(query_start_loc=ints([0, 1, 2, 3, 4]), num_actual_tokens=4, max_query_len=1)
    plan = make_builder().build_for_cudagraph_capture(step).plan
    assert plan is not None
    assert plan.batch.seq_lens.tolist() == step.seq_lens.tolist() == [1, 1, 1, 1]


@pytest.mark.parametrize(
    ("settings", "cache", "level"),
    [
        ({}, {}, AttentionCGSupport.NEVER),
        ({"decode_graphs": True}, {}, AttentionCGSupport.UNIFORM_SINGLE_TOKEN_DECODE),
        ({"decode_graphs": True}, {"calculate_kv_scales": True}, AttentionCGSupport.NEVER),
    ],
)
def test_decode_is_captured_only_if_it_is_asked_for(
    settings: dict[str, Any], cache: dict[str, Any], level: AttentionCGSupport
) -> None:
    config = SimpleNamespace(
        additional_config={"batchllm_attention": settings}, cache_config=SimpleNamespace(**cache)
    )
    assert PrefixAttentionBuilder.get_cudagraph_support(config, None) is level


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ({"alibi_slopes": [1.0] * HEADS}, "ALiBi"),
        ({"attn_type": "encoder_only"}, "type encoder_only"),
        ({"attn_type": "encoder_decoder"}, "type encoder_decoder"),
        ({"sinks": torch.zeros(HEADS)}, "sinks"),
        ({"kv_cache_dtype": "int8_per_token_head"}, "kv_cache_dtype int8_per_token_head"),
        ({"chunk_lookback": 3}, "chunk_lookback"),
    ],
)
def test_layers_that_are_not_taken_are_refused_by_name(given: dict[str, Any], named: str) -> None:
    with pytest.raises(SpecError, match=f"batchllm doesn't take .*{named}.*: stock does"):
        make_impl(**given)
    make_impl(sinks=None)  # as layers without sinks say


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"spec": make_spec(head_size=48), "impl": "triton"}, "head_dim is 48"),
        ({"spec": make_spec(block_size=256), "impl": "triton"}, "block_size is 256"),
        ({"spec": make_spec(num_kv_heads=3)}, "num_q_heads"),
        ({"spec": make_spec(torch.bfloat16)}, "a KV cache of torch.bfloat16 with a model in"),
        ({"spec": make_spec(head_size_v=32)}, "keys of 64 and values of 32"),
        ({"spec": make_spec(attention_chunk_size=64)}, "attention in chunks"),
    ],
)
def test_caches_that_are_not_taken_are_refused_by_name(changes: dict[str, Any], named: str) -> None:
    if changes.get("impl"):
        pytest.importorskip("triton", reason="no Triton beside this vLLM")
    with pytest.raises(SpecError, match=named):
        make_builder(**changes)


def test_layers_of_a_group_have_as_many_heads() -> None:
    layers = {"layer": LAYER, "wider": SimpleNamespace(num_heads=8)}
    config = SimpleNamespace(compilation_config=SimpleNamespace(static_forward_context=layers))
    with pytest.raises(SpecError, match=r"\[4, 8\] query heads"):
        layer_shape(make_spec(), ["layer", "wider"], config)


def test_steps_beyond_the_limits_are_refused() -> None:
    with pytest.raises(UnsupportedError, match="65 tokens, the limit is 64"):
        make_builder().build(0, make_step(num_actual_tokens=65))
    with pytest.raises(SpecError, match="causal"):
        make_builder().build(0, make_step(causal=False))


def test_outputs_are_not_quantized() -> None:
    rows = queries()
    with pytest.raises(SpecError, match="quantize"):
        make_impl().forward(LAYER, rows, rows, rows, rows, None, rows, torch.ones(1))


def on(monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    """Answer as on another platform."""
    platform = SimpleNamespace(
        is_cpu=lambda: kind == "cpu", is_cuda=lambda: kind == "cuda", is_rocm=lambda: kind == "rocm"
    )
    monkeypatch.setattr(attention, "current_platform", platform)


def test_what_vllm_is_told_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    backend = PrefixAttentionBackend
    on(monkeypatch, "cuda")
    assert backend.get_name() == "CUSTOM"
    sizes = [16, 32, 48, 64, 80, 96, 112, 128]
    assert backend.get_supported_kernel_block_sizes() == sizes
    assert [size for size in range(8, 300, 8) if backend.supports_head_size(size)] == [
        *(64, 96, 128, 256)
    ]
    assert not backend.supports_dtype(torch.float32)
    versions = {each: SimpleNamespace(to_int=lambda each=each: each) for each in (75, 80, 89, 90)}
    taken = [
        each for each, version in versions.items() if backend.supports_compute_capability(version)
    ]
    assert taken == [80, 90]
    assert not backend.supports_sink()
    assert not backend.is_mla()


BF16: dict[str, Any] = {"attn_type": "decoder", "head_size": 128, "dtype": torch.bfloat16}


@pytest.mark.parametrize(
    ("kind", "capability", "changes", "named"),
    [
        ("cuda", 90, {}, None),
        ("rocm", 94, {}, None),
        ("cuda", 89, {}, "sm89 yet; there are settings for sm80, sm90"),
        ("cuda", 90, {"head_size": 80}, "heads of 80 elements"),
        ("cuda", 90, {"dtype": torch.float32}, "models in torch.float32"),
        ("cuda", 90, {"attn_type": "encoder_only"}, "tokens see those after them"),
        ("cpu", 0, {"attn_type": "encoder_only"}, "tokens see those after them"),
        ("cpu", 0, {"enable_dbo": True}, r"micro-batches \(enable_dbo, ubatch_size\)"),
        ("cpu", 0, {"use_ubatching": True}, r"micro-batches \(enable_dbo, ubatch_size\)"),
        ("rocm", 94, {"drafts": object()}, "speculative decoding on ROCm"),
    ],
)
def test_models_are_refused_before_anything_is_loaded(
    kind: str,
    capability: int,
    changes: dict[str, Any],
    named: str | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    on(monkeypatch, kind)
    platform: Any = attention.current_platform
    platform.get_device_capability = lambda: SimpleNamespace(to_int=lambda: capability)
    given = BF16 | changes
    config = SimpleNamespace(
        model_config=SimpleNamespace(**given, get_head_size=lambda: given["head_size"]),
        parallel_config=SimpleNamespace(**{"enable_dbo": False, **given}),
        speculative_config=given.get("drafts"),
    )
    if named is None:
        attention.check_model(config)
    else:
        with pytest.raises(SpecError, match=f"{named}.*stock does"):
            attention.check_model(config)


def test_every_layer_is_warmed_up_with_what_it_will_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    impl = make_impl(sliding_window=20, logits_soft_cap=3.0)
    cache = make_cache("tokens first")
    ours = SimpleNamespace(num_heads=HEADS, impl=impl, kv_cache=cache)
    others = {"mamba": SimpleNamespace(), "mla": SimpleNamespace(impl=object())}
    layers = SimpleNamespace(static_forward_context={"layer": ours, **others})
    builder = make_builder(compilation_config=layers)
    assert impl.planner is builder.planner
    warmed: list[Any] = []
    monkeypatch.setattr(
        type(builder.planner),
        "warm_up",
        lambda _, *rows, **layer: warmed.append((*(each.shape for each in rows), layer)),
    )
    model = SimpleNamespace(dtype=torch.float32)
    config = SimpleNamespace(compilation_config=layers, model_config=model)
    warm_up_attention(SimpleNamespace(vllm_config=config))
    rows = torch.Size([NUM_BLOCKS, BLOCK_SIZE, KV_HEADS, HEAD_SIZE])
    assert warmed == [((1, HEADS, HEAD_SIZE), rows, rows, {"window": 20, "soft_cap": 3.0})]


def test_what_vllm_is_told_on_a_cpu() -> None:
    assert PrefixAttentionBackend.get_name() == "CPU_ATTN"
    assert PrefixAttentionBackend.supports_head_size(8)
    assert PrefixAttentionBackend.supports_block_size(32)


def test_e5m2_on_rocm_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    on(monkeypatch, "rocm")
    with pytest.raises(SpecError, match="fp8_e5m2 on ROCm"):
        make_impl(kv_cache_dtype="fp8_e5m2")
