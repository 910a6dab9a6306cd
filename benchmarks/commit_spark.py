"""Commits on Spark against local commits: `python -m benchmarks.commit_spark --rows 1000000`.

A plan of short prompts, run with the fake engine. Its outputs are committed by Spark, on a
standalone master and two workers of one core each, on loopback; then, from a copy of the
same plan and outputs, by one process. There are no figures unless both tables have the same rows.

    driver_peak_bytes   resident memory of the driver, its JVM and its Python together, at most
    local_peak_bytes    that of the local commit
    executor_us         CPU time of executors (JVM and Python) a row, their start included, at most
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, Final

import pyarrow as pa

from batchllm_operator.plan.plan_job import plan_job
from batchllm_operator.run.run_shards import run_worker
from batchllm_operator.spec.loading import parse_spec_json
from benchmarks.faults.tables import DS, Tables, set_environment
from benchmarks.lake import Job, make_input
from benchmarks.provenance import git_sha, print_last_line
from benchmarks.spark_cluster import CONF, Cluster, spark_cluster

KINDS: Final = ("delta", "iceberg")
CHARACTERS: Final = 40


def committed(plan_uri: str, *arguments: str) -> dict[str, Any]:
    """Commit in a process of its own, whose memory is looked at with that of its children."""
    command = [sys.executable, "-P", "-m", "batchllm_operator", "commit", "--plan", plan_uri]
    started_at = time.perf_counter()
    # The shell, because a cluster's usage is that of the processes below its own.
    with subprocess.Popen(["sh", "-c", '"$@"; exit $?', "sh", *command, *arguments]) as shell:
        seen = Cluster("", [shell])
        with seen.watched():
            code = shell.wait()
    if code != 0:
        sys.exit(f"{' '.join(command)}: exit code {code}; no figures")
    usage = seen.usage
    return {
        "wall_s": round(time.perf_counter() - started_at, 1),
        "peak_bytes": usage.peak_bytes,
        "peak_python_bytes": usage.peak_python_bytes,
    }


def rows_of(tables: Tables) -> pa.Table:
    """The partition by its keys, without `run_id`."""
    return tables.output().drop_columns(["run_id"]).sort_by("row_key").combine_chunks()


def measure(root: Path, kind: str, num_rows: int) -> dict[str, Any]:
    """Commit to a table of one format, on Spark and then locally."""
    job = Job(root, kind, CHARACTERS)
    set_environment(root, None)
    make_input(job, num_rows)
    plan = plan_job(parse_spec_json(job.spec(), source="benchmark"), DS)
    run_worker(plan)
    job.remember()
    os.environ |= {"PYSPARK_PYTHON": sys.executable, "SPARK_LOCAL_IP": "127.0.0.1"}
    with spark_cluster(root / "spark") as cluster:
        conf = {**CONF, "spark.master": cluster.master, "spark.driver.memory": "512m"}
        settings = root / "spark-defaults"
        settings.mkdir()
        lines = "".join(f"{name} {value}\n" for name, value in conf.items())
        (settings / "spark-defaults.conf").write_text(lines)
        os.environ["SPARK_CONF_DIR"] = str(settings)
        with cluster.watched():
            on_spark = committed(plan.folder.uri, "--on", "spark")
        usage = cluster.usage
        on_spark["executor_us"] = round((usage.jvm_s + usage.python_s) / num_rows * 1e6, 1)
    by_spark = rows_of(job.tables)
    job.restore()
    local = committed(plan.folder.uri, "--on", "local")
    if by_spark.num_rows != num_rows or not by_spark.equals(rows_of(job.tables)):
        sys.exit(f"{kind}: Spark's rows aren't those of the local commit; no figures")
    figures = {"table": kind, "rows": num_rows, "spark": on_spark, "local": local}
    print(json.dumps(figures), flush=True)
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--json", type=Path, help="a file for the last line, too")
    args = parser.parse_args()
    commits = []
    with tempfile.TemporaryDirectory(prefix="batchllm-bench-") as folder:
        for kind in KINDS:
            commits.append(measure(Path(folder, kind), kind, args.rows))
    peaks = {
        part: max(commit[part]["peak_bytes"] for commit in commits) for part in ("spark", "local")
    }
    report = {
        "benchmark": "commit_spark",
        "commits": commits,
        "driver_peak_bytes": peaks["spark"],
        "local_peak_bytes": peaks["local"],
        "executor_us": max(commit["spark"]["executor_us"] for commit in commits),
        "git_sha": git_sha(),
    }
    print_last_line(report, args.json)


if __name__ == "__main__":
    main()
