"""What the scheduler, the attention backend and the simulator rely on in vLLM, item by item.

Each test is one item, and its failure says what the installed vLLM has instead. Something that has
changed is bridged in `batchllm_operator/vllm_plugin/compat.py`, then corrected here.
"""

import inspect
import re
from collections.abc import Iterator
from dataclasses import fields
from difflib import get_close_matches
from importlib import import_module
from importlib.metadata import packages_distributions, version
from typing import Any

import pytest

from batchllm_operator.cost import MODEL_SHAPES, find_gpu
from batchllm_operator.engine.arguments import vllm_arguments
from batchllm_operator.simulate.machine import POLICIES, Machine
from batchllm_operator.vllm_plugin.scheduler.hints import RequestHints, SchedulerSettings

CORE = "vllm.v1.core"
SCHEDULER = f"{CORE}.sched.scheduler:Scheduler"
ASYNC_SCHEDULER = f"{CORE}.sched.async_scheduler:AsyncScheduler"
QUEUE = f"{CORE}.sched.request_queue:FCFSRequestQueue"
POOL = f"{CORE}.block_pool:BlockPool"
ENGINE = "vllm.v1.engine.llm_engine:LLMEngine"
CONFIG = "vllm.config"
KV = "vllm.v1.kv_cache_interface"
ATTENTION = "vllm.v1.attention.backend"
REGISTRY = "vllm.v1.attention.backends.registry"
BACKENDS = "vllm.v1.attention.backends"
FLASH = f"{BACKENDS}.flash_attn:FlashAttention"
CONNECTOR = "vllm.distributed.kv_transfer.kv_connector.v1.base:KVConnectorBase_V1"
REASONING = "vllm.reasoning:ReasoningParserManager"
PARSER = "vllm.parser.abstract_parser:DelegatingParser"

