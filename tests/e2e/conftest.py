"""Real vLLM on CPU over the demo table."""

from __future__ import annotations

import pytest
from support.demo_job import DS, Demo
from support.fork_server import ForkServer

from batchllm_operator.demo.model import build_demo_model
from batchllm_operator.demo.table import build_demo_table


@pytest.fixture(scope="session")
def demo(
    tmp_path_factory: pytest.TempPathFactory, commands: ForkServer, engines: ForkServer
) -> Demo:
    folder = tmp_path_factory.mktemp("demo")
    build_demo_table(folder / "documents", ds=DS)
    build_demo_model(folder / "model")
    return Demo(folder, commands, engines)
