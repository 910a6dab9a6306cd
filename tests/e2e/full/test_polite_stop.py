"""A run with a real engine that is asked to stop. Other signals, with doubles: tests/run."""

import signal

from support.demo_job import Demo
from support.stopped_run import check_stop_and_resume


def test_a_stopped_run_leaves_nothing_and_is_resumed(demo: Demo) -> None:
    check_stop_and_resume(demo, signal.SIGTERM)
