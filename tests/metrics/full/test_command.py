"""A run's metrics, whose port an argument gives."""

from pathlib import Path

from metrics.test_command import check_scraped
from support.fork_server import ForkServer


def test_a_run_is_scraped_while_it_goes_on(tmp_path: Path, commands: ForkServer) -> None:
    check_scraped(tmp_path, commands, by_environment=False)
