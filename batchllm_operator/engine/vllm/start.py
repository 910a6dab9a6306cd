"""What a spec asks of vLLM as it starts: its arguments, other settings, and checks of what runs."""

from operator import attrgetter
from typing import Any, Final, get_args

from vllm.config import lora
from vllm.lora.request import LoRARequest
from vllm.platforms import current_platform

from batchllm_operator.engine.arguments import unknown_parser
from batchllm_operator.engine.gpus import CPU_BLOCK_SIZE
from batchllm_operator.engine.protocol import EngineJob
from batchllm_operator.engine.vllm.answers import pooling_params
from batchllm_operator.errors import SpecError, one_line
from batchllm_operator.model import find_adapters
from batchllm_operator.spec import JobSpec, ModelSpec
from batchllm_operator.vllm_plugin.attention.settings import AttentionSettings
from batchllm_operator.vllm_plugin.scheduler.scheduler import BatchLLMScheduler

_SCHEDULER: Final = f"{BatchLLMScheduler.__module__}.{BatchLLMScheduler.__qualname__}"
_GPU_MAX_NUM_SEQS: Final = 1024
_MAX_GRAPH_SIZE: Final = 1024  # requests of the largest captured decode step
_MAX_LORAS: Final = 2  # rows of the next adapter begin while the last ones of the one before end
_SAME_NAMES: Final = (
    *("dtype", "max_num_seqs", "max_num_batched_tokens", "block_size", "kv_cache_memory_bytes"),
    *("tensor_parallel_size", "enforce_eager", "gpu_memory_utilization"),
)
"""Settings of the spec's engine that are vLLM's arguments."""
_ON_CPU: Final = {
    "enforce_eager": True,  # compilation takes longer than a small job
    "kv_cache_memory_bytes": 1 << 30,
    "block_size": CPU_BLOCK_SIZE,
}


def engine_args(spec: JobSpec, max_model_len: int) -> dict[str, Any]:
    """vLLM's engine arguments for a spec on this machine's platform.

    Raises:
        SpecError: a setting is for other platforms, or vLLM doesn't take the adapters.
        ModelError: see `find_adapters`.
    """
    engine = spec.engine
    if engine.batch_invariant and not current_platform.is_cuda():
        raise SpecError(
            "engine.batch_invariant: vLLM has it for NVIDIA GPUs, and this platform is"
            f" {current_platform.device_name}; leave it out (dtype: float32 makes differences rare)"
        )
    args: dict[str, Any] = {
        **{name: getattr(engine, name) for name in _SAME_NAMES},
        "model": spec.model.path,
        "revision": spec.model.revision,
        "trust_remote_code": spec.model.trust_remote_code,
        "max_model_len": max_model_len,
        # vLLM knows which pooling models share prefixes.
        "enable_prefix_caching": None if spec.is_pooled else True,
        "runner": "pooling" if spec.is_pooled else None,
        **adapter_args(spec),
        "scheduler_cls": _SCHEDULER if engine.scheduler == "batchllm" else None,
        "disable_log_stats": True,
        "use_tqdm_on_load": False,
    }
    if current_platform.is_cpu():
        args |= {name: value for name, value in _ON_CPU.items() if args[name] is None}
        samplings = [question.sampling for question in spec.questions]
        if any(each.seed is not None and not each.is_greedy for each in samplings):
            args["enable_chunked_prefill"] = False  # there vLLM dies of a seeded prompt in pieces
    elif engine.scheduler == "batchllm" and args["max_num_seqs"] is None:
        args["max_num_seqs"] = _GPU_MAX_NUM_SEQS  # an upper bound; memory decides
    args |= attention_args(spec)
    return {name: value for name, value in args.items() if value is not None} | dict(
        engine.extra_args
    )


def attention_args(spec: JobSpec) -> dict[str, Any]:
    """The arguments that choose the spec's attention: none on a CPU's only backend, ours or not."""
    if spec.engine.attention == "stock" or current_platform.is_cpu():
        return {}
    if not current_platform.is_cuda_alike():
        raise SpecError(
            "engine.attention: batchllm runs on CUDA, ROCm and CPU; on this platform take stock"
        )
    given = spec.engine.extra_args
    settings = AttentionSettings.from_additional_config(given.get("additional_config"))
    args: dict[str, Any] = {"attention_backend": "CUSTOM"}
    has_sizes = {"cudagraph_capture_sizes", "compilation_config"} & set(given)
    if settings.decode_graphs and not has_sizes:  # vLLM's own limit is 512 on most GPUs
        args["max_cudagraph_capture_size"] = _MAX_GRAPH_SIZE
    return args