CALLS = f"""
# the scheduler's overrides, and what it calls in turn
{ASYNC_SCHEDULER}.add_request(request)
{ASYNC_SCHEDULER}.schedule()
{ASYNC_SCHEDULER}._free_request(request)
{ASYNC_SCHEDULER}._enqueue_waiting_request(request)
{ASYNC_SCHEDULER}.shutdown()
{ASYNC_SCHEDULER}.reset_prefix_cache()
{CORE}.kv_cache_manager:KVCacheManager.get_blocks(request_id)
{CORE}.kv_cache_manager:KVCacheManager.allocate_slots(request, num_new_tokens)
{CORE}.kv_cache_manager:KVCacheManager.cache_blocks(request, num_computed_tokens)
{POOL}.touch(blocks)
{POOL}.free_blocks(ordered_blocks)
{POOL}.evict_blocks(block_ids)
{POOL}.get_num_free_blocks()
# the queue that a step gets
{QUEUE}.add_request(request)
{QUEUE}.peek_request()
{QUEUE}.pop_request()
{QUEUE}.prepend_request(request)
# what the simulator calls as the engine would
{SCHEDULER}(*, vllm_config, kv_cache_config, structured_output_manager, block_size)
{ASYNC_SCHEDULER}.update_from_output(scheduler_output, model_runner_output)
{ASYNC_SCHEDULER}.has_requests()
{ASYNC_SCHEDULER}.has_unfinished_requests()
{ASYNC_SCHEDULER}.finish_requests(request_ids, finished_status)
vllm.v1.request:Request(request_id, prompt_token_ids, sampling_params, pooling_params, *,
    block_hasher)
vllm.v1.outputs:ModelRunnerOutput(req_ids, req_id_to_index, sampled_token_ids)
{CORE}.kv_cache_utils:get_request_block_hasher(hash_block_size, caching_hash_fn)
{CORE}.kv_cache_utils:init_none_hash(hash_fn)
vllm.utils.hashing:sha256(input)
# configurations that the simulator makes
vllm.sampling_params:SamplingParams(*, max_tokens, stop_token_ids, extra_args)
{CONFIG}:ModelConfig(*, model, tokenizer, skip_tokenizer_init, dtype, max_model_len)
{CONFIG}:SchedulerConfig(*, max_num_seqs, max_num_batched_tokens, max_model_len,
    enable_chunked_prefill, is_encoder_decoder, async_scheduling)
{CONFIG}:CacheConfig(*, block_size, enable_prefix_caching)
{CONFIG}:DeviceConfig(device)
{CONFIG}:VllmConfig(*, model_config, scheduler_config, cache_config, device_config,
    additional_config)
{KV}:FullAttentionSpec(*, block_size, num_kv_heads, head_size, dtype)
{KV}:KVCacheConfig(*, num_blocks, kv_cache_tensors, kv_cache_groups)
{KV}:KVCacheGroupSpec(layer_names, kv_cache_spec)
vllm.v1.structured_output:StructuredOutputManager(vllm_config)
# structured outputs, and whether a backend takes them
vllm.v1.structured_output.backend_xgrammar:XgrammarBackend(*, vllm_config, tokenizer, vocab_size)
vllm.v1.structured_output.backend_guidance:GuidanceBackend(*, vllm_config, tokenizer, vocab_size)
vllm.v1.structured_output.backend_outlines:OutlinesBackend(*, vllm_config, tokenizer, vocab_size)
vllm.v1.structured_output.backend_lm_format_enforcer:LMFormatEnforcerBackend(*,
    vllm_config, tokenizer, vocab_size)
vllm.v1.structured_output.request:get_structured_output_key(params)
vllm.sampling_params:RepetitionDetectionParams(max_pattern_size, min_pattern_size, min_count)
vllm.sampling_params:SamplingParams(*, repetition_detection)
vllm.sampling_params:StructuredOutputsParams(*, json, regex, choice)
vllm.sampling_params:SamplingParams._validate_structured_outputs(model_config,
    structured_outputs_config, tokenizer)
vllm.tokenizers:get_tokenizer(tokenizer_name, *, revision, trust_remote_code)
# the attention backend's overrides, and what it calls in turn
{ATTENTION}:AttentionMetadataBuilder(kv_cache_spec, layer_names, vllm_config, device)
{ATTENTION}:AttentionMetadataBuilder.build(common_prefix_len, common_attn_metadata, fast_build)
{ATTENTION}:AttentionMetadataBuilder.build_for_cudagraph_capture(common_attn_metadata)
{ATTENTION}:AttentionMetadataBuilder.get_cudagraph_support(vllm_config, kv_cache_spec)
{ATTENTION}:AttentionImpl.__init__(num_heads, head_size, scale, num_kv_heads, alibi_slopes,
    sliding_window, kv_cache_dtype, logits_soft_cap, attn_type, kv_sharing_target_layer_name)
{ATTENTION}:AttentionImpl.forward(layer, query, key, value, kv_cache, attn_metadata, output,
    output_scale, output_block_scale)
vllm.v1.attention.backends.cpu_attn:CPUAttentionBackendImpl.do_kv_cache_update(layer, key, value,
    kv_cache, slot_mapping)
{ATTENTION}:AttentionBackend.supports_compute_capability(capability)
# prefill by vLLM's FlashAttention
{BACKENDS}.utils:split_decodes_and_prefills(common_attn_metadata, decode_threshold)
{BACKENDS}.fa_utils:get_flash_attn_version(*, head_size)
{FLASH}MetadataBuilder(kv_cache_spec, layer_names, vllm_config, device)
{FLASH}MetadataBuilder.build(common_prefix_len, common_attn_metadata)
{FLASH}Impl.__init__(num_heads, head_size, scale, num_kv_heads, alibi_slopes, sliding_window,
    kv_cache_dtype, logits_soft_cap, *, kv_sharing_target_layer_name)
{FLASH}Impl.forward(layer, query, key, value, kv_cache, attn_metadata, output)
{CONFIG}:set_current_vllm_config(vllm_config)
{REGISTRY}:register_backend(backend, class_path)
{REGISTRY}:AttentionBackendEnum.CUSTOM.is_overridden()
{REGISTRY}:AttentionBackendEnum.CUSTOM.clear_override()
{REGISTRY}:AttentionBackendEnum.CPU_ATTN.get_path()
vllm._custom_ops:reshape_and_cache_flash(key, value, key_cache, value_cache, slot_mapping,
    kv_cache_dtype, k_scale, v_scale)
vllm.v1.attention.ops.triton_reshape_and_cache_flash:triton_reshape_and_cache_flash(key, value,
    key_cache, value_cache, slot_mapping, kv_cache_dtype, k_scale, v_scale)
# the engine in this process
{ENGINE}.collective_rpc(method)
{ENGINE}.add_request(request_id, prompt, params)
{ENGINE}.get_num_unfinished_requests()
# the KV connector's overrides
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
{CORE}.kv_cache_manager:KVCacheBlocks.get_block_ids()
vllm.v1.worker.worker_base:WorkerBase.get_model()
vllm:EngineArgs(*, model, attention_backend)
# reasoning and answer taken apart
{REASONING}.list_registered()
{REASONING}.import_reasoning_parser(plugin_path)
vllm.parser:ParserManager.get_parser(*, reasoning_parser_name, is_harmony)
{PARSER}(tokenizer, tools, *, model_config)
{PARSER}.adjust_request(request)
{PARSER}.parse(model_output, request, *, model_output_token_ids)
"""
"""Functions and methods of vLLM as we call them, or as vLLM calls our overrides, without `self`:
module:name(leading parameters, *, parameters given by name)."""

