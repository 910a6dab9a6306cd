"""Run as a script: what vLLM's own API makes of something, greedily unless it is told otherwise.

    python -m support.stock_vllm KIND MODEL INPUTS OUTPUTS

KIND is one of this module's functions, INPUTS its argument as JSON. OUTPUTS gets its result.
"""

import json
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

_NUM_BLOCKS = 24  # of 32 tokens
WITHOUT_SPACES = {"backend": "xgrammar", "disable_any_whitespace": True}
"""Of structured outputs: a random model would write spaces wherever it may."""


def start(model: str, **changes: Any) -> Any:
    from vllm import LLM

    sys.modules.pop("llvmlite.binding.ffi", None)  # vLLM stumbles over it: see VLLMEngine
    sizes = {"max_model_len": 2048, "kv_cache_memory_bytes": 1 << 28, "block_size": 32}
    return LLM(model, **{"dtype": "float32", "enforce_eager": True, **sizes, **changes})


def greedy(**changes: Any) -> Any:
    from vllm import SamplingParams

    return SamplingParams(**{"temperature": 0.0, **changes})


def texts(model: str, lists: dict[str, list[list[Any]]]) -> dict[str, list[list[Any]]]:
    """By type of the numbers, list by list: the output of each prompt (a text, or a chat).

    With its text, finish reason, tokens and their ids, and for each place the ids of the likeliest
    tokens by their texts.
    """
    found: dict[str, list[list[Any]]] = {}
    for dtype, prompts_of in lists.items():
        llm = start(model, dtype=dtype)
        found[dtype] = []
        for prompts in prompts_of:
            generate = llm.generate if isinstance(prompts[0], str) else llm.chat
            outputs = generate(prompts, greedy(max_tokens=16, logprobs=8), use_tqdm=False)
            found[dtype].append([_output(output) for output in outputs])
        del generate, llm  # never more than one is in memory
    return found


def _output(output: Any) -> dict[str, Any]:
    [first] = output.outputs
    places = list(zip(first.token_ids, first.logprobs, strict=True))
    return {
        "text": first.text,
        "finish_reason": first.finish_reason,
        "prompt_token_ids": output.prompt_token_ids,
        "token_ids": list(first.token_ids),
        "tokens": [likely[token_id].decoded_token for token_id, likely in places],
        "likely": [{at.decoded_token: key for key, at in likely.items()} for _, likely in places],
    }


def embed(model: str, prompts: list[str]) -> list[Any]:
    """The vectors of texts."""
    return [
        each.outputs.embedding
        for each in start(model, runner="pooling").embed(prompts, use_tqdm=False)
    ]


def classify(model: str, prompts: list[str]) -> list[Any]:
    """The probabilities of classes, of a model with a head for them."""
    return [
        each.outputs.probs
        for each in start(model, runner="pooling").classify(prompts, use_tqdm=False)
    ]


def answers(model: str, jobs: list[dict[str, Any]]) -> list[Any]:
    """For each prompt of each job, its completions as [text, places].

    A job has `prompts` (texts) and `sampling` (of `SamplingParams`), and maybe `adapters` (for each
    prompt the path of a LoRA adapter, or null) and `structured_outputs`. Places are null or, for
    each token, [its log-probability, [[token, log-probability] of the likeliest, in order]].
    """
    from vllm.lora.request import LoRARequest
    from vllm.sampling_params import StructuredOutputsParams

    paths = sorted({path for job in jobs for path in job.get("adapters", ()) if path})
    numbers = {path: number for number, path in enumerate(paths, start=1)}
    # On a CPU, vLLM adds the adapter in the last slot to prompts without one.
    lora = {"enable_lora": True, "max_loras": len(paths) + 1} if paths else {}
    llm = start(
        model,
        structured_outputs_config=WITHOUT_SPACES,
        enable_chunked_prefill=False,  # on a CPU, vLLM dies of a seeded prompt in pieces
        **lora,
    )
    found = []
    for job in jobs:
        sampling = greedy(**job["sampling"])
        if form := job.get("structured_outputs"):
            sampling.structured_outputs = StructuredOutputsParams(**form)
        adapters = [
            path and LoRARequest(path, numbers[path], path) for path in job.get("adapters", ())
        ]
        outputs = llm.generate(
            job["prompts"], sampling, use_tqdm=False, lora_request=adapters or None
        )
        found.append([[_completion(each) for each in output.outputs] for output in outputs])
    return found


def _completion(found: Any) -> list[Any]:
    if found.logprobs is None:
        return [found.text, None]
    places = []
    for token_id, logprobs in zip(found.token_ids, found.logprobs, strict=True):
        ranked = sorted(logprobs.values(), key=lambda each: each.rank)
        tops = [[each.decoded_token, each.logprob] for each in ranked]
        places.append([logprobs[token_id].logprob, tops])
    return [found.text, places]


