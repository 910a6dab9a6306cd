"""What the scheduler does without the libraries of a trace."""

from support.fork_server import ForkServer


def test_the_scheduler_needs_no_pyarrow(engines: ForkServer) -> None:
    """On GPU hosts with vLLM alone: a trace needs it, scheduling doesn't."""
    ended = engines.run("support.engine_scripts", ["without_pyarrow"])
    assert ended.stdout == "true\n", ended.stderr
