"""The whole plan stage against tokenizing all prompts plainly: `python -m benchmarks.plan_stage`.

The table is shaped like the paper's case 1: `--share-degree` rows ask about the same document, each
in its own words, in random order. Text comes from a chain of word pairs learnt from real
documents, so it looks like text and repeats little; the byte-level BPE tokenizer is trained here.
Each repetition times, in this process and one after the other,

    wall_s               plan_job: Parquet table -> tokenizer loaded -> token ids -> plan on disk
    shared_wall_s        of it, the token ids alone, by the job's tokenizer
    tokenize_all_wall_s  encode_batch of all prompts by the tokenizers library
    encode_batch_fast_wall_s    the same by its faster call, which leaves out offsets

and a further plan, `steps_s`, says where the time goes: steps of plan_job, and inside `read rows`
those of each batch. `cpu_s` are the medians of what all threads together took, which other work on
the machine changes less. Every prompt's token ids in the plan are compared with the plain ones.
All use all cores.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import platform
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any, Final
from unittest.mock import patch

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from tokenizers import Regex, Tokenizer, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from batchllm_operator.demo.documents import demo_documents
from batchllm_operator.pipeline import plan
from batchllm_operator.pipeline.plan import plan_job
from batchllm_operator.planner import PrefixSearch, PromptStore, TokenTable
from batchllm_operator.prompts import PromptRenderer, load_tokenizer
from batchllm_operator.prompts.tokenizer import ModelTokenizer
from batchllm_operator.spec import JobSpec

DS: Final = "2026-01-31"
SYSTEM: Final = "Answer the question about the document.\n\n"
TEMPLATE: Final = "{document}\n\nQuestion: {question}\nAnswer:"
BATCH: Final = 1024  # prompts a call; the baseline's best of 256 to 4096
# How Qwen2 splits text.
PATTERN: Final = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
CONFIG: Final = {"model_type": "qwen2", "max_position_embeddings": 4096}


def train_tokenizer(texts: Sequence[str], vocab_size: int) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PATTERN), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=["<|endoftext|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


class TextSource:
    """Endless text: each word followed by one that followed it in `texts`."""

    def __init__(self, texts: Sequence[str], seed: int) -> None:
        self._random = random.Random(seed)
        self._words = [word for text in texts for word in text.split(" ")]
        self._next: defaultdict[str, list[str]] = defaultdict(list)
        for word, following in zip(self._words, self._words[1:], strict=False):
            self._next[word].append(following)

    def take(self, num_chars: int) -> str:
        words: list[str] = []
        length = 0
        while length < num_chars:
            following = self._next.get(words[-1]) if words else None
            word = self._random.choice(following or self._words)
            words.append(word)
            length += len(word) + 1
        return " ".join(words)

    def shuffle(self, rows: list[dict[str, str]]) -> None:
        self._random.shuffle(rows)


def make_rows(args: argparse.Namespace, texts: Sequence[str], tokenizer: Tokenizer) -> list[str]:
    """Write the table into `args.lake`; return the prompts in its order."""
    source = TextSource(texts, args.seed)
    sample = source.take(200_000)
    chars_per_token = len(sample) / len(tokenizer.encode(sample).ids)
    rows = []
    for idx in range(args.num_prompts):
        if idx % args.share_degree == 0:
            document = source.take(int(args.shared_tokens * chars_per_token))
        question = source.take(int(args.distinct_tokens * chars_per_token))
        rows.append({"row_key": f"row-{idx}", "document": document, "question": question})
    source.shuffle(rows)
    partition = args.lake / "documents" / f"ds={DS}"
    partition.mkdir(parents=True)
    pq.write_table(pa.Table.from_pylist(rows), partition / "data.parquet")
    return [SYSTEM + TEMPLATE.format(**row) for row in rows]


def make_model(folder: Path, tokenizer: Tokenizer) -> None:
    """A model's folder without weights, which planning doesn't need."""
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|endoftext|>")
    fast.save_pretrained(folder)
    (folder / "config.json").write_text(json.dumps(CONFIG), encoding="utf-8")


def make_spec(lake: Path, run: str) -> JobSpec:
    return JobSpec.model_validate(
        {
            "spec_version": 1,
            "name": "plan-stage",
            "input": {"uri": str(lake / "documents"), "key": "row_key"},
            "prompt": {"system": SYSTEM, "template": TEMPLATE},
            "model": {"path": str(lake / "model")},
            "output": {"uri": str(lake / f"out-{run}")},
        }
    )


def tokenize_all(encode_batch: Callable[..., Any], prompts: Sequence[str]) -> list[list[int]]:
    ids: list[list[int]] = []
    for start in range(0, len(prompts), BATCH):
        ids.extend(each.ids for each in encode_batch(prompts[start : start + BATCH]))
    return ids


def tokenize_shared(spec: JobSpec, prompts: Sequence[str]) -> list[TokenTable]:
    tokenizer = load_tokenizer(spec, DS)
    # The rows of a batch in the plan stage.
    return [tokenizer.encode(prompts[at : at + 4096]) for at in range(0, len(prompts), 4096)]


def time_steps(spec: JobSpec) -> dict[str, float]:
    """Seconds of each step of a plan, those of a batch indented."""
    steps = {
        "load tokenizer": (plan, "load_tokenizer"),
        "read rows": (plan, "read_rows"),
        "- render": (PromptRenderer, "render"),
        "- tokenize": (ModelTokenizer, "encode"),
        "- store": (PromptStore, "append"),
        "- add to search": (PrefixSearch, "add"),
        "sort prompts": (plan, "_find_prefixes"),
        "choose groups": (plan, "arrange"),
        "write shards": (plan, "write_shards"),
        "publish": (plan, "_persist"),
    }
    seconds = dict.fromkeys(steps, 0.0)

    def timed(name: str, run: Callable[..., Any]) -> Callable[..., Any]:
        def wrapped(*args: Any, **options: Any) -> Any:
            started_at = time.perf_counter()
            result = run(*args, **options)
            seconds[name] += time.perf_counter() - started_at
            return result

        return wrapped

    with ExitStack() as stack:
        for name, (owner, attribute) in steps.items():
            run = timed(name, getattr(owner, attribute))
            stack.enter_context(patch.object(owner, attribute, run))
        plan_job(spec, DS)
    return {name: round(value, 3) for name, value in seconds.items()}


def check(spec: JobSpec, plain: TokenTable) -> None:
    """Stop unless the plan just made holds each row's token ids in `plain`."""
    num_checked = 0
    for path in Path(spec.output.uri).rglob("shard-*.parquet"):
        for batch in pq.ParquetFile(path).iter_batches():
            for rows, ids in zip(batch["row_idxs"], batch["prompt_token_ids"], strict=True):
                found = ids.values.to_numpy()
                num_checked += len(rows)
                if not all(np.array_equal(found, plain.prompt(idx)) for idx in rows.as_py()):
                    sys.exit("token ids of the plan differ from the tokenizer's own; no figures")
    if num_checked != len(plain):
        sys.exit(f"{num_checked} of {len(plain)} rows are in the plan; no figures")


