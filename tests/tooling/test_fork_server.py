"""What a fork server starts is a process like any other."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.fork_server import ForkServer


@pytest.fixture(scope="module")
def server() -> Iterator[ForkServer]:
    server = ForkServer("json.tool")
    yield server
    server.close()


def test_environment_folder_arguments_and_output(server: ForkServer, tmp_path: Path) -> None:
    (tmp_path / "in.json").write_text('{"a": 1}')
    ended = server.run("json.tool", ["--compact", "in.json"], cwd=tmp_path)
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, '{"a":1}\n', "")
    ended = server.run("site", ["--user-base"], env={"PYTHONUSERBASE": "/a folder"})
    assert ended.stdout == "/a folder\n"


def test_codes_of_errors(server: ForkServer, tmp_path: Path) -> None:
    assert server.run("json.tool", ["--no-such-option"]).returncode == 2
    ended = server.run("no_such_module", [])
    assert ended.returncode == 1
    assert "No module named no_such_module" in ended.stderr


def test_signals_end_the_one_that_they_are_for(server: ForkServer) -> None:
    first, second = (server.start("http.server", ["--bind", "127.0.0.1", "0"]) for _ in range(2))
    assert os.getsid(first.pid) == first.pid
    first.kill()
    assert first.wait(60) == -signal.SIGKILL
    assert second.poll() is None
    second.terminate()
    assert second.wait(60) == -signal.SIGTERM


def test_processes_end_with_their_server() -> None:
    server = ForkServer("http.server")
    process = server.start("http.server", ["--bind", "127.0.0.1", "0"])
    server.close()
    assert process.wait(60) == -signal.SIGKILL
