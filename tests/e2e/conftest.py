"""Real vLLM on CPU: with the demo's random model over its table, and with trained weights."""

import os
from pathlib import Path
from typing import Any

import pytest
from demo_model import build_demo_model
from demo_table import build_demo_table
from support.demo_job import DS, OFFLINE, Demo
from support.fork_server import ForkServer
from support.messy_table import write_messy_table
from support.warm_engines import WarmProcess


@pytest.fixture(scope="session")
def warm(engines: ForkServer) -> WarmProcess:
    return WarmProcess(engines, {**os.environ, **OFFLINE})


@pytest.fixture(scope="session")
def demo(
    tmp_path_factory: pytest.TempPathFactory,
    commands: ForkServer,
    engines: ForkServer,
    warm: WarmProcess,
) -> Demo:
    folder = tmp_path_factory.mktemp("demo")
    build_demo_table(folder / "documents", ds=DS)
    build_demo_model(folder / "model")
    return Demo(folder, commands, engines, warm)


@pytest.fixture(scope="session")
def real(
    tmp_path_factory: pytest.TempPathFactory,
    commands: ForkServer,
    engines: ForkServer,
    warm: WarmProcess,
    smollm2: Path,
) -> Demo:
    """The same of SmolLM2-135M-Instruct, over messy rows."""
    folder = tmp_path_factory.mktemp("real")
    (folder / "model").symlink_to(smollm2)
    write_messy_table(folder / "documents", DS)
    return Demo(folder, commands, engines, warm)


@pytest.fixture(scope="session")
def reference(real: Demo) -> Any:
    """That model in transformers, in float32."""
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(real.model, dtype="float32").eval()
