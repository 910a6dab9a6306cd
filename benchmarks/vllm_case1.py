"""The paper's case 1 through a real vLLM: 3,000 prompts of about 1,530 tokens, 7 of which share a
document of 1,100.

The model has Mistral-7B's shape and random weights, and every output is 100 tokens long, so that
all variants do the same work whatever a model would say. One variant a process:

    stock_as_given  vLLM as it is, on prompts in random order
    stock_sorted    vLLM as it is, on prompts in the order of their prefixes
    batchllm        the same order, with our scheduler and what the plan says of each request

    python -m benchmarks.vllm_case1 stock_sorted --json stock_sorted.json
    python -m benchmarks.vllm_case1 batchllm --engine-args '{"max_num_seqs": 512}'
    python -m benchmarks.vllm_case1 batchllm --tiny          # a few small prompts, on a CPU
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.provenance import provenance

VARIANTS = ("stock_as_given", "stock_sorted", "batchllm")
MISTRAL_7B = {
    "architectures": ["MistralForCausalLM"],
    "model_type": "mistral",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 32000,
    "max_position_embeddings": 32768,
    "sliding_window": None,
    "rope_theta": 10000.0,
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "torch_dtype": "bfloat16",
}
TINY = {
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "vocab_size": 512,
    "max_position_embeddings": 4096,
}


@dataclass(frozen=True, slots=True)
class Case:
    """Sizes in tokens, but the first two."""

    num_requests: int = 3000
    degree: int = 7
    instruction: int = 30
    document: int = 1100
    distinct: int = 400
    output: int = 100

    def prompts(self, vocab_size: int, seed: int) -> list[tuple[int, list[int]]]:
        """(document, token ids) of each prompt, in random order."""
        rng = np.random.default_rng(seed)

        def tokens(count: int) -> list[int]:
            return [int(token) for token in rng.integers(3, vocab_size, count)]

        instruction = tokens(self.instruction)
        num_documents = -(-self.num_requests // self.degree)
        documents = [instruction + tokens(self.document) for _ in range(num_documents)]
        which = rng.permutation(np.arange(self.num_requests) // self.degree).tolist()
        return [(number, documents[number] + tokens(self.distinct)) for number in which]


def request_params(case: Case, prompts: list[tuple[int, list[int]]], variant: str) -> Iterator[Any]:
    """Sampling parameters of each prompt; ours say what a plan knows of it."""
    from vllm import SamplingParams

    sizes = np.bincount([document for document, _ in prompts]).tolist()
    for document, _ in prompts:
        params = SamplingParams(
            max_tokens=case.output, temperature=0.0, ignore_eos=True, detokenize=False
        )
        if variant == "batchllm":
            from batchllm_operator.vllm_plugin.hints import RequestHints

            params.extra_args = RequestHints(
                group_id=document,
                num_prefix_tokens=case.instruction + case.document,
                group_size=sizes[document],
                num_output_tokens=case.output,
            ).to_extra_args()
        yield params


def engine_args(case: Case, variant: str, model: Path) -> dict[str, Any]:
    """vLLM's arguments: its defaults, but for what every variant needs."""
    args: dict[str, Any] = {
        "model": str(model),
        "skip_tokenizer_init": True,
        "load_format": "dummy",
        "enable_prefix_caching": True,
        "max_model_len": case.instruction + case.document + case.distinct + case.output,
        "disable_log_stats": True,
    }
    if variant == "batchllm":
        from batchllm_operator.vllm_plugin.hints import SchedulerSettings

        settings = SchedulerSettings(num_requests=case.num_requests)
        args |= {
            "scheduler_cls": "batchllm_operator.vllm_plugin.scheduler.BatchLLMScheduler",
            "additional_config": settings.to_additional_config(),
            "max_num_seqs": 1024,  # as the engine sets it: memory decides
        }
    return args


def run(case: Case, variant: str, model: dict[str, Any], args: argparse.Namespace) -> Any:
    """Generate everything and say how long that took."""
    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    from vllm import LLM
    from vllm.inputs import TokensPrompt

    prompts = case.prompts(model["vocab_size"], args.seed)
    if variant != "stock_as_given":
        prompts.sort(key=lambda prompt: prompt[0])
    params = list(request_params(case, prompts, variant))
    inputs = [TokensPrompt(prompt_token_ids=token_ids) for _, token_ids in prompts]
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(model))
        llm = LLM(**engine_args(case, variant, Path(folder)) | args.engine_args)
    # Kernels are compiled and graphs captured by now; the first requests warm up what is left.
    warmup = [TokensPrompt(prompt_token_ids=[3 + i] * case.distinct) for i in range(4)]
    llm.generate(warmup, next(request_params(case, prompts, "stock_sorted")), use_tqdm=False)
    started_at = time.perf_counter()
    outputs = llm.generate(inputs, params, use_tqdm=False)
    generate_s = time.perf_counter() - started_at
    num_output = sum(len(output.outputs[0].token_ids) for output in outputs)
    if len(outputs) != case.num_requests or num_output != case.num_requests * case.output:
        raise RuntimeError(f"{len(outputs)} outputs of {num_output} tokens: not what was asked for")
    num_prompt = sum(len(token_ids) for _, token_ids in prompts)
    num_cached = sum(output.num_cached_tokens or 0 for output in outputs)
    return {
        "generate_s": round(generate_s, 3),
        "requests_per_s": round(case.num_requests / generate_s, 3),
        "prompt_tokens": num_prompt,
        "computed_prompt_tokens": num_prompt - num_cached,
        "saving_ratio": round(num_cached / num_prompt, 4),
        "output_tokens": num_output,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    parser.add_argument("variant", choices=VARIANTS)
    parser.add_argument("--num-requests", type=int)
    parser.add_argument("--tiny", action="store_true", help="a tiny model and 12 small prompts")
    parser.add_argument("--engine-args", type=json.loads, default={}, metavar="JSON")
    parser.add_argument("--json", type=Path, help="also write the JSON object here")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    case = Case(12, 4, 8, 64, 24, 5) if args.tiny else Case()
    if args.num_requests:
        case = Case(args.num_requests)
    model = MISTRAL_7B | TINY if args.tiny else MISTRAL_7B
    report = {
        "benchmark": "vllm_case1",
        "variant": args.variant,
        "num_requests": case.num_requests,
        **run(case, args.variant, model, args),
        "engine_args": args.engine_args,
        "model": "tiny" if args.tiny else "Mistral-7B's shape, dummy weights",
        "seed": args.seed,
        **provenance(),
    }
    if args.json:
        args.json.write_text(json.dumps(report))
    print(json.dumps(report), flush=True)


if __name__ == "__main__":
    main()