def adapter_args(spec: JobSpec) -> dict[str, Any]:
    """The arguments for a job's adapters."""
    adapters = find_adapters(spec.model)
    if not adapters:
        return {}
    largest, ranks = max(adapters, key=attrgetter("rank")), sorted(get_args(lora.MaxLoRARanks))
    if largest.rank > ranks[-1]:
        raise SpecError(
            f"{largest.where}: has rank {largest.rank}, and vLLM takes at most {ranks[-1]}"
        )
    num_slots = min(len(adapters), _MAX_LORAS)
    if current_platform.is_cpu():
        # There vLLM adds the last slot's adapter to rows without one, so that slot stays empty.
        num_slots, given = len(adapters) + 1, spec.engine.extra_args.get("max_loras")
        if spec.model.adapter_column is not None and isinstance(given, int) and given < num_slots:
            raise SpecError(
                f"engine.extra_args: max_loras must be at least {num_slots} on a CPU, one more than"
                " there are adapters: there vLLM adds the adapter in its last slot to rows without"
                " one"
            )
    return {
        "enable_lora": True,
        "max_loras": num_slots,
        "max_lora_rank": next(rank for rank in ranks if rank >= largest.rank),
    }


def configure(spec: JobSpec, config: Any) -> None:
    """Choose in vLLM's `config` what no engine argument chooses.

    Raises:
        SpecError: our attention doesn't take the model or the GPU, or there is no such parser.
    """
    if spec.engine.attention == "batchllm":
        from batchllm_operator.vllm_plugin.attention import backend as attention

        attention.check_model(config)
    if spec.is_pooled and config.model_config.attn_type == "encoder_only":
        config.scheduler_config.scheduler_cls = None  # ours plans a KV cache, and there is none
    if spec.model.reasoning_parser is not None:
        _choose_parser(spec.model.reasoning_parser, config.structured_outputs_config)


def _choose_parser(name: str, outputs: Any) -> None:
    """Set vLLM's reasoning parser, so that grammars begin where the reasoning ends."""
    # Not by its argument `reasoning_parser`, which turns on budgets of thinking, too.
    from vllm.reasoning import ReasoningParserManager

    if outputs.reasoning_parser_plugin:
        ReasoningParserManager.import_reasoning_parser(outputs.reasoning_parser_plugin)
    if name not in (known := ReasoningParserManager.list_registered()):
        raise SpecError(unknown_parser(name, known))
    outputs.reasoning_parser = name


def check_pooling(spec: JobSpec, job: EngineJob, engine: Any) -> None:
    """Refuse what the model can't, with vLLM's reason, before the first request.

    Raises:
        SpecError: it can't do the task, or has no embeddings of the size asked for or planned.
    """
    config, params = engine.vllm_config, pooling_params(spec)
    if params.task not in (known := engine.get_supported_tasks()):
        raise SpecError(
            f"task {spec.task}: vLLM can't on this model: it has the tasks {', '.join(known)}, not"
            f" {params.task}"
        )
    try:
        params.verify(config.model_config)
    except ValueError as error:
        raise SpecError(f"embedding: vLLM refuses it: {error}") from error
    size = spec.embedding.dimensions or config.model_config.embedding_size
    planned = job.answers[0].embedding_size if job.answers else None
    if planned not in (None, size):
        raise SpecError(
            f"model {spec.model.path}: its embeddings have {size} numbers here, but"
            f" {planned} by the files that the plan has read"
        )


def start_attention(spec: JobSpec, engine: Any) -> str:
    """Check the attention of an engine's layers, and warm ours up; a line for the log.

    Raises:
        SpecError: ours was asked for, and some layers have another.
    """
    if spec.engine.attention == "stock":
        chosen = engine.vllm_config.attention_config.backend
        name = f", {chosen.name} (engine.extra_args)" if chosen is not None else ""
        return f"attention: vLLM's own{name} (engine.attention: stock, the default)"
    from batchllm_operator.vllm_plugin.attention.backend import report_attention, warm_up_attention

    reports = engine.collective_rpc(report_attention)
    others = [layer for report in reports for layer in report.others]
    if others or not all(report.num_ours for report in reports):
        running = f"it has {others[0]} and {len(others) - 1} more" if others else "it has none"
        raise SpecError(
            "engine.attention: batchllm needs a model whose attention layers all take it; "
            f"{running}; with engine.attention: stock it runs"
        )
    engine.collective_rpc(warm_up_attention)
    return f"attention: batchllm (engine.attention), {reports[0].description}"


def load_adapters(model: ModelSpec, engine: Any) -> dict[str, LoRARequest]:
    """vLLM's requests for the adapters by name, each of which it has loaded once.

    Raises:
        SpecError: vLLM refuses one, such as for a layer that the model lacks; names it.
    """
    requests = {}
    for adapter in find_adapters(model):
        request = LoRARequest(adapter.name, adapter.number, str(adapter.folder))
        requests[adapter.name] = request
        try:
            engine.add_lora(request)
        # Files, shapes, memory: vLLM has no common error.
        except Exception as error:
            raise SpecError(f"{adapter.where}: vLLM refuses it: {one_line(error)}") from error
    return requests
