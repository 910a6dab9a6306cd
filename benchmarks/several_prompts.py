"""Four prompts of each document in one job, in a job for each, and in stock vLLM, without a GPU.

Plans are those of `plan_job`, over made-up documents whose tokens are bytes, with one shard. vLLM's
own scheduler, as it is or with ours on top, plays them step by step; the time of a step is a
roofline's, of Mistral-7B on one H100. Answers take as many tokens as their prompts allow. Stock
vLLM gets all prompts of the job at once, sorted or shuffled, or each job's on their own.

    python -m benchmarks.several_prompts
"""

import argparse
import json
import string
import tempfile
from pathlib import Path
from typing import Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from batchllm_operator import plan_job
from batchllm_operator.inspect.simulations import (
    SimulationOptions,
    shard_to_simulate,
    simulate_policies,
)
from batchllm_operator.spec import JobSpec, load_spec
from benchmarks.provenance import print_last_line, provenance
from benchmarks.task_speed import PROMPTS

DS: Final = "2026-01-31"
_RELEVANT: Final = {**PROMPTS["relevant"], "labels": {"yes": "y", "no": "n"}}  # tokens of one byte
POLICIES: Final = ("batchllm", "stock_sorted", "stock_shuffled")
_SUMS: Final = ("steps", "predicted_s", "num_prompt_tokens", "num_computed_tokens")


def make_job(folder: Path, num_documents: int, num_tokens: int, seed: int) -> JobSpec:
    """A job over documents whose lengths vary by 15 %, up and down."""
    generator = np.random.default_rng(seed)
    letters = np.frombuffer(f"{string.ascii_lowercase}    ".encode(), np.uint8)
    lengths = generator.integers(num_tokens * 85 // 100, num_tokens * 115 // 100 + 1, num_documents)
    texts = [generator.choice(letters, size).tobytes().decode() for size in lengths.tolist()]
    queries = [f"what is {text[:12]}" for text in texts]
    rows = {"key": range(num_documents), "document": texts, "query": queries}
    (folder / "table" / f"ds={DS}").mkdir(parents=True)
    pq.write_table(pa.table(rows), folder / "table" / f"ds={DS}" / "rows.parquet")
    return load_spec(
        {
            "spec_version": 1,
            "name": "one_job",
            "input": {"uri": str(folder / "table"), "key": "key"},
            "prompts": {**PROMPTS, "relevant": _RELEVANT},
            "model": {"path": "no-model"},
            "engine": {"backend": "fake", "extra_args": {"byte_tokens": True}},
            "planner": {"num_shards": 1},
            "output": {"uri": str(folder / "one_job")},
        }
    )


def simulated(spec: JobSpec, policies: tuple[str, ...]) -> dict[str, dict[str, float]]:
    """Figures of a job's plan by policy; those of ours must be what was planned."""
    plan = plan_job(spec, DS)
    options = SimulationOptions(policies, gpu="H100", model="Mistral-7B")
    workload, machine = shard_to_simulate(plan.folder.uri, 0, options)
    found = {}
    for run in simulate_policies(workload, machine, options):
        num_computed = round(run.num_prompt_tokens * (1 - run.saving_ratio))
        values = (run.steps, run.predicted_s, run.num_prompt_tokens, num_computed)
        found[run.policy] = dict(zip(_SUMS, values, strict=True))
        print(f"{spec.name:10}{run.policy:16}{json.dumps(found[run.policy])}", flush=True)
    planned = plan.manifest.counts.num_planned_tokens
    if "batchllm" in found and found["batchllm"]["num_computed_tokens"] != planned:
        raise SystemExit(f"{spec.name}: {planned:,} prompt tokens were planned")
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    parser.add_argument("--documents", type=int, default=3000)
    parser.add_argument("--tokens", type=int, default=1500, help="of a document, on average")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="several-prompts-") as folder:
        spec = make_job(Path(folder), args.documents, args.tokens, args.seed)
        together, apart = simulated(spec, POLICIES), list[dict[str, dict[str, float]]]()
        for name, question in zip(spec.prompts, spec.questions, strict=True):
            output = spec.output.model_copy(update={"uri": f"{folder}/{name}"})
            job = question.model_copy(update={"name": name, "output": output})
            apart.append(simulated(job, POLICIES[:2]))
    jobs = {
        policy: {each: sum(found[policy][each] for found in apart) for each in _SUMS}
        for policy in POLICIES[:2]
    }
    figures: dict[str, Any] = {"one_job": together, "a_job_for_each_prompt": jobs}
    print_last_line({"benchmark": "several_prompts", **vars(args), **figures, **provenance()})


if __name__ == "__main__":
    main()
