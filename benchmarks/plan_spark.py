"""Plans on Spark against local plans: `python -m benchmarks.plan_spark --rows 300000`.

A standalone master and two workers of one core each, on loopback. The table is that of
`benchmarks.plan_stage`: prompts of some 1,500 tokens, several for each document, in random order.
A few rows, for which our loops are compiled, a third of the rows, and then all of them are planned
by Spark, each time with new executors; all of them are planned locally, too. There are no figures
unless each row is in each plan once.

    saved_share     tokens that Spark's plan saves / those that the local plan saves
    marginal_us     CPU time of executors (JVM and Python) for all rows, less that for a third,
                    divided by the rows between
    shuffled_bytes  that executors have written for each other, compressed; likewise a row
    key_bytes       the same before, of prompts: four for each token
    peak_bytes      resident memory of the largest executor, its JVM and its Python together
"""

import argparse
import json
import logging
import os
import sys
import tempfile
import time
from collections import Counter
from dataclasses import asdict
from pathlib import Path
from typing import Any

from demo_table import demo_documents

from batchllm_operator.plan.plan_job import plan_job
from batchllm_operator.spark.plan_job import plan_on_spark
from batchllm_operator.spec import JobSpec
from batchllm_operator.stored_plan.stored_plan import StoredPlan
from benchmarks.memory import peak_rss_bytes
from benchmarks.plan_stage import (
    DS,
    WARM_UP_ROWS,
    make_model,
    make_spec,
    make_table,
    train_tokenizer,
)
from benchmarks.provenance import git_sha, print_last_line
from benchmarks.spark_cluster import CONF, spark_cluster


def with_cluster(spec: JobSpec, master: str, log: Path) -> JobSpec:
    conf = {
        **CONF,
        "spark.master": master,
        "spark.driver.memory": "1g",
        "spark.eventLog.enabled": "true",
        "spark.eventLog.dir": str(log),
        "spark.eventLog.compress": "false",
        "spark.eventLog.rolling.enabled": "false",
    }
    planner = spec.model_dump(mode="json")["planner"] | {"spark": {"conf": conf}}
    return JobSpec.model_validate({**spec.model_dump(mode="json"), "planner": planner})


def planned_once(plan: StoredPlan, num_rows: int) -> bool:
    times_planned: Counter[int] = Counter()
    for shard_idx in range(len(plan.manifest.shards)):
        with plan.open_shard(shard_idx) as shard:
            for batch in shard.iter_batches(columns=["row_idxs"]):
                times_planned.update(batch.column(0).flatten().to_pylist())
    return times_planned == Counter(range(num_rows))


def saved_tokens(plan: StoredPlan) -> int:
    counts = plan.manifest.counts
    return counts.num_logical_tokens - counts.num_planned_tokens


def shuffled_bytes(log: Path) -> dict[str, int]:
    """What tasks have written for other tasks, and to disk for want of memory."""
    (file,) = log.iterdir()
    written = spilled = 0
    for line in file.read_text().splitlines():
        metrics = json.loads(line).get("Task Metrics") or {}
        written += metrics.get("Shuffle Write Metrics", {}).get("Shuffle Bytes Written", 0)
        spilled += metrics.get("Disk Bytes Spilled", 0)
    return {"shuffled_bytes": written, "spilled_bytes": spilled}


def measure(
    lake: Path, folder: Path, table: str, num_rows: int
) -> tuple[dict[str, Any], StoredPlan]:
    """One plan by Spark, with executors of its own."""
    from pyspark.sql import SparkSession

    os.environ["PYSPARK_PYTHON"] = sys.executable
    with spark_cluster(folder) as cluster:
        log = folder / "log"
        log.mkdir()
        spec = with_cluster(make_spec(lake, f"spark-{table}", None, table), cluster.master, log)
        builder = SparkSession.builder.appName("plan_spark")
        for name, value in spec.planner.spark.conf.items():
            builder = builder.config(name, value)
        session = builder.getOrCreate()
        started_at, cpu_before = time.perf_counter(), time.process_time()
        with cluster.watched():
            plan = plan_on_spark(spec, DS)
        wall_s, driver_s = time.perf_counter() - started_at, time.process_time() - cpu_before
        session.stop()
    if not planned_once(plan, num_rows):
        sys.exit("a row isn't planned once; no figures")
    figures = {
        "rows": num_rows,
        "wall_s": wall_s,
        "driver_cpu_s": driver_s,
        **asdict(cluster.usage),
    }
    figures |= {name: round(seconds, 2) for name, seconds in figures.items() if name.endswith("_s")}
    figures["shards"] = len(plan.manifest.shards)
    figures["key_bytes"] = plan.manifest.counts.num_logical_tokens * 4
    return figures | shuffled_bytes(log), plan


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, default=300_000)
    parser.add_argument("--json", type=Path, help="a file for the last line, too")
    args = parser.parse_args()
    if args.rows < 3:
        parser.error("--rows must be at least 3")
    logging.basicConfig(level=logging.WARNING, format="%(message)s")
    texts = [document.text for document in demo_documents(10**9)]
    tokenizer = train_tokenizer(texts)
    with tempfile.TemporaryDirectory(prefix="batchllm-bench-") as folder:
        rows: list[dict[str, Any]] = []
        for name, num_rows in (("third", args.rows // 3), ("whole", args.rows)):
            lake = Path(folder, name)
            make_model(lake / "model", tokenizer)
            make_table(num_rows, texts, tokenizer, lake)
            if not rows:
                measure(lake, Path(folder, "warm-up"), "warm-up", min(num_rows, WARM_UP_ROWS))
            row, plan = measure(lake, Path(folder, f"spark-{name}"), "documents", num_rows)
            print(json.dumps(row), flush=True)
            rows.append(row)
        driver_peak_bytes = peak_rss_bytes()
        # With as many shards, so that cuts between shards cost both the same.
        local = plan_job(make_spec(lake, "local", len(plan.manifest.shards)), DS)
    third, whole = rows

    def marginal(*names: str) -> float:
        both = [sum(row[name] for name in names) for row in rows]
        return float((both[1] - both[0]) / (whole["rows"] - third["rows"]))

    report = {
        "benchmark": "plan_spark",
        "plans": rows,
        "saved_share": round(saved_tokens(plan) / max(1, saved_tokens(local)), 5),
        "saving": [round(made.manifest.counts.planned_saving_ratio, 5) for made in (plan, local)],
        "marginal_us": round(marginal("jvm_s", "python_s") * 1e6, 1),
        "marginal_shuffled_bytes": round(marginal("shuffled_bytes")),
        "marginal_key_bytes": round(marginal("key_bytes")),
        "driver_peak_bytes": driver_peak_bytes,
        "git_sha": git_sha(),
    }
    print_last_line(report, args.json)


if __name__ == "__main__":
    main()
