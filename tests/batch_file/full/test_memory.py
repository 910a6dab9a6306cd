"""Memory doesn't grow with the lines of a batch file."""

import json
import os
from pathlib import Path

from demo_model import build_demo_model
from support.batch_lines import chat, write_lines
from support.demo_job import OFFLINE
from support.fork_server import ForkServer

MOST_MIB = 250


def test_a_hundred_thousand_lines_take_little_more_than_ten_thousand(
    tmp_path: Path, engines: ForkServer
) -> None:
    build_demo_model(tmp_path / "model", documents=["a question, and what it is about"])
    used = [peak_mib(tmp_path, num_lines, engines) for num_lines in (10_000, 100_000)]
    assert used[1] - used[0] < MOST_MIB, used


def peak_mib(folder: Path, num_lines: int, engines: ForkServer) -> float:
    """The most memory that a whole call takes."""
    text = "a question, and what it is about " * 20
    lines = write_lines(folder / "in", (chat(f"{i}", f"{text}{i}") for i in range(num_lines)))
    arguments = ["-i", str(lines), "-o", str(folder / "out"), "--model", str(folder / "model")]
    arguments += ["--engine", json.dumps({"backend": "fake"})]
    result = folder / "peak"
    ended = engines.run(
        "support.peak_memory",
        [str(result), "run-batch", *arguments],
        env={**os.environ, **OFFLINE},
        timeout=1200,
    )
    assert ended.returncode == 0, ended.stderr
    with (folder / "out").open("rb") as out:
        assert sum(1 for _ in out) == num_lines
    return float(result.read_text())
