"""The whole plan stage against tokenizing all prompts plainly: `python -m benchmarks.plan_stage`.

The table is shaped like the paper's case 1: seven rows ask about the same document, each in its own
words, in random order. Words come from real documents, each as often as there; documents and
questions are passages from random places. The byte-level BPE tokenizer is trained here. On one
core and on all, set by affinity, and one after the other, two processes of their own

    tokenize    `encode_batch_fast` of `tokenizers` over the first `--plain-prompts` prompts
    plan        `plan_job`: Parquet table -> tokenizer loaded -> token ids -> plan on disk

take wall and CPU seconds of each repetition (CPU seconds are those of all threads together), after
a run over a small table that imports and compiles. `peak_bytes` is what the kernel says the process
of plan has held at most, and must be within the job's memory budget. The ids of these prompts in
the plan are compared with the plain ones, and the plans' files with those made with other numbers
of cores: there are no figures if any differ.
"""

import argparse
import hashlib
import json
import logging
import multiprocessing
import os
import random
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from demo_table import demo_documents
from tokenizers import Regex, Tokenizer, models, pre_tokenizers, trainers
from transformers import Qwen2Tokenizer

from batchllm_operator.plan.plan_job import plan_job
from batchllm_operator.spec import JobSpec
from benchmarks.memory import peak_rss_bytes
from benchmarks.provenance import print_last_line, provenance

DS: Final = "2026-01-31"
SYSTEM: Final = "Answer the question about the document.\n\n"
TEMPLATE: Final = "{document}\n\nQuestion: {question}\nAnswer:"
BATCH: Final = 1024  # prompts a call; the baseline's best of 256 to 4096
POOL_CHARS: Final = 64 << 20
WRITE_ROWS: Final = 4096
WARM_UP_ROWS: Final = 200
NUM_SHARDS: Final = 4
SHARE_DEGREE: Final = 7
"""Prompts of a document."""
DOCUMENT_TOKENS: Final = 1100
QUESTION_TOKENS: Final = 400
# How Qwen2 splits text.
PATTERN: Final = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
CONFIG: Final = {"model_type": "qwen2", "max_position_embeddings": 4096}


