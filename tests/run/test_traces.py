"""Traces on their way from a local folder to the lake."""

from __future__ import annotations

from pathlib import Path

import pytest

from batchllm_operator.run.engine_job import traced
from batchllm_operator.storage import Folder


def test_every_trace_of_every_attempt_is_published(lake_uri: str) -> None:
    folder = Folder.open(lake_uri).child("shard-00000")
    for attempt in (b"one", b"two"):
        with traced(folder) as local:
            (local / "engine-000.parquet").write_bytes(attempt)
            (local / "engine-001.parquet").write_bytes(attempt * 2)
    names = sorted(folder.find())
    assert len(names) == 4
    assert sorted(folder.read_bytes(name) for name in names) == [
        b"one",
        b"oneone",
        b"two",
        b"twotwo",
    ]
    assert all(name.startswith("trace-2") and name.endswith(".parquet") for name in names)


def test_a_trace_survives_the_run_that_failed(tmp_path: Path) -> None:
    folder = Folder.open(str(tmp_path / "shard"))
    with pytest.raises(KeyError), traced(folder) as local:
        (local / "engine-000.parquet").write_bytes(b"so far")
        raise KeyError
    [name] = folder.find()
    assert folder.read_bytes(name) == b"so far"
    assert not local.exists()


def test_a_trace_that_cannot_be_published_does_not_cost_the_run(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_bytes(b"in the way")
    with traced(Folder.open(str(tmp_path / "file" / "shard"))) as local:
        (local / "engine-000.parquet").write_bytes(b"so far")
    assert "is lost" in caplog.text
