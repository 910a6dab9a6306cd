"""docs/metrics.md lists exactly what there is."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from support.shard_progress import shard_progress

from batchllm_operator.metrics import ShardCollector

PAGE = Path(__file__).resolve().parents[2] / "docs" / "metrics.md"
TEXT = PAGE.read_text(encoding="utf-8")
UNITS = {"_seconds": "s", "_ratio": "ratio", "_per_second": "tokens/s"}


def rows(prefix: str) -> dict[str, tuple[str, str, set[str], str]]:
    """Type, unit, labels and meaning by name, of the table whose names begin with `prefix`."""
    found = {}
    for line in TEXT.splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if len(cells) == 5 and cells[0].startswith(f"`{prefix}"):
            name = cells[0].strip("`")
            assert name not in found
            labels = set(re.findall(r"`(\w+)`", cells[3]))
            found[name] = (cells[1], cells[2], labels, cells[4])
    return found


def test_what_prometheus_gets_is_listed() -> None:
    found = {}
    collector = ShardCollector(job="j", ds="d", worker=5)
    with collector.watching(lambda: shard_progress(worker=5)):
        families = list(collector.collect())
    for family in families:
        constant = {"job_name", "ds", "worker"}
        if not family.name.startswith("batchllm_worker_"):
            constant.add("shard")
        for sample in family.samples:
            assert sample.labels.keys() >= constant
            labels = sample.labels.keys() - constant
            found[sample.name] = (family.type, labels, family.documentation)
    listed = {
        name: (kind, labels, text) for name, (kind, _, labels, text) in rows("batchllm_").items()
    }
    assert listed == found


def test_the_ending_of_a_name_is_its_unit() -> None:
    for name, (kind, unit, _, _) in rows("batchllm_").items():
        assert name.endswith("_total") == (kind == "counter")
        for ending, its_unit in UNITS.items():
            if name.endswith(ending) and not (ending == "_seconds" and "_per_" in name):
                assert unit == its_unit


def test_queries_name_what_there_is() -> None:
    listed = rows("batchllm_").keys()
    shown = "\n".join(line for line in TEXT.splitlines() if line.startswith("    "))
    named = set(re.findall(r"batchllm_\w+", shown))
    assert named and named <= listed


def test_what_airflow_gets_is_listed() -> None:
    metrics = pytest.importorskip("batchllm_operator.operators.metrics")
    usual = {metrics.JOB_TAG, metrics.DAG_TAG}
    sent = {
        each.name: (each.kind, usual) for stage in metrics.STAGE_METRICS.values() for each in stage
    }
    listed = rows("batchllm.")
    assert {name: (kind, tags) for name, (kind, _, tags, _) in listed.items()} == sent
    assert all(unit == "ms" for kind, unit, _, _ in listed.values() if kind == "timer")
