"""`batchllm simulate` as a process, imports and all."""

import subprocess
import sys
from pathlib import Path

from inspections.test_simulate import SMALL


def test_nothing_but_progress_stands_beside_the_table(tmp_path: Path) -> None:
    """In a process of its own, as vLLM remarks on things when it is imported, too."""
    command = [sys.executable, "-m", "batchllm_operator", "simulate", *map(str, SMALL)]
    done = subprocess.run(
        [*command, "--policies", "stock_sorted", "--out", str(tmp_path)],
        capture_output=True,
        text=True,
        check=True,
    )
    loading, progress = done.stderr.splitlines()
    assert loading.startswith("INFO: loading vLLM's scheduler")
    assert progress.startswith("made-up requests, stock_sorted: ")
    assert done.stdout.startswith("made-up requests: 20 requests, ")
    assert len(done.stdout.splitlines()) == 5
