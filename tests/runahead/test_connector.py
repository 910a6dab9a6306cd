"""Which engines the connector takes, and what tells their models apart."""

from __future__ import annotations

from copy import deepcopy
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.v1.kv_cache_interface import FullAttentionSpec

from batchllm_operator.errors import SpecError
from batchllm_operator.vllm_plugin import compat
from batchllm_operator.vllm_plugin.runahead.blocks import KVBlocks
from batchllm_operator.vllm_plugin.runahead.connector import (
    _check_engine,
    _limits,
    fingerprint,
    weights_digest,
)
from batchllm_operator.vllm_plugin.runahead.plan import ChainLimits
from batchllm_operator.vllm_plugin.runahead.working import RunaheadConnectorWorker


def config(**changes: Any) -> tuple[Any, Any]:
    """An engine's configuration, as far as it is looked at."""
    given = {
        "parallel": {"world_size": 1},
        "cache": {"enable_prefix_caching": True, "calculate_kv_scales": False},
        "scheduler": {"max_num_batched_tokens": 512, "long_prefill_token_threshold": 0},
        "model": {"max_model_len": 2048},
        "transfer": {"kv_load_failure_policy": "fail"},
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
            kv_transfer_config=made["transfer"],
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
        ({"transfer": {"kv_load_failure_policy": "recompute"}}, "must be fail"),
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
    assert _limits(*config()).max_step_tokens == 512
    threshold = {"long_prefill_token_threshold": 96}
    assert _limits(*config(scheduler=threshold)).max_step_tokens == 96


def test_a_digest_of_the_weights_tells_models_apart() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(40, 50), torch.nn.LayerNorm(50))
    others = [deepcopy(model), deepcopy(model), deepcopy(model).to(torch.bfloat16)]
    with torch.no_grad():
        others[1][0].weight.mul_(1.001)
    first, same, tuned, rounded = (
        weights_digest(SimpleNamespace(get_model=lambda each=each: each))
        for each in (model, *others)
    )
    assert first == same
    assert len({first, tuned, rounded}) == 3


def engine_fingerprint(**changes: Any) -> dict[str, Any]:
    """Of an engine that is like others but for some things."""
    has = {
        "model": "{}",
        "weights": "0f",
        "dtype": torch.float32,
        "cache_dtype": "auto",
        "block_size": 16,
        "max_step_tokens": 512,
        "max_model_len": 1024,
        "shape": (4, 2, 16, 32),
        "layers": ["a"],
        "backend": "CPU_ATTN",
        "isa": "vec",
    } | changes
    backend = SimpleNamespace(get_name=lambda: has["backend"])
    layer = SimpleNamespace(impl=None, isa=has["isa"], get_attn_backend=lambda: backend)
    config = SimpleNamespace(
        model_config=SimpleNamespace(
            hf_config=SimpleNamespace(to_json_string=lambda: has["model"]), dtype=has["dtype"]
        ),
        cache_config=SimpleNamespace(cache_dtype=has["cache_dtype"]),
        compilation_config=SimpleNamespace(static_forward_context={"a": layer}),
    )
    working = RunaheadConnectorWorker(
        ChainLimits(has["block_size"], 4, has["max_step_tokens"], has["max_model_len"])
    )
    working.blocks = KVBlocks({name: torch.zeros(has["shape"]) for name in has["layers"]}, 4)
    return fingerprint(config, working, has["weights"])


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"model": "{1}"}, "model"),
        ({"weights": "f0"}, "weights"),
        ({"dtype": torch.float16}, "dtype"),
        ({"cache_dtype": "fp8"}, "kv_cache_dtype"),
        ({"block_size": 32}, "block_size"),
        ({"max_step_tokens": 256}, "max_step_tokens"),
        ({"max_model_len": 512}, "max_model_len"),
        ({"shape": (4, 16, 2, 32)}, "kv_layout"),
        ({"layers": ["b"]}, "kv_layout"),
        ({"backend": "FLASH_ATTN"}, "attention"),
        ({"isa": "amx"}, "attention"),
    ],
)
def test_engines_that_differ_in_anything_have_other_fingerprints(
    change: dict[str, Any], named: str
) -> None:
    one, other = engine_fingerprint(), engine_fingerprint(**change)
    assert {name for name in one | other if one[name] != other[name]} == {named}
    assert {"vllm", "device"} < one.keys()


def test_what_was_chosen_comes_before_what_follows_from_it() -> None:
    """On a CPU with AMX, attention and the layout of the cache follow from dtype."""
    one = engine_fingerprint()
    other = engine_fingerprint(dtype=torch.bfloat16, weights="f0", isa="amx", shape=(4, 16, 2, 32))
    differing = [name for name in one if one[name] != other[name]]
    assert differing == ["dtype", "weights", "kv_layout", "attention"]


@pytest.mark.parametrize(
    ("includes", "expected"), [([False, False], True), ([False, True], False), ([], False)]
)
def test_whether_keys_and_values_are_written_before_attention(
    includes: list[bool], expected: bool
) -> None:
    layers: dict[str, Any] = {"experts": object()}
    for idx, each in enumerate(includes):
        backend = SimpleNamespace(forward_includes_kv_cache_update=each)
        layers[str(idx)] = SimpleNamespace(get_attn_backend=lambda backend=backend: backend)
    compilation = SimpleNamespace(static_forward_context=layers)
    found = compat.writes_kv_before_attention(SimpleNamespace(compilation_config=compilation))
    assert found is expected