def measure(args: argparse.Namespace, tokenizer: Tokenizer, prompts: list[str]) -> dict[str, Any]:
    """Seconds of each measure and repetition; stops if any token id differs."""
    times: dict[str, list[float]] = defaultdict(list)
    cpu: dict[str, list[float]] = defaultdict(list)

    def timed(name: str, run: Callable[[], Any]) -> None:
        started_at, cpu_before = time.perf_counter(), time.process_time()
        run()
        times[name].append(time.perf_counter() - started_at)
        cpu[name].append(time.process_time() - cpu_before)

    plain = TokenTable.from_lists(tokenize_all(tokenizer.encode_batch, prompts))  # and warms up
    warm_up = make_spec(args.lake, "warm-up")
    plan_job(warm_up, DS)
    check(warm_up, plain)
    shared = tokenize_shared(warm_up, prompts)
    if not np.array_equal(np.concatenate([each.token_ids for each in shared]), plain.token_ids):
        sys.exit("token ids of prompts in pieces differ from the tokenizer's own; no figures")
    del shared
    for repetition in range(args.repetitions):
        spec = make_spec(args.lake, str(repetition))
        timed("tokenize_all", lambda: tokenize_all(tokenizer.encode_batch, prompts))
        timed("plan", partial(plan_job, spec, DS))
        timed("encode_batch_fast", lambda: tokenize_all(tokenizer.encode_batch_fast, prompts))
        timed("shared", partial(tokenize_shared, spec, prompts))
        check(spec, plain)
    steps = time_steps(make_spec(args.lake, "steps"))
    return {"times": times, "cpu": cpu, "steps": steps, "num_tokens": plain.num_tokens}


