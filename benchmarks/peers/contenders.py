"""One way to run a table through vLLM: `python -m benchmarks.peers.contenders NAME JOB`.

JOB is a file of JSON, `Job`. Each contender is used as its documentation says, with all that it
offers against bad rows and stops. Started again after a kill, it goes on if it can.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, Final

import pyarrow as pa
import pyarrow.parquet as pq

DS: Final = "2026-01-31"
_BATCH: Final = 32
"""Rows of a block or chunk where a contender keeps whole ones."""


@dataclass(frozen=True, slots=True)
class Job:
    """What every contender does alike."""

    table: str
    """Its partition `DS` is one file of rows with the columns `id` and `prompt`."""
    out: str
    """A folder for answers, see `texts_of`."""
    model: str
    max_tokens: int
    engine: dict[str, Any]
    """Arguments of vLLM, by the names of `EngineArgs`."""

    @property
    def file(self) -> str:
        return f"{self.table}/ds={DS}/rows.parquet"

    @property
    def sampling(self) -> dict[str, Any]:
        return {"temperature": 0.0, "max_tokens": self.max_tokens}

    def rows(self) -> list[dict[str, Any]]:
        return list(pq.read_table(self.file, partitioning=None).to_pylist())


def llm(job: Job, *, is_sorted: bool = False) -> None:
    """`LLM.generate`, with all prompts in one call."""
    from vllm import LLM, SamplingParams

    rows = job.rows()
    if is_sorted:
        rows.sort(key=lambda row: row["prompt"] or "")
    prompts, params = [row["prompt"] for row in rows], SamplingParams(**job.sampling)
    outputs = LLM(job.model, **job.engine).generate(prompts, params, use_tqdm=False)
    texts = [output.outputs[0].text for output in outputs]
    table = pa.table({"id": [row["id"] for row in rows], "text": texts})
    pq.write_table(table, f"{job.out}/texts/all.parquet")


def run_batch(job: Job) -> None:
    """`vllm run-batch`, whose prompts are messages: the template leaves them as they are."""
    template = ["--chat-template", "{{ messages[0]['content'] }}"]

    def messages(prompt: str) -> dict[str, Any]:
        return {"messages": [{"role": "user", "content": prompt}]}

    _batch(job, ["vllm", "run-batch", *template], "/v1/chat/completions", messages)


def our_batch(job: Job) -> None:
    """`batchllm run-batch`, which takes prompts as they are, too."""
    command = ["batchllm", "run-batch", "--work", f"{job.out}/work"]
    _batch(job, command, "/v1/completions", lambda prompt: {"prompt": prompt})


def _batch(job: Job, command: list[str], url: str, asked: Callable[[Any], dict[str, Any]]) -> None:
    """Write the rows as a batch file, and become the command for it."""
    with Path(job.out, "batch").open("w", encoding="utf-8") as file:
        for row in job.rows():
            body = {"model": job.model, **asked(row["prompt"]), **job.sampling}
            request = {"custom_id": row["id"], "method": "POST", "url": url, "body": body}
            file.write(json.dumps(request) + "\n")
    command += ["-i", f"{job.out}/batch", "-o", f"{job.out}/texts/all.jsonl", "--model", job.model]
    for name, value in job.engine.items():
        command += [f"--{name.replace('_', '-')}", *([] if value is True else [str(value)])]
    os.execvp(command[0], command)


def ray_data(job: Job) -> None:
    """Ray Data LLM, with checkpoints, and with errors as a column."""
    import ray
    from ray.data.checkpoint import CheckpointConfig
    from ray.data.llm import build_processor, vLLMEngineProcessorConfig

    ray.init(num_cpus=2, object_store_memory=200 << 20, include_dashboard=False)
    checkpoints = CheckpointConfig(id_column="id", checkpoint_path=f"{job.out}/checkpoints")
    ray.data.DataContext.get_current().checkpoint_config = checkpoints
    # vLLM itself tokenizes: processes for stages of their own would take the two cores from it.
    stages = dict.fromkeys(("chat_template_stage", "tokenize_stage", "detokenize_stage"), False)
    errors = {"should_continue_on_error": True, "log_engine_metrics": False}
    cores = {"placement_group_config": {"bundles": [{"CPU": 1}]}, "batch_size": _BATCH}
    config = vLLMEngineProcessorConfig(
        model_source=job.model, engine_kwargs=job.engine, **errors, **cores, **stages
    )
    sampling = job.sampling
    processor = build_processor(
        config,
        preprocess=lambda row: {**row, "sampling_params": sampling},
        postprocess=lambda row: {"id": row["id"], "text": row["generated_text"]},
    )
    rows = ray.data.read_parquet(job.file, override_num_blocks=-(-len(job.rows()) // _BATCH))
    processor(rows).write_parquet(f"{job.out}/texts")


def daft(job: Job) -> None:
    """Daft's provider `vllm-prefix-caching`, which sorts prompts into buckets."""
    from daft import col, read_parquet
    from daft.functions import prompt
    from vllm import SamplingParams

    args = {"sampling_params": SamplingParams(**job.sampling)}
    options = {"engine_args": job.engine, "generate_args": args}
    text = prompt(col("prompt"), provider="vllm-prefix-caching", model=job.model, **options)
    rows = read_parquet(job.file).with_column("text", text)
    rows.select("id", "text").write_parquet(f"{job.out}/texts")


