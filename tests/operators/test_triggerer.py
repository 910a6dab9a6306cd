"""Whether a task is deferred that doesn't say."""

from pathlib import Path

import pytest
from support.health import api_server, health
from support.kubernetes.certificates import make_identity

from batchllm_operator.operators.triggerer import defers_by_default

URL = "AIRFLOW__CORE__EXECUTION_API_SERVER_URL"


@pytest.fixture(params=["True", "False"])
def default(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Airflow's setting."""
    monkeypatch.setenv("AIRFLOW__OPERATORS__DEFAULT_DEFERRABLE", request.param)
    return bool(request.param == "True")


@pytest.mark.parametrize(
    ("status", "runs"), [("healthy", True), ("unhealthy", False), (None, False)]
)
def test_an_answer_counts_whatever_the_setting_says(
    status: str | None, runs: bool, default: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    with api_server([health(status)]) as server:
        monkeypatch.setenv(URL, f"{server.url}/execution/")
        assert defers_by_default(lambda line: None) is runs


@pytest.mark.parametrize(
    "answer",
    [
        None,
        b"<html>log in first</html>",
        b"[]",
        b"{}",
        b'{"metadatabase": {"status": "healthy"}}',
        b'{"metadatabase": "healthy", "triggerer": [1]}',
        health("unhealthy", metadatabase="unhealthy"),
    ],
)
def test_without_an_answer_the_setting_counts_and_the_next_task_asks_again(
    answer: bytes | None, default: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []
    with api_server([answer, health("healthy")]) as server:
        monkeypatch.setenv(URL, f"{server.url}/execution/")
        assert defers_by_default(said.append) is default
        assert f"default_deferrable is {default}" in said[0]
        assert defers_by_default(said.append) is True


@pytest.mark.parametrize("url", ["http://127.0.0.1:1/execution/", "in-process://", "ftp://h/"])
def test_without_an_api_server_the_setting_counts(
    url: str, default: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(URL, url)
    assert defers_by_default(lambda line: None) is default


@pytest.mark.parametrize("setting", ["SSL_CERT", "SSL_CA_FILE"])
def test_a_private_authority_is_trusted_as_tasks_trust_it(
    setting: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    identity = make_identity(tmp_path, "airflow")
    said: list[str] = []
    with api_server([health("healthy")], identity.server_context()) as server:
        monkeypatch.setenv(URL, f"{server.url}/execution/")
        assert defers_by_default(said.append) is False
        assert "CERTIFICATE_VERIFY_FAILED" in said[0]
        monkeypatch.setenv(f"AIRFLOW__API__{setting}", str(identity.authority))
        assert defers_by_default(said.append) is True
        monkeypatch.setenv(f"AIRFLOW__API__{setting}", str(tmp_path / "gone.crt"))
        assert defers_by_default(said.append) is False
