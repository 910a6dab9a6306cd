"""Which engines the connector takes, what tells them apart, and how it begins a turn."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.v1.kv_cache_interface import FullAttentionSpec

from batchllm_operator.errors import SpecError
from batchllm_operator.runahead.blocks import KVBlocks
from batchllm_operator.runahead.connector import RunaheadConnector, Turn, _check_engine, _limits
from batchllm_operator.runahead.groups import ChainLimits, RunaheadGroup
from batchllm_operator.vllm_plugin import compat


def config(**changes: Any) -> tuple[Any, Any]:
    """An engine's configuration, as far as it is looked at."""
    given: dict[str, dict[str, Any]] = {
        "parallel": {"world_size": 1},
        "cache": {"enable_prefix_caching": True, "calculate_kv_scales": False},
        "scheduler": {"max_num_batched_tokens": 512, "long_prefill_token_threshold": 0},
        "model": {"max_model_len": 2048},
    }
    for name, change in changes.items():
        if name in given:
            given[name] = {**given[name], **change}
    made = {name: SimpleNamespace(**values) for name, values in given.items()}
    spec = FullAttentionSpec(block_size=16, num_kv_heads=2, head_size=32, dtype=torch.float32)
    groups = changes.get("groups", [SimpleNamespace(kv_cache_spec=spec)])
    return (
        SimpleNamespace(
            parallel_config=made["parallel"],
            cache_config=made["cache"],
            scheduler_config=made["scheduler"],
            model_config=made["model"],
            speculative_config=changes.get("speculative"),
        ),
        SimpleNamespace(kv_cache_groups=groups, num_blocks=100),
    )


def test_an_ordinary_engine_is_taken() -> None:
    _check_engine(*config())


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"cache": {"enable_prefix_caching": False}}, "enable_prefix_caching must be on"),
        ({"cache": {"calculate_kv_scales": True}}, "scales of FP8 KV"),
        ({"parallel": {"world_size": 2}}, "a replica must be one worker"),
        ({"speculative": object()}, "speculative decoding"),
        ({"groups": [SimpleNamespace(kv_cache_spec=object())]}, "full KV in all layers"),
        ({"groups": []}, "full KV in all layers"),
    ],
)
def test_engines_whose_kv_can_not_be_handed_on_are_refused(
    change: dict[str, Any], reason: str
) -> None:
    with pytest.raises(SpecError, match=reason):
        _check_engine(*config(**change))


def test_a_long_prompts_share_of_a_step_is_the_limit_of_a_chunk() -> None:
    assert _limits(*config()).max_chunk == 511  # and a token of the fill
    threshold = {"long_prefill_token_threshold": 96}
    assert _limits(*config(scheduler=threshold)).max_chunk == 96


def engine_fingerprint(**changes: Any) -> dict[str, Any]:
    """Of an engine that is like others but for some things."""
    has: dict[str, Any] = {
        "dtype": torch.float32,
        "cache_dtype": "auto",
        "block_size": 16,
        "max_chunk": 512,
        "shape": (4, 2, 16, 32),
        "layers": ["a"],
        "backend": "CPU_ATTN",
        "isa": "vec",
    } | changes
    backend = SimpleNamespace(get_name=lambda: has["backend"])
    layer = SimpleNamespace(impl=None, isa=has["isa"], get_attn_backend=lambda: backend)
    connector = bare_connector(ChainLimits(has["block_size"], 4, has["max_chunk"], 1024))
    connector._vllm_config = SimpleNamespace(
        model_config=SimpleNamespace(dtype=has["dtype"]),
        cache_config=SimpleNamespace(cache_dtype=has["cache_dtype"]),
        compilation_config=SimpleNamespace(static_forward_context={"a": layer}),
    )
    connector.blocks = KVBlocks({name: torch.zeros(has["shape"]) for name in has["layers"]}, 4)
    fingerprint: dict[str, Any] = connector.fingerprint()
    return fingerprint


def bare_connector(limits: ChainLimits) -> Any:
    """A connector without an engine."""
    connector = object.__new__(RunaheadConnector)
    connector.limits, connector.turn = limits, None
    return connector


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"dtype": torch.float16}, ["dtype"]),
        ({"cache_dtype": "fp8"}, ["kv_cache_dtype"]),
        ({"block_size": 32}, ["block_size"]),
        ({"max_chunk": 256}, ["max_chunk"]),
        ({"shape": (4, 16, 2, 32)}, ["kv_layout"]),
        ({"layers": ["b"]}, ["kv_layout"]),
        ({"backend": "FLASH_ATTN"}, ["attention"]),
        ({"isa": "amx"}, ["attention"]),
        # What was chosen comes before what follows from it on a CPU with AMX.
        (
            {"isa": "amx", "shape": (4, 16, 2, 32), "dtype": torch.bfloat16},
            ["dtype", "kv_layout", "attention"],
        ),
    ],
)
def test_engines_that_differ_in_anything_have_other_fingerprints(
    change: dict[str, Any], named: list[str]
) -> None:
    one, other = engine_fingerprint(), engine_fingerprint(**change)
    assert [name for name in one if one[name] != other[name]] == named
    assert {"vllm", "device"} < one.keys() == other.keys()


