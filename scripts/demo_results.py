"""What the demo's two jobs have answered, and what sharing has saved.

    python scripts/demo_results.py FOLDER SPEC

FOLDER has `daily_snippets.json` and `offline_ranking.json`: what `batchllm job --result` gave.
SPEC is the spec of daily_snippets. The saving is against stock vLLM with the spec's engine settings
and the table's rows in their order. Its prompt tokens are counted by its scheduler, which is played
over all rows with the lengths of the job's answers. Its seconds are measured on some rows in the
middle of such a run, and extrapolated to all.
"""

import json
import sys
import textwrap
import time
from pathlib import Path
from typing import Any, Final

import numpy as np
import pyarrow.parquet as pq

import batchllm_operator.engine.vllm  # noqa: F401 (vLLM is set up as for a job)
from batchllm_operator.spec import JobSpec, load_spec

SHOWN_QUERY: Final = "testing code"
FIRST_TIMED, LAST_TIMED = 0.1, 0.4
"""Shares of the rows that stock vLLM has finished when the clock starts and when it stops. By the
first its cache is full, and after the last it still has work for full batches."""
_WIDTH: Final = 100


def main(folder: Path, spec: JobSpec) -> None:
    snippets, ranking = (
        json.loads((folder / f"{job}.json").read_text())
        for job in ("daily_snippets", "offline_ranking")
    )
    documents = _rows(spec.input.uri, snippets["ds"])
    answers, grades = (
        {_key(row): row for row in _rows(job["table_uri"], snippets["ds"])}
        for job in (snippets, ranking)
    )
    _print_ranked(
        [
            {**row, "answer": answer["generated_text"], "score": grade["score"]}
            for row in documents
            for answer, grade in [(answers[_key(row)], grades[_key(row)])]
            if row["query"] == SHOWN_QUERY and answer["error"] is None and grade["error"] is None
        ]
    )
    _print_saving(spec, snippets, [(row, answers[_key(row)]) for row in documents])
    print(f"report  {snippets['report_uri'].removesuffix('.json')}.html")


def _rows(uri: str, ds: str) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = pq.read_table(f"{uri}/ds={ds}", partitioning=None).to_pylist()
    return rows


def _key(row: dict[str, Any]) -> str:
    return str(row["snippet_id"])