def chats(model: str, calls: list[dict[str, Any]]) -> list[Any]:
    """For each call and each of its chats the prompt's token ids, finish reason, reasoning, text.

    A call is keyword arguments of `LLM.chat`, with `max_tokens`, and `plugin` for a file of a
    reasoning parser; without one the reasoning is null.
    """
    llm, found = start(model), []
    for call in calls:
        plugin = call.pop("plugin", None)
        params = greedy(max_tokens=call.pop("max_tokens"), skip_special_tokens=not plugin)
        outputs = llm.chat(sampling_params=params, use_tqdm=False, **call)
        split = _splitter(plugin, llm.get_tokenizer()) if plugin else lambda text: (None, text)
        found.append(
            [
                [output.prompt_token_ids, first.finish_reason, *split(first.text)]
                for output in outputs
                for first in output.outputs
            ]
        )
    return found


def _splitter(plugin: str, tokenizer: Any) -> Callable[[str], tuple[str | None, str]]:
    """Takes a text apart by the parser `demo`."""
    from vllm.reasoning import ReasoningParserManager

    ReasoningParserManager.import_reasoning_parser(plugin)
    parser: Any = ReasoningParserManager.get_reasoning_parser("demo")(tokenizer)

    def split(text: str) -> tuple[str | None, str]:
        reasoning, answer = parser.extract_reasoning(text, None)
        return reasoning, answer or ""

    return split


def features(model: str, given: dict[str, Any]) -> dict[str, Any]:
    """What is generated in every way that a user may ask for, and how often vLLM preempted.

    Given are `prompts` (each with its `tokens` and the fields of its hints), two LoRA adapters'
    paths as `lora`, and the `scheduler_cls`, null for vLLM's own.
    """
    from vllm.lora.request import LoRARequest

    common = {"max_num_seqs": 64, "max_model_len": 640, "scheduler_cls": given["scheduler_cls"]}
    common["kv_cache_memory_bytes"] = 1 << 28
    generate = partial(_generate, given["prompts"])
    # In turn, so that never more than one is in memory.
    found: dict[str, Any] = {}
    llm = start(model, num_gpu_blocks_override=_NUM_BLOCKS, **common)
    preempted = _count_preemptions(llm)
    found["tight_memory"] = generate(llm, max_tokens=64, logprobs=2)
    found["num_preemptions"] = len(preempted)
    del llm
    llm = start(model, enable_lora=True, max_loras=1, max_lora_rank=8, **common)
    found["stop_strings"] = generate(llm, 40, stop=["e", "th"], max_tokens=48)
    found["without_lora"] = generate(llm, 40, max_tokens=12)
    # Two that can't be in one step. (vLLM's CPU kernels give an adapter to requests without one
    # if they meet in a step, so they aren't mixed here.)
    adapters = [LoRARequest(path, idx, path) for idx, path in enumerate(given["lora"], start=1)]
    found["lora"] = generate(llm, 40, lora=[*adapters * 20], max_tokens=12)
    del llm
    ngram = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 3}
    most = 4 * _NUM_BLOCKS
    llm = start(model, speculative_config=ngram, num_gpu_blocks_override=most, **common)
    found["speculative_decoding"] = generate(llm, 60)
    return found


def _generate(
    prompts: list[dict[str, Any]],
    llm: Any,
    num: int | None = None,
    lora: Any = None,
    **changes: Any,
) -> Any:
    """All that there is to see of the outputs of the first prompts."""
    from batchllm_operator.vllm_plugin.scheduler.hints import RequestHints

    sampling = {"max_tokens": 24, **changes}
    tokens = [{"prompt_token_ids": prompt["tokens"]} for prompt in prompts[:num]]
    hints = [
        RequestHints(
            prompt["group_id"],
            prompt["num_prefix_tokens"],
            prompt["group_size"],
            num_output_tokens=sampling["max_tokens"],
        )
        for prompt in prompts[:num]
    ]
    params = [greedy(**sampling, extra_args=each.to_extra_args()) for each in hints]
    outputs = llm.generate(tokens, params, lora_request=lora, use_tqdm=False)
    names = ("text", "finish_reason", "stop_reason")
    return [
        [
            {
                **{name: getattr(each, name) for name in names},
                "token_ids": list(each.token_ids),
                "logprobs": each.logprobs
                and [{str(key): at.logprob for key, at in step.items()} for step in each.logprobs],
            }
            for each in output.outputs
        ]
        for output in outputs
    ]


def _count_preemptions(llm: Any) -> list[str]:
    """A list that grows with each preempted request."""
    scheduler = llm.llm_engine.engine_core.engine_core.scheduler
    preempt, preempted = scheduler._preempt_request, []

    def counted(request: Any, *args: Any, **kwargs: Any) -> None:
        preempted.append(request.request_id)
        preempt(request, *args, **kwargs)

    scheduler._preempt_request = counted
    return preempted


if __name__ == "__main__":
    kind, model, inputs_path, outputs_path = sys.argv[1:]
    result = globals()[kind](model, json.loads(Path(inputs_path).read_text()))
    Path(outputs_path).write_text(json.dumps(result))