SPLIT = (64, 64, 40)  # 168 tokens, 160 of them in whole blocks


class Scheduler:
    """What vLLM's scheduler asks of the connector, for a replica's turn."""

    def __init__(self, rank: int) -> None:
        self.connector = bare_connector(ChainLimits(16, 100, 512, 1024))
        group = RunaheadGroup(0, list(range(sum(SPLIT))), SPLIT)
        self.turn = self.connector.turn = Turn(group, rank)
        self._new: list[Any] = []
        self._scheduled: dict[str, int] = {}

    def admit(self, part: str, num_cached: int, ids: list[int], computed: int) -> tuple[Any, bool]:
        """Admits a request as vLLM does; returns what the connector matched."""
        request = SimpleNamespace(request_id=part, kv_transfer_params={"runahead": part})
        external, is_async = self.connector.get_num_new_matched_tokens(request, num_cached)
        blocks = SimpleNamespace(get_block_ids=lambda: [ids])
        self.connector.update_state_after_alloc(request, blocks, external)
        if not is_async:
            self._new.append(
                SimpleNamespace(req_id=part, num_computed_tokens=num_cached + external)
            )
            self._scheduled[part] = computed
        return external, is_async

    def step(self) -> Any:
        output = SimpleNamespace(scheduled_new_reqs=self._new, num_scheduled_tokens=self._scheduled)
        return self.connector.build_connector_meta(output)


def test_a_step_computes_the_chunk_and_the_fill_waits_for_the_rest() -> None:
    scheduler = Scheduler(rank=1)
    assert scheduler.admit("chunk", 16, list(range(8)), 64) == (48, False)
    assert scheduler.admit("fill", 128, list(range(11)), 0) == (32, True)
    meta = scheduler.step()
    assert meta.turn is scheduler.turn
    assert meta.turn.failure is None
    assert meta.turn.fill_id == "fill"
    assert meta.turn.transfer.block_ids == list(range(11))
    assert meta.turn.transfer.extents == [(0, 4), (4, 8), (8, 10)]
    assert scheduler.step().turn is None  # it begins once


def test_the_last_replica_needs_no_fill() -> None:
    scheduler = Scheduler(rank=2)
    assert scheduler.admit("chunk", 0, list(range(11)), 40) == (128, False)
    assert scheduler.step().turn.failure is None


def test_ordinary_requests_are_left_alone() -> None:
    connector = Scheduler(rank=1).connector
    for params in (None, {}, {"do_remote_prefill": True}):
        request = SimpleNamespace(request_id="x", kv_transfer_params=params)
        assert connector.get_num_new_matched_tokens(request, 16) == (0, False)


@pytest.mark.parametrize(
    ("chunk", "fill", "failure"),
    [
        (63, 128, "a chunk didn't fit one step"),
        (64, 112, "the fill doesn't find its chunk"),
        (64, None, "the fill didn't begin with its chunk"),
    ],
)
def test_a_turn_that_the_scheduler_takes_apart_fails(
    chunk: int, fill: int | None, failure: str
) -> None:
    scheduler = Scheduler(rank=1)
    scheduler.admit("chunk", 0, list(range(8)), chunk)
    if fill is not None:
        scheduler.admit("fill", fill, list(range(11)), 200)
    assert scheduler.step().turn.failure == failure


@pytest.mark.parametrize(
    ("includes", "expected"), [([False, False], True), ([False, True], False), ([], False)]
)
def test_whether_keys_and_values_are_written_before_attention(
    includes: list[bool], expected: bool
) -> None:
    layers: dict[str, Any] = {"experts": object()}
    for idx, each in enumerate(includes):
        backend = SimpleNamespace(forward_includes_kv_cache_update=each)
        layers[str(idx)] = SimpleNamespace(
            impl=None, get_attn_backend=lambda backend=backend: backend
        )
    compilation = SimpleNamespace(static_forward_context=layers)
    found = compat.writes_kv_before_attention(SimpleNamespace(compilation_config=compilation))
    assert found is expected