def _print_ranked(rows: list[dict[str, Any]]) -> None:
    """The first, the middle and the last by score."""
    rows = sorted(rows, key=lambda row: -row["score"])
    print(f"\n{SHOWN_QUERY}: the first, the middle and the last of {len(rows)} ranked documents")
    for row in (rows[:1] + rows[len(rows) // 2 :][:1] + rows[-1:]) if rows else []:
        shown = {
            "document": textwrap.shorten(f"({row['package']}) {row['document']}", 200),
            "answer": row["answer"],
            "score": f"{row['score']:.2f}",
        }
        print()
        for name, text in shown.items():
            lines = textwrap.wrap(text, _WIDTH - 12) or [""]
            print(f"  {name:<9} " + f"\n{'':12}".join(lines))


def _print_saving(
    spec: JobSpec, job: dict[str, Any], rows: list[tuple[dict[str, Any], dict[str, Any]]]
) -> None:
    """The job against stock vLLM, for rows of the table with their answers."""
    print("\nmeasuring stock vLLM on some rows of daily_snippets", flush=True)
    stock = _Stock(spec)
    prompts = [stock.prompt(row) for row, _ in rows]
    lengths = [answer["num_output_tokens"] or 1 for _, answer in rows]
    num_computed = stock.count_computed(prompts, lengths)
    num_timed, seconds, texts = stock.run(prompts)
    stock_s = seconds / num_timed * len(rows)
    num_equal = sum(rows[idx][1]["generated_text"] == text for idx, text in texts.items())
    print(
        "daily_snippets: stock vLLM with the same settings, rows in the table's order -> this run\n"
        f"  prompt tokens computed  {num_computed:,} -> {job['num_computed_tokens']:,}\n"
        f"  seconds of generating   {stock_s:,.0f} -> {job['engine_s']:,.0f}\n"
        f"  equal texts             {num_equal} of {len(texts)}\n"
        f"Stock vLLM's scheduler counts its tokens, over all {len(rows)} rows. Its seconds are"
        f" extrapolated\nfrom {num_timed} rows in {seconds:.0f} s. Other work on this machine slows"
        " both."
    )


class _Stock:
    """Stock vLLM with a spec's engine settings."""

    def __init__(self, spec: JobSpec) -> None:
        from vllm import LLM

        from batchllm_operator.engine.vllm.start import engine_args

        engine = spec.engine.model_copy(update={"scheduler": "stock"})
        assert engine.max_model_len is not None
        args = engine_args(spec.model_copy(update={"engine": engine}), engine.max_model_len)
        self._spec, self._llm = spec, LLM(**args)

    def prompt(self, row: dict[str, Any]) -> list[int]:
        """The token ids of a row's prompt."""
        tokenizer: Any = self._llm.get_tokenizer()
        assert self._spec.prompt.template is not None
        messages = [
            {"role": "system", "content": self._spec.prompt.system},
            {"role": "user", "content": self._spec.prompt.template.format_map(row)},
        ]
        return list(
            tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
        )

    def count_computed(self, prompts: list[list[int]], lengths: list[int]) -> int:
        """Prompt tokens computed for outputs of these lengths."""
        # Not before vLLM has started, whose search for kernels stumbles over numba's functions.
        from batchllm_operator.cost import MODEL_SHAPES, find_gpu
        from batchllm_operator.prefixes import TokenTable
        from batchllm_operator.simulate.machine import Machine, Policy
        from batchllm_operator.simulate.vllm_scheduling import simulate
        from batchllm_operator.simulate.workload import Workload

        config = self._llm.llm_engine.vllm_config
        assert config.cache_config.num_gpu_blocks is not None
        machine = Machine(
            MODEL_SHAPES["Mistral-7B"],  # the model and the GPU change predicted times alone
            find_gpu("H100"),
            num_blocks=config.cache_config.num_gpu_blocks,
            block_size=config.cache_config.block_size,
            max_num_batched_tokens=config.scheduler_config.max_num_batched_tokens,
            max_num_seqs=config.scheduler_config.max_num_seqs,
        )
        ids, outputs = np.arange(len(prompts)), np.array(lengths)
        workload = Workload(
            *("the table as given", TokenTable.from_lists(prompts), ids, np.zeros_like(ids)),
            *(outputs, outputs),
            max_output_tokens=self._spec.sampling.max_tokens,
        )
        run = simulate(workload, Policy("stock vLLM's scheduler"), machine)
        return int(run.timeline.num_distinct_tokens.sum() + run.timeline.num_prefix_tokens.sum())

    def run(self, prompts: list[list[int]]) -> tuple[int, float, dict[int, str]]:
        """Rows timed, their seconds, and the texts of all rows that have ended, by number."""
        from vllm import RequestOutput, SamplingParams
        from vllm.sampling_params import RequestOutputKind

        sampling = SamplingParams(
            temperature=0.0,
            max_tokens=self._spec.sampling.max_tokens,
            stop=list(self._spec.sampling.stop),
            output_kind=RequestOutputKind.FINAL_ONLY,
        )
        engine = self._llm.llm_engine
        self._llm.generate({"prompt_token_ids": [0] * 16}, sampling, use_tqdm=False)  # warms up
        for idx, prompt in enumerate(prompts):
            engine.add_request(str(idx), {"prompt_token_ids": prompt}, sampling)
        texts: dict[int, str] = {}

        def finish(share: float) -> tuple[int, float]:
            while len(texts) < share * len(prompts):
                for output in engine.step():
                    assert isinstance(output, RequestOutput)
                    texts[int(output.request_id)] = output.outputs[0].text
            return len(texts), time.perf_counter()

        num_before, begun = finish(FIRST_TIMED)
        num_after, ended = finish(LAST_TIMED)
        return num_after - num_before, ended - begun, texts


if __name__ == "__main__":
    main(Path(sys.argv[1]), load_spec(Path(sys.argv[2])))
