"""A task that is killed takes its command along, as processes of their own."""

from __future__ import annotations

import errno
import os
import select
import subprocess
import sys
import time
from pathlib import Path


def open_when_read(fifo: Path, process: subprocess.Popen[bytes]) -> int:
    """Open `fifo` for writing as soon as something below `process` reads it."""
    while process.poll() is None:
        try:
            return os.open(fifo, os.O_WRONLY | os.O_NONBLOCK)
        except OSError as error:
            assert error.errno == errno.ENXIO  # no reader yet
            time.sleep(0.05)
    raise AssertionError(f"ended with exit code {process.returncode} before it read {fifo}")


def test_death_of_the_task_by_sigkill_ends_the_real_command(tmp_path: Path) -> None:
    spec = tmp_path / "spec.yaml"
    os.mkfifo(spec)  # `batchllm plan` waits in reading it
    task = (
        "import sys\n"
        "from batchllm_operator.operators.command import BatchLLMCommandOperator\n"
        "BatchLLMCommandOperator(task_id='task').commands().run(\n"
        "    'plan', '--job', sys.argv[1], '--ds', '2026-01-31')\n"
    )
    process = subprocess.Popen([sys.executable, "-c", task, str(spec)], stdout=subprocess.DEVNULL)
    writer = open_when_read(spec, process)
    process.kill()
    process.wait()
    poll = select.poll()
    poll.register(writer, 0)  # POLLERR: the reader has ended
    assert poll.poll(60_000) == [(writer, select.POLLERR)]
    os.close(writer)