def report(args: argparse.Namespace, measured: dict[str, Any]) -> dict[str, Any]:
    times = measured["times"]
    median = {name: statistics.median(values) for name, values in times.items()}
    return {
        "benchmark": "plan_stage",
        "num_prompts": args.num_prompts,
        "num_tokens": measured["num_tokens"],
        "wall_s": median["plan"],
        "tokenize_all_wall_s": median["tokenize_all"],
        "time_ratio_vs_tokenize_all": round(median["plan"] / median["tokenize_all"], 3),
        "ids_identical": True,  # it would have stopped
        "encode_batch_fast_wall_s": median["encode_batch_fast"],
        "time_ratio_vs_encode_batch_fast": round(median["plan"] / median["encode_batch_fast"], 3),
        "shared_wall_s": median["shared"],
        "shared_ratio_vs_tokenize_all": round(median["shared"] / median["tokenize_all"], 3),
        "cpu_s": {name: statistics.median(values) for name, values in measured["cpu"].items()},
        "steps_s": measured["steps"],
        "spread_s": {name: max(values) - min(values) for name, values in times.items()},
        "share_degree": args.share_degree,
        "shared_tokens": args.shared_tokens,
        "distinct_tokens": args.distinct_tokens,
        "vocab_size": args.vocab_size,
        "seed": args.seed,
        "repetitions": args.repetitions,
        "warm_up": "each measure once but encode_batch_fast",
        "tokenizers_parallelism": os.environ.get("TOKENIZERS_PARALLELISM"),
        "versions": {
            "python": platform.python_version(),
            **{name: version(name) for name in ("tokenizers", "transformers", "pyarrow", "numpy")},
        },
        "machine": f"{platform.machine()}, {os.cpu_count()} cores",
        "git_sha": git_sha(),
    }


def git_sha() -> str | None:
    command = ["git", "rev-parse", "HEAD"]
    found = subprocess.run(command, capture_output=True, text=True, check=False)
    return found.stdout.strip() if found.returncode == 0 else None


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--num-prompts", type=int, default=7000)
    parser.add_argument("--share-degree", type=int, default=7, help="prompts per document")
    parser.add_argument("--shared-tokens", type=int, default=1100, help="of a document, about")
    parser.add_argument("--distinct-tokens", type=int, default=400, help="of a question, about")
    parser.add_argument("--vocab-size", type=int, default=30_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--repetitions", type=int, default=3)
    args = parser.parse_args()
    if min(args.num_prompts, args.share_degree, args.repetitions) < 1:
        parser.error("prompts, share degree and repetitions must be at least 1")
    return args


def main() -> None:
    args = parse_args()
    logging.basicConfig(level=logging.WARNING, format="%(message)s")
    texts = [document.text for document in demo_documents(10**9)]
    tokenizer = train_tokenizer(texts, args.vocab_size)
    with tempfile.TemporaryDirectory(prefix="batchllm-bench-") as folder:
        args.lake = Path(folder)
        make_model(args.lake / "model", tokenizer)
        prompts = make_rows(args, texts, tokenizer)
        print(json.dumps(report(args, measure(args, tokenizer, prompts))))


if __name__ == "__main__":
    main()
