"""Full graphs of decode steps, captured and replayed as vLLM does it, without a GPU.

A captured graph is a launch with the arguments of one step; a replay is that launch after the
buffers of a later one have been filled. Here the launch is `forward` with the captured metadata.
"""

from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support.attention_cases import NAN, AttentionCase, Group, make_case
from support.attention_checks import CPU, SHAPE, num_prefix_tiles, schedule_of
from support.flash_attention import common_of, install
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from vllm.v1.attention.backend import CommonAttentionMetadata
from vllm.v1.kv_cache_interface import FullAttentionSpec

from batchllm_kernels.prefix_attention import PagedBatch, prefix_shared_attention
from batchllm_operator.vllm_plugin.attention.backend import PrefixAttentionImpl
from batchllm_operator.vllm_plugin.attention.builder import (
    PrefixAttentionBuilder,
    PrefixAttentionMetadata,
)
from batchllm_operator.vllm_plugin.attention.prefill import FlashPrefill

interpreter = pytest.importorskip("triton.runtime.interpreter", reason="no Triton beside this vLLM")

ROWS, BLOCKS, POOL = 8, 20, 64
STEPS = [
    [Group(64, ((5, 1), (70, 1), (0, 1))), Group(0, ((30, 1),))],
    [Group(32, ((1, 1), (2, 1), (40, 1), (9, 1), (17, 1))), Group(0, ((3, 1), (200, 1)))],
    [Group(0, ((0, 1),))],
    [Group(128, tuple((own, 1) for own in range(ROWS)))],
]


class Runner:
    """vLLM's persistent buffers, and a builder with one layer."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.flash = install(partial(monkeypatch.setattr, raising=False))
        monkeypatch.setattr(FlashPrefill, "__init__", _without_vllm)
        self.impl = PrefixAttentionImpl(8, 64, 0.125, num_kv_heads=2)
        layers = {"layer": SimpleNamespace(num_heads=8, impl=self.impl)}
        config: Any = SimpleNamespace(
            additional_config={"batchllm_attention": {"decode_graphs": True, "impl": "triton"}},
            compilation_config=SimpleNamespace(static_forward_context=layers),
            scheduler_config=SimpleNamespace(max_num_seqs=ROWS, max_num_batched_tokens=64),
            speculative_config=None,
            model_config=SimpleNamespace(dtype=torch.float32),
        )
        spec = FullAttentionSpec(block_size=16, num_kv_heads=2, head_size=64, dtype=torch.float32)
        self.builder = PrefixAttentionBuilder(spec, ["layer"], config, CPU)
        self.starts = torch.zeros(ROWS + 1, dtype=torch.int32)
        self.lens = torch.zeros(ROWS, dtype=torch.int32)
        self.table = torch.zeros(ROWS, BLOCKS, dtype=torch.int32)
        self.cache = torch.full((POOL, 2, 16, 128), NAN)
        self.q, self.output = torch.zeros(ROWS, 8, 64), torch.zeros(ROWS, 8, 64)

    def common(self) -> CommonAttentionMetadata:
        batch = PagedBatch(self.starts, self.lens, self.table)
        return common_of(batch, ROWS, max_query_len=1, max_seq_len=BLOCKS * 16)

    def capture(self) -> PrefixAttentionMetadata:
        """A dummy step of as many rows as the graph is for."""
        self.starts.copy_(torch.arange(ROWS + 1))
        return self.builder.build_for_cudagraph_capture(self.common())

    def fill(self, case: AttentionCase) -> None:
        """The next step's inputs; rows behind its own are padding, with what was there before."""
        num, tokens = case.batch.num_requests, case.num_tokens
        self.starts.fill_(tokens)
        self.starts[: num + 1] = case.batch.query_start_loc
        self.lens.zero_()
        self.lens[:num] = case.batch.seq_lens
        width = case.batch.block_table.shape[1]
        self.table[:num, :width] = case.batch.block_table
        both = torch.cat([case.k_cache, case.v_cache], dim=-1).transpose(1, 2)
        self.cache[: len(both)] = both
        self.q[:tokens] = case.q
        self.output.fill_(NAN)

    def replay(self, captured: PrefixAttentionMetadata) -> None:
        rows = self.q
        self.impl.forward(None, rows, rows, rows, self.cache, captured, self.output)


def _without_vllm(self: FlashPrefill, *given: Any) -> None:
    """FlashAttention's classes aren't needed: no step here has rows for them."""
    self.impls, self.threshold, self.version = {"layer": None}, given[-1], 3


def expected(case: AttentionCase) -> Tensor:
    caches = case.k_cache, case.v_cache
    return prefix_shared_attention(case.q, *caches, case.batch, [], scale=0.125)


def launched(metadata: PrefixAttentionMetadata) -> dict[str, Any]:
    """What a launch is given, and the planner's buffers: pointers, strides and numbers."""
    assert metadata.plan is not None
    values = vars(schedule_of(metadata.plan)) | {"table": metadata.plan.batch.block_table}
    return {
        name: (each.data_ptr(), each.shape, each.stride()) if isinstance(each, Tensor) else each
        for name, each in values.items()
    }


def test_a_captured_step_replays_later_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    runner = Runner(monkeypatch)
    captured = runner.capture()
    fixed = launched(captured)
    for seed, groups in enumerate(STEPS):
        case = make_case(SHAPE, groups, seed=seed)
        runner.fill(case)
        planned = runner.builder.build(0, runner.common())
        assert launched(planned) == fixed
        assert captured.plan is not None
        assert (num_prefix_tiles(captured.plan) > 0) == (case.batch.num_requests > 1)
        runner.replay(captured)
        found = runner.output[: case.num_tokens]
        torch.testing.assert_close(found, expected(case), atol=1e-3, rtol=1e-3)
        assert runner.output[case.num_tokens :].isnan().all()


def test_flash_attention_has_no_part_in_a_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    runner = Runner(monkeypatch)
    assert runner.builder.reorder_batch_threshold == 64
    captured = runner.capture()
    assert captured.prefill is None
    assert captured.plan is not None
    assert captured.plan.batch.num_requests == ROWS
    runner.fill(make_case(SHAPE, STEPS[0], seed=0))
    assert runner.builder.build(0, runner.common()).prefill is None
    runner.replay(captured)
    assert runner.flash.query_lens == []


class Allocations(TorchDispatchMode):
    """Names of operations whose outputs lie in memory that none of their inputs has."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []
        self.num_launches = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        given = {each.untyped_storage().data_ptr() for each in args if isinstance(each, Tensor)}
        outputs = result if isinstance(result, tuple | list) else [result]
        for each in outputs:
            if isinstance(each, Tensor) and each.untyped_storage().data_ptr() not in given:
                self.found.append(str(func))
        return result


def test_planning_a_decode_step_allocates_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    runner = Runner(monkeypatch)
    runner.capture()
    runner.fill(make_case(SHAPE, STEPS[1], seed=0))
    common, allocations = runner.common(), Allocations()
    launch = interpreter.GridExecutor.__call__

    def uncounted(self: Any, *given: Any, **settings: Any) -> None:
        """The interpreter copies tensors, which a launch on a GPU doesn't."""
        allocations.num_launches += 1
        with _disable_current_modes():
            launch(self, *given, **settings)

    monkeypatch.setattr(interpreter.GridExecutor, "__call__", uncounted)
    with allocations:
        runner.builder.build(0, common)
    assert allocations.num_launches > 0
    assert allocations.found == []
