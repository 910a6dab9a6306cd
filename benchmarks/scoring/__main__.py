"""Labels by one step against labels as text, at the size of a GPU and on this machine's CPU.

    python -m benchmarks.scoring
    python -m benchmarks.scoring --simulated                  # a minute, on any machine
    python -m benchmarks.scoring --repetitions 5              # the machine must be idle

Rows are query and document in either order: first what many rows share. First their steps are
played through vLLM's scheduler and ours for an H200. Then they are run with a tiny model:

    batchllm            a `classify` job: its run, with parts written, without the engine's start
    stock_sorted        LLM.generate over sorted prompts, with the same tokens' log-probabilities
    stock_given         ... in the table's order
    stock_sorted_text   ... that generates the label as text, of 4 tokens
    stock_sorted_json   ... in JSON, of 24 tokens

The policies take turns, each in a process of its own. Probabilities must be equal within 1e-4, or
there are no figures. `wall_of_ours` is a policy's time over that of `batchllm`, the median of the
repetitions' ratios. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.provenance import print_last_line, provenance_of_another_process
from benchmarks.scoring.measured import TEMPLATES, measured
from benchmarks.scoring.simulated import GPU, MODEL, simulated, targets


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--simulated", action="store_true", help="only at the size of a GPU")
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--json", type=Path, help="also write the JSON object to this file")
    args = parser.parse_args()
    report: dict[str, Any] = {"benchmark": "scoring", "model": MODEL, "gpu": GPU}
    report["simulated"] = simulated(3000)
    report["targets"] = targets(report["simulated"])
    for row in report["simulated"]:
        _print(row, "answer", "steps", "steps_of_bound", "computed_of_optimal", "predicted_s")
    if not args.simulated:
        report["measured"] = []
        for name in TEMPLATES:
            with tempfile.TemporaryDirectory(prefix="batchllm-bench-") as folder:
                rows = measured(Path(folder), name, args.repetitions)
            report["measured"] += rows
            for row in rows:
                _print(row, "wall_s", "wall_of_ours", "cpu_s", "computed_tokens", "steps")
    print_last_line(report | provenance_of_another_process(), args.json)


def _print(row: dict[str, Any], *names: str) -> None:
    figures = "  ".join(f"{name} {row[name]}" for name in names)
    print(f"{row['workload']:16}{row['policy']:20}{figures}", flush=True)


if __name__ == "__main__":
    main()
