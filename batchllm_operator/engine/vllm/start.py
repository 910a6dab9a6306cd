"""What a spec asks of vLLM as it starts: parts of its configuration, and checks of what runs."""

from __future__ import annotations

from typing import Any, Final

from vllm.lora.request import LoRARequest

from batchllm_operator.engine.arguments import unknown_parser
from batchllm_operator.engine.protocol import EngineJob
from batchllm_operator.engine.vllm.answers import pooling_params
from batchllm_operator.errors import SpecError, one_line
from batchllm_operator.model import find_adapters
from batchllm_operator.spec import JobSpec, ModelSpec

_POOLING_TASKS: Final = {"embed": "embed", "pool": "classify"}
"""vLLM's names."""


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
    """Set vLLM's reasoning parser, so that grammars begin where the reasoning ends.

    Not by its argument `reasoning_parser`, which turns on budgets of thinking, too.
    """
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
    config = engine.vllm_config
    task, known = _POOLING_TASKS[spec.task], engine.get_supported_tasks()
    if task not in known:
        raise SpecError(
            f"task {spec.task}: vLLM can't on this model: it has the tasks {', '.join(known)}, not"
            f" {task}"
        )
    try:
        pooling_params(spec).verify(config.model_config)
    except ValueError as error:
        raise SpecError(f"embedding: vLLM refuses it: {error}") from error
    size = spec.embedding.dimensions or config.model_config.embedding_size
    if job.answers.embedding_size not in (None, size):
        raise SpecError(
            f"model {spec.model.path}: its embeddings have {size} numbers here, but"
            f" {job.answers.embedding_size} by the files that the plan has read"
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
    from batchllm_operator.vllm_plugin.attention.report import report_attention, warm_up_attention

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
