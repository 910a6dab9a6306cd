"""A run that is stopped in other ways."""

import signal
from pathlib import Path

import pytest
from support.fork_server import ForkServer
from test_cli import Batchllm, check_stop, job

__all__ = ["job"]


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGKILL])
def test_a_stopped_run_keeps_whole_parts_and_goes_on(
    job: Path, how: signal.Signals, batchllm: Batchllm, commands: ForkServer
) -> None:
    check_stop(job, how, batchllm, commands)
