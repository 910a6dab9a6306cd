"""Run as a script: generates with one attention through the engine, and counts what it reads.

    python -m support.attention_generate ATTENTION MODEL PROMPTS OUTPUTS

ATTENTION is stock, batchllm, batchllm/triton (the GPU's kernel in Triton's interpreter) or
batchllm/split (decodes by ours, prefill by vLLM's FlashAttention over a kernel in plain torch).
PROMPTS is JSON: a list of {"tokens", "group_id", "num_prefix_tokens", "group_size"}. OUTPUTS is
written as JSON: the texts, the two likeliest tokens of each place, the KV tokens that requests
asked for and those that were read, over all steps, and what was logged of the choice.
"""

import json
import logging
import sys
from pathlib import Path
from typing import Any

from support.demo_job import Demo
from support.fake_job import fake_spec
from support.flash_attention import VarlenReference, install

from batchllm_kernels.prefix_attention import StepPlan, StepPlanner
from batchllm_operator.answers.generated import TOP_FIELD
from batchllm_operator.engine import EngineJob, EngineRequest, start_engine


class ReadCounter:
    """Counts KV tokens of planned steps, as `StepPlanner.plan` hands plans out."""

    def __init__(self) -> None:
        self.num_asked = self.num_read = self.num_groups = 0
        plan = StepPlanner.plan

        def counted(planner: StepPlanner, batch: Any) -> StepPlan:
            planned = plan(planner, batch)
            self.num_asked += int(batch.seq_lens.sum())
            self.num_read += int(batch.seq_lens.sum())
            for prefix in planned.prefixes or ():
                self.num_groups += 1
                self.num_read -= (len(prefix.requests) - 1) * prefix.num_tokens
            return planned

        StepPlanner.plan = counted  # type: ignore[method-assign, assignment]


def generate_with(demo: Demo, attention: str, model: Path, folder: Path) -> dict[str, Any]:
    """What an attention gives for `prompts.json` in a folder, under our scheduler."""
    outputs = folder / f"{attention.replace('/', '-')}.json"
    name = "support.attention_generate"
    demo.run_module(name, attention, model, folder / "prompts.json", outputs)
    return dict(json.loads(outputs.read_text()))


def main(attention: str, model: str, prompts_path: str, outputs_path: str) -> None:
    logging.basicConfig(
        level=logging.INFO, format="%(message)s", filename=outputs_path + ".log", force=True
    )
    prompts = json.loads(Path(prompts_path).read_text())
    attention, _, impl = attention.partition("/")
    flash = install(setattr) if impl == "split" else VarlenReference()
    chosen = {"decode_threshold": 1} if impl == "split" else {"impl": impl}
    extra_args = {"additional_config": {"batchllm_attention": chosen}} if impl else {}
    settings = {
        "backend": "vllm",
        "dtype": "float32",
        "kv_cache_memory_bytes": 1 << 27,
        "attention": attention,
        "max_num_seqs": min(64, len(prompts)),
        "extra_args": extra_args,
    }
    sampling = {"max_tokens": 10, "logprobs": 2}
    spec = fake_spec("/lake", engine=settings, model={"path": model}, sampling=sampling)
    counter = ReadCounter()
    engine = start_engine(spec, EngineJob(640, num_requests=len(prompts)))
    requests = (
        EngineRequest(
            idx,
            prompt["tokens"],
            prompt["group_id"],
            prompt["num_prefix_tokens"],
            group_size=prompt["group_size"],
        )
        for idx, prompt in enumerate(prompts)
    )
    outputs = {output.request_idx: output for output in engine.stream(requests)}
    engine.close()
    found = {
        "texts": [(outputs[idx].text, outputs[idx].error) for idx in range(len(prompts))],
        "places": [outputs[idx].raw[TOP_FIELD.name] for idx in range(len(prompts))],
        "num_asked": counter.num_asked,
        "num_read": counter.num_read,
        "num_groups": counter.num_groups,
        "prefilled": sorted({length for call in flash.query_lens for length in call}),
        "log": Path(outputs_path + ".log").read_text().splitlines(),
    }
    Path(outputs_path).write_text(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
