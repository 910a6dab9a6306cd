"""Each loop that tries again does so a limited number of times, or for a limited time, and after
pauses that differ between those who wait; tests/operators/kubernetes/FAULTS.md lists them."""

from pathlib import Path
from typing import Any

import pytest
from support.pauses import MANY, Clock, check_pauses

from batchllm_operator.errors import StorageError
from batchllm_operator.lake import publishing
from batchllm_operator.lake.delta import log as delta_log
from batchllm_operator.lake.publishing import Publication, RefusedCommit
from batchllm_operator.storage import Folder
from batchllm_operator.storage import folder as folder_module


def test_conditional_writes_that_meet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = Folder.open(str(tmp_path))

    def fail(*_: object) -> None:
        cause: Any = Exception()
        cause.response = {"Error": {"Code": "ConditionalRequestConflict"}}
        raise OSError("conflict") from cause

    monkeypatch.setattr(Folder, "_create", fail)
    series = []
    for _ in range(MANY):
        clock = Clock()
        monkeypatch.setattr(folder_module, "time", clock)
        with pytest.raises(StorageError, match="conflict"):
            folder.create("x", b"")
        series.append(clock.pauses)
    assert {len(pauses) for pauses in series} == {4}
    check_pauses(series, 6.4)


class Refused:
    """An attempt whose commits are all refused."""

    def look(self) -> None:
        """The partition stays empty."""

    def commit(self) -> RefusedCommit:
        return RefusedCommit("not now")


def test_commits_that_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    series = []
    for _ in range(MANY):
        clock = Clock()
        monkeypatch.setattr(publishing, "time", clock)
        with pytest.raises(StorageError, match="wasn't published; commit again: not now"):
            publishing.publish_once("t", Publication("j", "p", "a"), None, Refused())
        series.append(clock.pauses)
    assert {len(pauses) for pauses in series} == {20}
    check_pauses(series, 2.0)


def test_delta_rs_tries_as_often_as_the_user_says(monkeypatch: pytest.MonkeyPatch) -> None:
    """It pauses for at most 15 s, of random length, and gives up after three minutes."""
    monkeypatch.delenv("AWS_MAX_ATTEMPTS", raising=False)
    assert "max_retries" not in delta_log._options("s3://lake"), "its own default: ten"
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "3")
    assert delta_log._options("s3://lake")["max_retries"] == "2"


def test_reads_of_s3fs_are_tried_a_few_times(s3_environment: None) -> None:
    """Below its tries are botocore's, whose pauses are random."""
    assert Folder.open("s3://bucket").fs.retries == 5