def train_tokenizer(texts: Sequence[str]) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PATTERN), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    trainer = trainers.BpeTrainer(
        vocab_size=30_000,
        special_tokens=["<|endoftext|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def make_text(texts: Sequence[str], num_chars: int, generator: random.Random) -> str:
    """Words of `texts`, each as often as there: the tokenizer sees no more than one at a time."""
    words = [word for text in texts for word in text.split(" ")]
    chars_per_word = sum(map(len, words)) / len(words) + 1
    return " ".join(generator.choices(words, k=1 + int(num_chars / chars_per_word)))


def make_table(num_prompts: int, texts: Sequence[str], tokenizer: Tokenizer, lake: Path) -> None:
    """Write the table `documents` and a beginning of it, `warm-up`, into `lake`."""
    generator = random.Random(0)
    num_documents = -(-num_prompts // SHARE_DEGREE)
    num_tokens = num_documents * DOCUMENT_TOKENS + num_prompts * QUESTION_TOKENS
    pool = make_text(texts, min(POOL_CHARS, num_tokens * 6), generator)
    chars_per_token = len(pool[:200_000]) / len(tokenizer.encode(pool[:200_000]).ids)

    def take(num_tokens: int) -> str:
        num_chars = int(num_tokens * chars_per_token)
        start = generator.randrange(max(1, len(pool) - num_chars))
        return pool[start : start + num_chars]

    documents = [take(DOCUMENT_TOKENS) for _ in range(num_documents)]
    order = list(range(num_prompts))
    generator.shuffle(order)
    for name, num_rows in (("documents", num_prompts), ("warm-up", WARM_UP_ROWS)):
        partition = lake / name / f"ds={DS}"
        partition.mkdir(parents=True)
        schema = pa.schema(dict.fromkeys(("row_key", "document", "question"), pa.string()))
        with pq.ParquetWriter(partition / "data.parquet", schema) as writer:
            for start in range(0, min(num_rows, num_prompts), WRITE_ROWS):
                numbers = order[start : start + min(WRITE_ROWS, num_rows)]
                columns = [
                    [f"row-{number}" for number in numbers],
                    [documents[number // SHARE_DEGREE] for number in numbers],
                    [take(QUESTION_TOKENS) for _ in numbers],
                ]
                writer.write_table(pa.table(columns, schema=schema))


def read_prompts(lake: Path, most: int) -> Iterator[str]:
    """The first prompts of the table, in its order."""
    file = pq.ParquetFile(lake / "documents" / f"ds={DS}" / "data.parquet")
    for batch in file.iter_batches(WRITE_ROWS):
        for row in batch.to_pylist()[:most]:
            yield SYSTEM + TEMPLATE.format(**row)
        most -= batch.num_rows
        if most <= 0:
            return


def make_model(folder: Path, tokenizer: Tokenizer) -> None:
    """A model's folder as Qwen2's and Qwen3's are, without weights, which planning doesn't need."""
    model = json.loads(tokenizer.to_str())["model"]
    merges: Any = [tuple(merge) for merge in model["merges"]]
    Qwen2Tokenizer(vocab=model["vocab"], merges=merges).save_pretrained(folder)
    (folder / "config.json").write_text(json.dumps(CONFIG), encoding="utf-8")


def make_spec(lake: Path, run: str, num_shards: int | None, table: str = "documents") -> JobSpec:
    return JobSpec.model_validate(
        {
            "spec_version": 1,
            "name": "plan-stage",
            "input": {"uri": str(lake / table), "key": "row_key"},
            "prompt": {"system": SYSTEM, "template": TEMPLATE},
            "model": {"path": str(lake / "model")},
            "output": {"uri": str(lake / f"out-{run}")},
            "engine": {"extra_args": {"load_format": "dummy"}},  # the model has no weights
            "planner": {"num_shards": num_shards},
        }
    )


# Measured, each in a process of its own


def time_plans(lake: Path, args: argparse.Namespace) -> dict[str, Any]:
    plan_job(make_spec(lake, "warm-up", NUM_SHARDS, "warm-up"), DS)
    times = []
    for repetition in range(args.repetitions):
        spec = make_spec(lake, str(repetition), NUM_SHARDS)
        shutil.rmtree(lake / f"out-{repetition}", ignore_errors=True)
        times.append(timed(partial(plan_job, spec, DS)))
    budget_bytes = spec.planner.memory_budget_bytes
    return {"times_s": times, "peak_bytes": peak_rss_bytes(), "budget_bytes": budget_bytes}


def time_tokenizers(lake: Path, args: argparse.Namespace) -> dict[str, Any]:
    """Also writes the ids, for `check`."""
    tokenizer = Tokenizer.from_file(str(lake / "model" / "tokenizer.json"))
    prompts = list(read_prompts(lake, args.plain_prompts))
    ids: list[np.ndarray[Any, Any]] = []

    def run() -> None:
        ids.clear()
        for start in range(0, len(prompts), BATCH):
            batch: Any = tokenizer.encode_batch_fast(prompts[start : start + BATCH])
            ids.extend(np.asarray(encoding.ids, dtype=np.int32) for encoding in batch)

    times = [timed(run) for _ in range(args.repetitions)]
    np.savez(lake / "plain.npz", ids=np.concatenate(ids), ends=np.cumsum(list(map(len, ids))))
    return {"times_s": times}


def timed(run: Callable[[], object]) -> tuple[float, float]:
    """(wall, CPU) seconds."""
    started_at, cpu_before = time.perf_counter(), time.process_time()
    run()
    return time.perf_counter() - started_at, time.process_time() - cpu_before


MEASURES: Final = {"plan": time_plans, "tokenize": time_tokenizers}


def measure(name: str, cores: int, lake: Path, args: argparse.Namespace) -> dict[str, Any]:
    """What a process that may use so many cores measures."""
    allowed = os.sched_getaffinity(0)
    os.sched_setaffinity(0, sorted(allowed)[:cores])  # a child inherits it
    try:
        with multiprocessing.get_context("spawn").Pool(1) as pool:
            return pool.apply(MEASURES[name], (lake, args))
    finally:
        os.sched_setaffinity(0, allowed)


# Checked and reported


def check(lake: Path, num_prompts: int) -> str:
    """A digest of the plan's files; stops unless it holds the ids that plain tokenization gave."""
    plain = np.load(lake / "plain.npz")
    ids = np.split(plain["ids"], plain["ends"][:-1])
    [manifest] = (lake / "out-0").rglob("manifest.json")
    rows: list[int] = []
    for path in sorted(manifest.parent.glob("shard-*")):
        for batch in pq.ParquetFile(path).iter_batches(WRITE_ROWS):
            for row_idxs, prompt in zip(batch["row_idxs"], batch["prompt_token_ids"], strict=True):
                rows += row_idxs.as_py()
                for row_idx in row_idxs.as_py():
                    is_compared = row_idx < len(ids)
                    if is_compared and not np.array_equal(prompt.values.to_numpy(), ids[row_idx]):
                        sys.exit("token ids of the plan aren't the tokenizer's; no figures")
    if sorted(rows) != list(range(num_prompts)):
        sys.exit(f"{len(set(rows))} of {num_prompts} rows are in the plan; no figures")
    files = (path.read_bytes() for path in sorted(manifest.parent.glob("*.parquet")))
    return hashlib.sha256(b"".join(files)).hexdigest()


def measure_all(args: argparse.Namespace, lake: Path) -> list[dict[str, Any]]:
    """A row for each number of cores."""
    rows: list[dict[str, Any]] = []
    digests: set[str] = set()
    for cores in sorted({1, len(os.sched_getaffinity(0))}):
        plain = measure("tokenize", cores, lake, args)
        planned = measure("plan", cores, lake, args)
        digests.add(check(lake, args.num_prompts))
        if planned["peak_bytes"] > planned["budget_bytes"]:
            sys.exit(f"{planned['peak_bytes']} bytes are more than the memory budget; no figures")
        wall_s, cpu_s, plain_s, plain_cpu_s = (
            round(statistics.median(seconds), 3)
            for times in (planned["times_s"], plain["times_s"])
            for seconds in zip(*times, strict=True)
        )
        row = {
            "cores": cores,
            "wall_s": wall_s,
            "cpu_s": cpu_s,
            "rows_per_s": round(args.num_prompts / wall_s),
            "plain_wall_s": plain_s,
            "plain_cpu_s": plain_cpu_s,
            "plain_prompts": min(args.plain_prompts, args.num_prompts),
            **planned,
            "plain_times_s": plain["times_s"],
        }
        if args.num_prompts <= args.plain_prompts:
            row["wall_ratio"] = round(wall_s / plain_s, 3)
            row["cpu_ratio"] = round(cpu_s / plain_cpu_s, 3)
        rows.append(row)
        print(json.dumps(row), flush=True)
    if len(digests) > 1:
        sys.exit("plans made with different numbers of cores differ; no figures")
    return rows


def report(args: argparse.Namespace, rows: list[dict[str, Any]], lake: Path) -> dict[str, Any]:
    ends = np.load(lake / "plain.npz")["ends"]
    packages = ("fastokens", "tokenizers", "transformers", "pyarrow", "numba")
    return {
        "command": " ".join(["python -m benchmarks.plan_stage", *sys.argv[1:]]),
        "benchmark": "plan_stage",
        "tokens_per_prompt": round(float(ends[-1]) / len(ends), 1),
        "rows": rows,
        "ids_identical": True,  # it would have stopped
        "plans_identical": True,
        "speedup": round(rows[0]["wall_s"] / rows[-1]["wall_s"], 2),
        **{name: value for name, value in vars(args).items() if name != "json"},
        "planning_versions": {name: version(name) for name in packages},
        **provenance(),
    }


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--num-prompts", type=int, default=7000)
    parser.add_argument("--plain-prompts", type=int, default=7000, help="of the baseline, at most")
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--json", type=Path, help="a file for the last line, too")
    args = parser.parse_args()
    if min(args.num_prompts, args.repetitions, args.plain_prompts) < 1:
        parser.error("prompts and repetitions must be at least 1")
    return args


def main() -> None:
    args = parse_args()
    logging.basicConfig(level=logging.WARNING, format="%(message)s")
    texts = [document.text for document in demo_documents(10**9)]
    tokenizer = train_tokenizer(texts)
    with tempfile.TemporaryDirectory(prefix="batchllm-bench-") as folder:
        lake = Path(folder)
        make_model(lake / "model", tokenizer)
        make_table(args.num_prompts, texts, tokenizer, lake)
        result = report(args, measure_all(args, lake), lake)
    print_last_line(result, args.json)


if __name__ == "__main__":
    main()