# What objects have, by the name of the object in `objects`.
ATTRIBUTES = {
    "scheduler": "vllm_config scheduler_config kv_cache_config kv_cache_manager num_spec_tokens"
    " running max_num_scheduled_tokens max_num_running_reqs lora_config block_size requests"
    " waiting",
    "vllm_config": "additional_config",
    "scheduler_config": "async_scheduling enable_chunked_prefill policy"
    " long_prefill_token_threshold",
    "cache_config": "block_size num_gpu_blocks",
    "parallel_config": "enable_dbo",
    "kv_cache_config": "kv_cache_groups",
    "kv_cache_manager": "block_pool enable_caching usage coordinator empty_kv_cache_blocks",
    "attention_manager": "block_size req_to_blocks num_cached_block",
    "block_pool": "num_gpu_blocks blocks null_block",
    "kv_cache_blocks": "blocks",
    "block": "block_id is_null ref_cnt",
    "request": "request_id sampling_params status max_tokens num_prompt_tokens num_output_tokens"
    " num_tokens num_computed_tokens num_output_placeholders is_prefill_chunk block_hashes"
    " lora_request structured_output_request",
    "output_processor": "request_states",
    "sampling_params": "extra_args max_tokens",
    "scheduler_output": "num_scheduled_tokens total_num_scheduled_tokens",
}

FIELDS = {
    f"{ATTENTION}:CommonAttentionMetadata": "query_start_loc seq_lens block_table_tensor"
    " slot_mapping num_reqs num_actual_tokens max_query_len causal query_start_loc_cpu max_seq_len",
    f"{KV}:FullAttentionSpec": "block_size num_kv_heads head_size dtype",
    f"{CONFIG}:SchedulerConfig": "max_num_seqs max_num_batched_tokens",
    f"{CONFIG}:CompilationConfig": "static_forward_context",
    f"{CONFIG}:AttentionConfig": "backend",
    f"{CONFIG}:StructuredOutputsConfig": "reasoning_parser reasoning_parser_plugin",
    f"{CONFIG}:VllmConfig": "compilation_config speculative_config attention_config",
}
"""What is read, by the dataclass that has it."""

STATUSES = ("RUNNING", "WAITING_FOR_STRUCTURED_OUTPUT_GRAMMAR", "FINISHED_ABORTED")

BASES = (
    (ASYNC_SCHEDULER, SCHEDULER),
    (QUEUE, f"{CORE}.sched.request_queue:RequestQueue"),
)


def installed() -> str:
    """The name and version of the vLLM that is there."""
    name = packages_distributions()["vllm"][0]
    return f"{name} {version(name)}"


def missing(holder: str, names: Any, wanted: str) -> str:
    """Says that `wanted` isn't among `names`, and what comes nearest."""
    near = get_close_matches(wanted, list(names), n=3, cutoff=0.5)
    like = f"; it has {', '.join(near)}" if near else ""
    return f"{installed()}: {holder} has no {wanted!r}{like}"


def find(where: str) -> Any:
    """The object at module:Outer.inner; the test fails with what is missing on the way."""
    module, _, path = where.partition(":")
    try:
        found: Any = import_module(module)
    except ModuleNotFoundError as error:
        pytest.fail(f"{installed()}: module {module} isn't there any more: {error}")
    holder = module
    for name in path.split("."):
        if not hasattr(found, name):
            pytest.fail(missing(holder, dir(found), name))
        holder, found = f"{holder}.{name}", getattr(found, name)
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