def datatrove(job: Job) -> None:
    """datatrove's inference with a server of vLLM, checkpoints, and bad requests skipped."""
    from datatrove.data import Document
    from datatrove.executor import LocalPipelineExecutor
    from datatrove.pipeline.inference.run_inference import InferenceConfig, InferenceRunner
    from datatrove.pipeline.writers import JsonlWriter

    async def ask(document: Any, generate: Callable[[dict[str, Any]], Any]) -> str:
        return str((await generate({"prompt": document.text})).text)

    def answer(_: Any, document: Any) -> dict[str, str]:
        return {"id": document.id, "text": document.metadata["rollout_results"][0]}

    engine = {name.replace("_", "-"): value for name, value in job.engine.items()}
    server: dict[str, Any] = {"server_ready_delay_sec": 0.5, "server_ready_max_attempts": 600}
    server |= {"model_max_context": engine.pop("max-model-len"), "use_chat": False}
    server |= {"default_generation_params": job.sampling, "model_kwargs": engine}
    config = InferenceConfig("vllm", job.model, **server)
    name = "${rank}_${chunk_index}.jsonl"
    writer = JsonlWriter(f"{job.out}/texts", name, compression=None, adapter=answer)
    kept = {"checkpoints_local_dir": f"{job.out}/checkpoints", "records_per_chunk": _BATCH}
    runner = InferenceRunner(ask, config, writer, **kept, skip_bad_requests=True)
    rows = [Document(text=row["prompt"], id=row["id"]) for row in job.rows()]
    LocalPipelineExecutor([rows, runner], logging_dir=f"{job.out}/logs").run()


def ours(job: Job) -> None:
    """Plan, run and commit; notes how long the first and the last take."""
    from batchllm_operator import commit_run, load_spec, plan_job, run_worker

    fields: dict[str, Any] = {"spec_version": 1, "name": "peers", "engine": job.engine}
    fields |= {"input": {"uri": job.table, "key": "id"}, "output": {"uri": f"{job.out}/texts"}}
    fields |= {"prompt": {"template": "{prompt}"}, "model": {"path": job.model}}
    fields |= {"sampling": {"max_tokens": job.max_tokens}}
    import_module("batchllm_operator.engine.vllm.engine")  # the times of others lack it, too
    times = [time.perf_counter()]
    plan = plan_job(load_spec(fields), DS)
    times.append(time.perf_counter())
    run_worker(plan, owner="peers")
    times.append(time.perf_counter())
    commit_run(plan)
    seconds = {"plan_s": times[1] - times[0], "commit_s": time.perf_counter() - times[2]}
    Path(job.out, "stages.json").write_text(json.dumps(seconds), encoding="utf-8")


CONTENDERS: Final[dict[str, Callable[[Job], None]]] = {
    "llm": llm,
    "llm_sorted": lambda job: llm(job, is_sorted=True),
    "run_batch": run_batch,
    "our_batch": our_batch,
    "ray": ray_data,
    "daft": daft,
    "datatrove": datatrove,
    "ours": ours,
}


def texts_of(out: Path) -> dict[str, str]:
    """The answers that a contender has left, by `id`; rows with an error have none."""
    rows: list[dict[str, Any]] = []
    for file in out.glob("texts/**/*.parquet"):
        if "_batchllm" not in file.parts:
            rows += pq.read_table(file, partitioning=None).to_pylist()
    for file in out.glob("texts/**/*.jsonl"):
        rows += map(json.loads, file.read_text(encoding="utf-8").splitlines())
    # A line of OpenAI's batch format has an `id` of its own, too.
    texts = {str(row.get("custom_id", row.get("id"))): _text(row) for row in rows}
    return {key: text for key, text in texts.items() if text is not None}


def _text(row: dict[str, Any]) -> str | None:
    if "response" in row:
        [choice] = ((row["response"] or {}).get("body") or {}).get("choices") or [{}]
        text = choice.get("text", choice.get("message", {}).get("content"))
    else:
        text = row["generated_text"] if "generated_text" in row else row["text"]
    return None if text is None else str(text)


if __name__ == "__main__":
    CONTENDERS[sys.argv[1]](Job(**json.loads(Path(sys.argv[2]).read_text(encoding="utf-8"))))
