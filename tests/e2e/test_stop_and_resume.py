"""A run with a real engine that is killed, and another that takes it up."""

import signal

from support.demo_job import Demo
from support.stopped_run import check_stop_and_resume


def test_a_killed_run_leaves_nothing_and_its_texts_are_those_of_one_that_ran_through(
    real: Demo,
) -> None:
    check_stop_and_resume(real, signal.SIGKILL)
