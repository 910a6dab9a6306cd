"""What our plugins rely on in vLLM where no test runs it: on GPUs, and between replicas.

Each test is one item, and its failure says what the installed vLLM has instead. Something that has
changed is bridged in `batchllm_operator/vllm_plugin/compat.py`, then corrected here. Tests of the
scheduler, of attention and of whole jobs run all else that we use, with the oldest vLLM and the
newest.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from importlib import import_module
from importlib.metadata import packages_distributions, version
from typing import Any

import pytest

ATTENTION = "vllm.v1.attention.backend"
FLASH = "vllm.v1.attention.backends.flash_attn:FlashAttention"
CONNECTOR = "vllm.distributed.kv_transfer.kv_connector.v1.base:KVConnectorBase_V1"
GRAMMARS = "vllm.v1.structured_output"

CALLS = f"""
{ATTENTION}:AttentionMetadataBuilder.build_for_cudagraph_capture(common_attn_metadata)
{ATTENTION}:AttentionMetadataBuilder.get_cudagraph_support(vllm_config, kv_cache_spec)
{ATTENTION}:AttentionBackend.supports_compute_capability(capability)
{FLASH}Impl.forward(layer, query, key, value, kv_cache, attn_metadata, output)
vllm._custom_ops:reshape_and_cache_flash(key, value, key_cache, value_cache, slot_mapping,
    kv_cache_dtype, k_scale, v_scale)
vllm.v1.attention.ops.triton_reshape_and_cache_flash:triton_reshape_and_cache_flash(key, value,
    key_cache, value_cache, slot_mapping, kv_cache_dtype, k_scale, v_scale)
vllm:EngineArgs(*, model, attention_backend)
{GRAMMARS}.backend_outlines:OutlinesBackend(*, vllm_config, tokenizer, vocab_size)
{GRAMMARS}.backend_lm_format_enforcer:LMFormatEnforcerBackend(*, vllm_config, tokenizer, vocab_size)
# the KV connector's overrides, and what they call
{CONNECTOR}(vllm_config, role, kv_cache_config)
{CONNECTOR}.get_num_new_matched_tokens(request, num_computed_tokens)
{CONNECTOR}.update_state_after_alloc(request, blocks, num_external_tokens)
{CONNECTOR}.build_connector_meta(scheduler_output)
{CONNECTOR}.update_connector_output(connector_output)
{CONNECTOR}.request_finished(request, block_ids)
{CONNECTOR}.register_kv_caches(kv_caches)
{CONNECTOR}.bind_connector_metadata(connector_metadata)
{CONNECTOR}.start_load_kv(forward_context)
{CONNECTOR}.wait_for_layer_load(layer_name)
{CONNECTOR}.save_kv_layer(layer_name, kv_layer, attn_metadata)
{CONNECTOR}.wait_for_save()
{CONNECTOR}.get_finished(finished_req_ids)
{CONNECTOR}.get_block_ids_with_load_errors()
{CONNECTOR}.requires_piecewise_for_cudagraph(extra_config)
{CONNECTOR}.shutdown()
vllm.v1.core.kv_cache_manager:KVCacheBlocks.get_block_ids()
"""
"""Functions and methods of vLLM as we call them, or as vLLM calls our overrides, without `self`:
module:name(leading parameters, *, parameters given by name)."""


def installed() -> str:
    """The name and version of the vLLM that is there."""
    name = packages_distributions()["vllm"][0]
    return f"{name} {version(name)}"


def find(where: str) -> Any:
    """The object at module:Outer.inner; the test fails with what is missing on the way."""
    module, _, path = where.partition(":")
    found: Any = import_module(module)
    for name in path.split("."):
        if not hasattr(found, name):
            pytest.fail(f"{installed()}: {found} has no {name!r}; it has {dir(found)}")
        found = getattr(found, name)
    return found


def complaints(wanted: str, signature: inspect.Signature) -> Iterator[str]:
    """How a signature differs from what a call of ours takes for granted."""
    positional, _, by_name = (re.findall(r"\w+", part) for part in wanted.partition("*"))
    parameters = [each for name, each in signature.parameters.items() if name != "self"]
    kinds = {parameter.kind for parameter in parameters}
    leading = [each.name for each in parameters if each.kind is not each.KEYWORD_ONLY]
    leading = leading[: len(positional)]
    if leading != positional and inspect.Parameter.VAR_POSITIONAL not in kinds:
        yield f"leading parameters: expected {positional}, found {leading}"
    if inspect.Parameter.VAR_KEYWORD not in kinds:
        for name in {*by_name} - {parameter.name for parameter in parameters}:
            yield f"parameter {name!r}: expected, not found"
    for each in parameters:
        is_variable = each.kind in (each.VAR_POSITIONAL, each.VAR_KEYWORD)
        if each.default is each.empty and not is_variable and each.name not in leading + by_name:
            yield f"parameter {each.name!r}: found as a required one, not expected"


@pytest.mark.parametrize(
    ("where", "wanted"),
    re.findall(r"^([\w.]+:[\w.]+)\((.*?)\)$", CALLS, re.MULTILINE | re.DOTALL),
    ids=lambda value: value.partition(":")[2],
)
def test_call(where: str, wanted: str) -> None:
    signature = inspect.signature(find(where))
    differences = "; ".join(complaints(wanted, signature))
    assert not differences, f"{installed()}: {where}{signature}: {differences}"