def test_every_line_of_calls_is_one() -> None:
    lines = [line for line in CALLS.splitlines() if line and line[0] not in "# "]
    assert len(lines) == len(re.findall(r"^[\w.]+:[\w.]+\([^()]*\)$", CALLS, re.MULTILINE))


@pytest.mark.parametrize(
    ("where", "field"),
    [(where, field) for where, names in FIELDS.items() for field in names.split()],
    ids=lambda value: value.partition(":")[2] or value,
)
def test_field(where: str, field: str) -> None:
    names = [known.name for known in fields(find(where))]
    assert field in names, missing(where, names, field)


@pytest.mark.parametrize(
    ("where", "attribute"),
    [
        (f"{ENGINE}.__init__", "self.output_processor ="),
        ("vllm.v1.engine.output_processor:RequestState.__init__", "self.num_cached_tokens ="),
    ],
)
def test_attribute_of_an_object_that_needs_a_model(where: str, attribute: str) -> None:
    """What the first of several samples found in the cache."""
    assert attribute in inspect.getsource(find(where)), missing(where, (), attribute)


def test_chosen_backends_can_be_forgotten() -> None:
    find("vllm.v1.attention.selector:_cached_get_attn_backend.cache_clear")


@pytest.mark.parametrize("status", STATUSES)
def test_status(status: str) -> None:
    find(f"vllm.v1.request:RequestStatus.{status}")


@pytest.mark.parametrize(("child", "base"), BASES, ids=lambda where: where.partition(":")[2])
def test_base(child: str, base: str) -> None:
    bases = find(child).__mro__
    assert find(base) in bases, f"{installed()}: {child} is no {base}, its bases are {bases}"


def test_names_of_engine_arguments_can_be_read_from_the_source() -> None:
    names = vllm_arguments()
    assert names is not None
    assert list(names) == list(inspect.signature(find("vllm:EngineArgs")).parameters)


@pytest.fixture(scope="module")
def objects() -> dict[str, Any]:
    """One of each kind: of a scheduler that has put together a step with one request."""
    from batchllm_operator.simulate.vllm_scheduling import make_scheduler

    sha256 = find("vllm.utils.hashing:sha256")
    find(f"{CORE}.kv_cache_utils:init_none_hash")(sha256)
    hasher = find(f"{CORE}.kv_cache_utils:get_request_block_hasher")(16, sha256)
    machine = Machine(MODEL_SHAPES["Mistral-7B"], find_gpu("H100"), num_blocks=64)
    scheduler = make_scheduler(POLICIES["stock_sorted"], machine, 512, SchedulerSettings())
    params = find("vllm.sampling_params:SamplingParams")(
        max_tokens=4, extra_args=RequestHints(group_id=3).to_extra_args()
    )
    make_request = find("vllm.v1.request:Request")
    request = make_request("one", list(range(40)), params, None, block_hasher=hasher)
    scheduler.add_request(request)
    output = scheduler.schedule()
    manager = scheduler.kv_cache_manager
    blocks = manager.get_blocks("one")
    return {
        "scheduler": scheduler,
        "vllm_config": scheduler.vllm_config,
        "scheduler_config": scheduler.scheduler_config,
        "cache_config": scheduler.cache_config,
        "parallel_config": scheduler.vllm_config.parallel_config,
        "kv_cache_config": scheduler.kv_cache_config,
        "kv_cache_manager": manager,
        "attention_manager": manager.coordinator.single_type_managers[0],
        "block_pool": manager.block_pool,
        "kv_cache_blocks": blocks,
        "block": blocks.blocks[0][0],
        "request": request,
        "sampling_params": request.sampling_params,
        "scheduler_output": output,
        "output_processor": find("vllm.v1.engine.output_processor:OutputProcessor")(
            None, log_stats=False
        ),
    }


@pytest.mark.parametrize(
    ("kind", "attribute"),
    [(kind, attribute) for kind, names in ATTRIBUTES.items() for attribute in names.split()],
    ids=lambda value: value,
)
def test_attribute(kind: str, attribute: str, objects: dict[str, Any]) -> None:
    holder = objects[kind]
    assert hasattr(holder, attribute), missing(type(holder).__name__, dir(holder), attribute)
